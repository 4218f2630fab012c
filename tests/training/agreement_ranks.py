"""What spawned ranks run: agreement from shards of a vocabulary, of sequences and of rows."""

import torch
import torch.distributed as dist

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.training.validation import Agreement, first_choices

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
