"""What held-out text says beside bits per byte: agreement with a teacher, and accuracy.

Agreement is the share of one-to-one chunks in which both models choose the same token, accuracy
that of labels that the student predicts first.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import LOSS_REGISTRY
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.training.validation import (
    Agreement,
    TextNats,
    accuracy,
    first_choices,
    same_tokens,
)
from tests.huggingface.tiny_models import save_tokenizer
from tests.process_group import run_ranks

ROWS, STUDENT_T, TEACHER_T = 6, 40, 48
STUDENT_V, TEACHER_V = 13, 9
"""Odd: each of two shards has 8 and 5 columns, the last with padding behind it."""


def case():
    """Logits, chunks with gaps and of several sizes, and a map that is neither one to one nor
    onto."""
    generator = torch.Generator().manual_seed(3)
    draw = {"generator": generator}
    student_ids, teacher_ids = [], []
    chunk = 0
    for _ in range(ROWS):
        rows = [[], []]
        while len(rows[0]) < STUDENT_T - 3 and len(rows[1]) < TEACHER_T - 3:
            for row in rows:
                row += [-1] * int(torch.randint(3, (), **draw) == 0)
                row += [chunk] * int(torch.randint(1, 3, (), **draw))
            chunk += 1
        for row, length, found in zip(
            rows, (STUDENT_T, TEACHER_T), (student_ids, teacher_ids), strict=True
        ):
            found.append(row + [-1] * (length - len(row)))
    return {
        "student_logits": torch.randn(ROWS, STUDENT_T, 16, **draw),
        "teacher_logits": torch.randn(ROWS, TEACHER_T, 16, **draw),
        "student_ids": torch.tensor(student_ids),
        "teacher_ids": torch.tensor(teacher_ids),
        "same_tokens": torch.randint(-1, TEACHER_V, (STUDENT_V,), **draw),
    }


def measure(rank):
    """By vocabulary shards, by parts of sequences, by rows, and of no rows."""
    given = case()
    return {
        "vocabulary": _share(given, range(ROWS), shards=2),
        "sequence": _share(given, range(ROWS), context=True),
        "rows": _share(given, range(rank, ROWS, 2), is_replica=True),
        "hits": _hits(rank),
        "none": Agreement(given["same_tokens"]).share(_group([rank])),
    }


def _share(given, rows, *, shards=1, context=False, is_replica=False):
    rank = ContextRank.of(dist.group.WORLD) if context else None
    chosen = []
    for side, size in (("student", STUDENT_V), ("teacher", TEACHER_V)):
        logits = given[f"{side}_logits"][list(rows)]
        own = dist.get_rank() if shards > 1 else 0
        width = 16 // shards
        shard = VocabShard(
            start=own * width,
            stop=(own + 1) * width,
            vocab_size=size,
            group=dist.group.WORLD if shards > 1 else None,
        )
        logits = logits if rank is None else rank.cut(logits)
        chosen.append(first_choices(logits[..., shard.start : shard.stop], shard))
    ids = [_from_zero(given[f"{side}_ids"][list(rows)]) for side in ("student", "teacher")]
    agreement = Agreement(given["same_tokens"])
    agreement.add(*chosen, AlignmentBatch.from_chunk_ids(*ids), rank)
    return agreement.share(dist.group.WORLD if is_replica else _group([dist.get_rank()]))


def _labels():
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(STUDENT_V, (ROWS, STUDENT_T), generator=generator)
    logits = case()["student_logits"].clone()
    logits.scatter_add_(2, labels[..., None], torch.ones(*labels.shape, 1))
    return torch.where(labels % 3 == 0, IGNORE_INDEX, labels), logits


def _hits(rank):
    """Accuracy with rows over replicas, of logits and by tiles of hidden states."""
    labels, logits = (part[rank::2] for part in _labels())
    shard = VocabShard(start=0, stop=16, vocab_size=STUDENT_V)
    nats = TextNats(LOSS_REGISTRY["next_token"](), tile_rows=7)
    head = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(5)))[0]
    scores = [
        nats.of_logits(logits, labels, shard),
        nats.of_hidden(logits @ head, lambda rows: rows @ head.t(), labels, shard),
    ]
    return [accuracy([score.hits], dist.group.WORLD) for score in scores]


def _from_zero(ids):
    """The chunks of some rows alone, numbered anew."""
    found = ids[ids >= 0].unique()
    table = torch.full((int(found.max()) + 1,), -1)
    table[found] = torch.arange(len(found))
    return torch.where(ids >= 0, table[ids.clamp_min(0)], ids)


_GROUPS = {}


def _group(ranks):
    """A group of this rank alone; all are made the first time."""
    if not _GROUPS:
        _GROUPS.update({rank: dist.new_group([rank]) for rank in range(dist.get_world_size())})
    return _GROUPS[ranks[0]]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, measure)


def plain():
    given, agreeing, chunks = case(), 0, 0
    for row in range(ROWS):
        for chunk in set(given["student_ids"][row].tolist()) - {-1}:
            student = (given["student_ids"][row] == chunk).nonzero().flatten().tolist()
            teacher = (given["teacher_ids"][row] == chunk).nonzero().flatten().tolist()
            if (len(student), len(teacher)) != (1, 1):
                continue
            chosen = int(given["student_logits"][row, student[0], :STUDENT_V].argmax())
            taught = int(given["teacher_logits"][row, teacher[0], :TEACHER_V].argmax())
            agreeing += int(given["same_tokens"][chosen]) == taught
            chunks += 1
    return agreeing / chunks, chunks


@pytest.mark.parametrize("axis", ["vocabulary", "sequence", "rows"])
def test_every_layout_counts_what_the_definition_does(ranks, axis):
    share, chunks = plain()
    assert 0 < share < 1
    for rank in ranks:
        assert rank[axis] == (share, chunks)


def test_accuracy_is_the_share_of_labels_that_are_the_first_choice(ranks):
    labels, logits = _labels()
    is_label = labels != IGNORE_INDEX
    right = logits[..., :STUDENT_V].argmax(-1)[is_label] == labels[is_label]
    expected = float(right.double().mean())
    assert 0.1 < expected < 0.9
    for rank in ranks:
        assert rank["hits"] == [pytest.approx(expected)] * 2


def test_no_label_has_no_accuracy(ranks):
    assert accuracy([], None) is None


def test_no_chunk_has_no_share(ranks):
    assert ranks[0]["none"] == (None, 0)


def test_same_tokens_have_the_same_bytes_or_role(tmp_path):
    texts = {"student": "a question of the weather", "teacher": "the theory of other things"}
    controls = {"student": ["</s>", "<s>", "<pad>", "<own>"], "teacher": ["<pad>", "<s>", "</s>"]}
    for side, text in texts.items():
        save_tokenizer(tmp_path / side, text=text, control_tokens=[*controls[side]])
    student, teacher = (
        build_tokenizer(TokenizerConfig(model=str(tmp_path / side))) for side in texts
    )
    table = same_tokens(student, teacher, device=torch.device("cpu")).tolist()
    assert table[:4] == [2, 1, 0, -1]
    by_bytes = {teacher.token_bytes(i): i for i in range(3, teacher.vocab_size)}
    expected = [by_bytes.get(student.token_bytes(i), -1) for i in range(4, student.vocab_size)]
    assert table[4:] == expected
    assert len(set(expected)) > 256
    assert -1 in expected
    assert same_tokens(student, student, device=torch.device("cpu")).tolist() == list(
        range(student.vocab_size)
    )
