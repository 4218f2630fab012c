"""ALM against its definition, chunk by chunk; the rules of all objectives are tested elsewhere."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses import DistillationInputs, TeacherTargets
from megatron_ext.losses.objectives.alm import AlmLoss
from megatron_ext.losses.vocabulary_match import BoundaryColumns
from megatron_ext.tokenizers.token_bytes import TokenBytes
from tests.losses.microbatch import Microbatch, known_ahead
from tests.losses.objective_cases import as_kind, inputs_of

VOCABS = (11, 7)
BOUNDARIES = ([2, 5], [0, 4])


def inputs_with(
    student_ids: list[list[int]], teacher_ids: list[list[int]], *, seed: int = 0, scale: float = 2.0
) -> DistillationInputs:
    """fp64 logits, every label trained, of the given chunk ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.tensor(side) for side in (student_ids, teacher_ids)]
    logits = [
        scale * torch.randn(*side.shape, vocab, generator=generator, dtype=torch.float64)
        for side, vocab in zip(ids, VOCABS, strict=True)
    ]
    labels = [
        torch.randint(0, vocab, side.shape, generator=generator)
        for side, vocab in zip(ids, VOCABS, strict=True)
    ]
    shards = [VocabShard(start=0, stop=vocab, vocab_size=vocab) for vocab in VOCABS]
    return DistillationInputs(
        student_logits=logits[0].requires_grad_(),
        student_shard=shards[0],
        labels=labels[0],
        teacher=TeacherTargets(kind="logits", shard=shards[1], logits=logits[1]),
        teacher_labels=labels[1],
        alignment=AlignmentBatch.from_chunk_ids(*ids),
        boundary=BoundaryColumns.of_ids(
            *BOUNDARIES, student_shard=shards[0], teacher_shard=shards[1]
        ),
    )


# Two samples: a chunk of 2 to 1, an unaligned teacher token, chunks to the very end of the row.
STUDENT = [[0, 0, 1, 2, 3, 3], [4, 5, 5, 6, -1, -1]]
TEACHER = [[0, 1, -1, 2, 3], [4, 4, 5, 6, -1]]


def likelihoods(
    inputs: DistillationInputs, side: str
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Each chunk's log-probability, and that of a boundary after it; None where unknown."""
    if side == "student":
        logits, labels, ids = inputs.student_logits, inputs.labels, STUDENT
    else:
        logits, labels, ids = inputs.teacher.logits, inputs.teacher_labels, TEACHER
    log_probs = torch.log_softmax(logits, dim=-1)
    asked = labels.clamp(min=0)
    boundary = BOUNDARIES[0 if side == "student" else 1]
    chunks: list[torch.Tensor] = []
    following: list[torch.Tensor | None] = []
    for chunk in range(inputs.alignment.chunk_count):
        places = [
            (row, t) for row, line in enumerate(ids) for t, own in enumerate(line) if own == chunk
        ]
        chunks.append(torch.stack([log_probs[row, t, asked[row, t]] for row, t in places]).sum())
        row, t = places[-1]
        known = t + 1 < len(ids[row]) and int(labels[row, t + 1]) >= 0
        following.append(log_probs[row, t + 1, boundary].logsumexp(0) if known else None)
    return chunks, following


def binary_kl(a: torch.Tensor, b: torch.Tensor, tau: float, coin: float) -> torch.Tensor:
    p, q = torch.exp((a - coin) / tau), torch.exp((b - coin) / tau)
    return p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))


def definition(
    inputs: DistillationInputs, groups: list[list[int]], *, debias: bool = True
) -> torch.Tensor:
    """The sum over groups of chunks, at the default options."""
    nats = []
    sides = {side: likelihoods(inputs, side) for side in ("teacher", "student")}
    for chunks, following in sides.values():
        own = [torch.stack([chunks[chunk] for chunk in group]).sum() for group in groups]
        if debias:
            for index, group in enumerate(groups):
                ends = [side[1][group[-1]] for side in sides.values()]
                end = following[group[-1]]
                if all(value is not None for value in ends) and end is not None:
                    own[index] = own[index] + end
        nats.append(torch.stack(own))
    return binary_kl(nats[0], nats[1], 5.0, 0.01).sum()


def assert_equals_definition(
    inputs: DistillationInputs, loss: AlmLoss, truth: torch.Tensor, count: int
) -> None:
    output = loss(inputs)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
    (true_grad,) = torch.autograd.grad(truth, inputs.student_logits)
    assert int(output.count) == count
    torch.testing.assert_close(output.loss_sum, truth, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(grad, true_grad, rtol=1e-9, atol=1e-12)


SINGLE = [[chunk] for chunk in range(7)]


@pytest.mark.parametrize("debias", [True, False])
def test_value_and_gradient_are_those_of_the_definition(debias: bool) -> None:
    inputs = inputs_with(STUDENT, TEACHER)
    truth = definition(inputs, SINGLE, debias=debias)
    assert_equals_definition(inputs, AlmLoss(debias=debias), truth, 7)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("debias", [True, False])
def test_chunks_are_merged_up_to_where_the_teacher_expects_a_boundary(
    debias: bool, seed: int
) -> None:
    inputs = inputs_with(STUDENT, TEACHER, seed=seed)
    gamma = 0.25
    _, following = likelihoods(inputs, "teacher")
    # Neighbours are 2-3 and 4-5-6; an unaligned teacher token parts 1 from 2; 0-1 are neighbours.
    groups: list[list[int]] = [[0]]
    for chunk in range(1, 7):
        end = following[chunk - 1]
        parted = chunk in (2, 4) or end is None or end.exp().item() > gamma
        if parted:
            groups.append([])
        groups[-1].append(chunk)
    truth = definition(inputs, groups, debias=debias)
    loss = AlmLoss(debias=debias, merge="likely_boundaries", boundary_threshold=gamma)
    assert_equals_definition(inputs, loss, truth, len(groups))
    total, count = loss(inputs).metrics["chunks"]
    assert (int(total), int(count)) == (7, len(groups))


def test_the_merged_cases_merge_some_chunks_and_not_others() -> None:
    loss = AlmLoss(merge="likely_boundaries", boundary_threshold=0.25)
    counts = {int(loss(inputs_with(STUDENT, TEACHER, seed=seed)).count) for seed in range(6)}
    assert len(counts) > 1


def test_chunks_are_merged_up_to_words_of_the_text() -> None:
    inputs = inputs_with(STUDENT, TEACHER)
    labels = torch.tensor([[1, 1, 1, 5, 1, 1], [1, 1, 1, 2, 1, 1]])
    inputs = replace(inputs, labels=labels)
    # Before chunk 2 (label 5) and chunk 6 (label 2) a word begins; 3 is the end of its row.
    groups = [[0, 1], [2, 3], [4, 5], [6]]
    assert_equals_definition(inputs, AlmLoss(merge="words"), definition(inputs, groups), 4)


def test_a_chunk_without_all_its_labels_is_left_out_and_parts_its_neighbours() -> None:
    inputs = inputs_with(STUDENT, TEACHER)
    teacher_labels = inputs.teacher_labels.clone()
    teacher_labels[1, 2] = IGNORE_INDEX
    inputs = replace(inputs, teacher_labels=teacher_labels)
    kept = [group for group in SINGLE if group != [5]]
    assert_equals_definition(inputs, AlmLoss(), definition(inputs, kept), 6)
    never = AlmLoss(merge="likely_boundaries", boundary_threshold=0.999999)
    groups = [[0, 1], [2, 3], [4], [6]]
    assert_equals_definition(inputs, never, definition(inputs, groups), 4)


@pytest.mark.parametrize("merge", ["none", "words", "likely_boundaries"])
def test_the_count_is_known_ahead_exactly_or_from_above(merge: Any) -> None:
    inputs = inputs_with(STUDENT, TEACHER)
    inputs.labels[0, 1] = IGNORE_INDEX
    inputs.teacher_labels[1, 2] = IGNORE_INDEX
    mask = torch.tensor([True, True, False, True, True, True, True])
    inputs = replace(inputs, chunk_mask=mask)
    known = known_ahead(inputs)
    objective = AlmLoss(merge=merge, boundary_threshold=0.5)
    ahead, count = int(objective.count_ahead(known)), int(objective(inputs).count)
    assert ahead == 4
    assert count == ahead if merge == "none" else count <= ahead


@pytest.mark.parametrize("seed", range(8))
def test_the_words_of_a_text_are_known_ahead(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = inputs_with(STUDENT, TEACHER)
    for labels in (inputs.labels, inputs.teacher_labels):
        labels[torch.rand(labels.shape, generator=generator) < 0.1] = IGNORE_INDEX
    mask = torch.rand(7, generator=generator) < 0.9
    inputs = replace(inputs, chunk_mask=mask)
    word_starts = inputs.boundary.of_labels(inputs.student_shard)
    known = replace(known_ahead(inputs), word_starts=word_starts)
    objective = AlmLoss(merge="words")
    assert int(objective.count_ahead(known)) == int(objective(inputs).count)


def test_some_words_are_of_several_chunks() -> None:
    """So that the test above can fail."""
    inputs = inputs_with(STUDENT, TEACHER)
    assert int(AlmLoss(merge="words")(inputs).count) < int(AlmLoss()(inputs).count)


def test_a_boundary_without_mass_gives_a_finite_loss_and_gradient() -> None:
    inputs = inputs_with(STUDENT, TEACHER)
    logits = inputs.student_logits.detach().float()
    logits[..., BOUNDARIES[0]] -= 1e4
    inputs = replace(inputs, student_logits=logits.requires_grad_())
    hidden = inputs.teacher.logits.float()
    hidden[..., BOUNDARIES[1]] -= 1e4
    inputs = replace(inputs, teacher=replace(inputs.teacher, logits=hidden))
    for difference in ("binary_kl", "binary_ce", "reverse_binary_kl", "abs", "joschu_k3"):
        output = AlmLoss(difference=difference)(inputs)
        (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
        assert output.loss_sum.isfinite()
        assert grad.isfinite().all()


@pytest.mark.parametrize("margin", [0.0, 5.0, 15.0, 40.0, 1e4])
@pytest.mark.parametrize("tau", [0.5, 1.0, 5.0, 100.0])
def test_the_gradient_of_a_sure_student_is_bounded_as_stated(tau: float, margin: float) -> None:
    inputs = inputs_with(STUDENT, TEACHER)
    logits = torch.zeros(2, 6, VOCABS[0])
    logits.scatter_(-1, inputs.labels[..., None], margin)
    inputs = replace(inputs, student_logits=logits.requires_grad_())
    for difference in ("binary_kl", "binary_ce"):
        loss = AlmLoss(difference=difference, temperature=tau, debias=False)
        (grad,) = torch.autograd.grad(loss(inputs).loss_sum, inputs.student_logits)
        assert grad.abs().max().item() <= max(1.0, 1 / tau) * (1 + 1e-5)


def test_not_a_number_shows_in_the_loss() -> None:
    inputs = inputs_with(STUDENT, TEACHER)
    logits = inputs.student_logits.detach().clone()
    logits[0, 2] = torch.nan
    assert AlmLoss()(replace(inputs, student_logits=logits)).loss_sum.isnan()


def test_a_masked_label_is_counted_as_impossible_and_left_out() -> None:
    inputs = inputs_with(STUDENT, TEACHER)
    logits = inputs.teacher.logits.clone()
    logits[1, 2, inputs.teacher_labels[1, 2]] = -torch.inf
    inputs = replace(inputs, teacher=replace(inputs.teacher, logits=logits))
    output = AlmLoss(debias=False)(inputs)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
    assert int(output.count) == 6
    assert [int(part) for part in output.metrics["impossible"]] == [1, 7]
    assert grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({}, {"boundary": None}, "alm needs to know which tokens begin a word; got no boundary"),
        ({"merge": "words", "debias": False}, {"boundary": None}, "alm merges up to words"),
        ({}, {"teacher_labels": None}, "alm needs the labels of the teacher's positions; got none"),
        (
            {},
            {"teacher_labels": torch.zeros(2, 3, dtype=torch.int64)},
            r"got \(2, 3\); expected \(2, 5\)",
        ),
        (
            {},
            {"boundary": BoundaryColumns(student=torch.ones(3).bool(), teacher=torch.ones(7) > 0)},
            r"cut for other shards \(student, teacher\); got \(3, 7\); expected \(11, 7\)",
        ),
    ],
    ids=["no boundaries", "no words", "no labels", "other labels", "other shards"],
)
def test_inputs_that_do_not_fit_are_refused(
    options: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(LossError, match=message):
        AlmLoss(**options)(replace(inputs_with(STUDENT, TEACHER), **change))


def test_label_targets_without_boundaries_serve_without_debiasing_alone() -> None:
    inputs = replace(inputs_of(Microbatch.random(), (0, 0)), boundary=None)
    given = as_kind(inputs, "label", 0)
    assert AlmLoss(debias=False)(given).loss_sum.item() > 0
    given = replace(given, boundary=inputs_of(Microbatch.random(), (0, 0)).boundary)
    with pytest.raises(LossError, match="needs the teacher's boundary log-probabilities"):
        AlmLoss()(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"merge": "space_merge"}, "unknown merge of the objective alm; got 'space_merge'"),
        ({"boundary_threshold": 0.0}, "is not a probability; got 0.0"),
        ({"temperature": math.nan}, "temperature of the objective alm must be positive"),
    ],
    ids=["merge", "threshold", "temperature"],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LossError, match=message):
        AlmLoss(**options)


def test_word_starts_are_tokens_by_their_first_byte_and_control_tokens() -> None:
    student = TokenBytes.from_tokens([b"a", b" b", None, b"\tx", b"y ", b"\n", b"\r"])
    teacher = TokenBytes.from_tokens([b"a", b" ", b"b"])
    # The student's head has two columns more than its tokenizer has ids, one of them padding.
    shards = [VocabShard(start=4, stop=9, vocab_size=8), VocabShard(start=0, stop=4, vocab_size=3)]
    columns = BoundaryColumns.at_word_starts(
        student, teacher, student_shard=shards[0], teacher_shard=shards[1]
    )
    assert columns.student.tolist() == [False, True, False, False, False]
    assert columns.teacher.tolist() == [False, True, False, False]
    whole = replace_shard(shards[0], 0)
    kwargs: dict[str, Any] = {"student_shard": whole, "teacher_shard": shards[1]}
    columns = BoundaryColumns.at_word_starts(student, teacher, **kwargs)
    assert columns.student.tolist() == [False, True, True, True, False, True, False, False, False]
    columns = BoundaryColumns.at_word_starts(
        student, teacher, first_bytes=b"\r b", with_control=False, **kwargs
    )
    assert columns.student.nonzero().flatten().tolist() == [1, 6]
    with pytest.raises(LossError, match="no token of the teacher's vocabulary is a boundary"):
        BoundaryColumns.at_word_starts(student, teacher, first_bytes=b"\r", **kwargs)
    with pytest.raises(LossError, match="outside its vocabulary; got id 3; expected 0 to 2"):
        BoundaryColumns.of_ids([1], [3], **kwargs)


def replace_shard(shard: VocabShard, start: int) -> VocabShard:
    return VocabShard(start=start, stop=shard.stop, vocab_size=shard.vocab_size)
