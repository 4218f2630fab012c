from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.alignment.alignment import ChunkClass
from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses import (
    LOSS_REGISTRY,
    DistillationInputs,
    ProjectedKLLoss,
    ProjectionShard,
    TeacherTargets,
)
from megatron_ext.ops.divergence import Divergence
from megatron_ext.ops.launch import Implementation
from megatron_ext.ops.projected_kl import projected_kl_reference
from megatron_ext.projection import SparseProjection
from tests.losses.microbatch import Microbatch, projection_shard


@pytest.mark.parametrize("direction", ["forward", "reverse", "jensen_shannon"])
def test_the_registered_objective_is_the_reference_over_the_flattened_batch(direction: str) -> None:
    batch = Microbatch.random()
    output = LOSS_REGISTRY["projected_kl"](temperature=1.5, direction=direction)(
        batch.inputs(padding=(3, 1))
    )
    alignment = batch.alignment()
    truth = projected_kl_reference(
        batch.student_logits.double().flatten(0, 1),
        batch.teacher_logits.double().flatten(0, 1),
        student_chunk_id=alignment.student_chunk_id.flatten(),
        teacher_chunk_id=alignment.teacher_chunk_id.flatten(),
        chunk_count=12,
        projection=batch.projection.double(),
        temperature=1.5,
        direction=direction,
    ).sum()
    assert output.loss_sum.dtype == torch.float32
    assert output.loss_sum.item() == pytest.approx(truth.item(), rel=1e-6)
    assert output.count.dtype == torch.int64
    assert int(output.count) == 12
    used_rows = int((alignment.teacher_chunk_id >= 0).sum())
    counts = {name: int(count) for name, (_, count) in output.metrics.items()}
    shared = {"teacher_entropy": 12, "top1_agreement": 12, "offsupport_mass": used_rows}
    assert counts.items() >= shared.items()
    assert sum(counts[f"loss/{kind.name.lower()}"] for kind in ChunkClass) == 12


def test_hidden_states_of_the_teacher_serve_as_its_logits_do() -> None:
    batch = Microbatch.random()
    inputs = batch.inputs()
    head = torch.randn(23, 16, generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(2))
    targets = [
        TeacherTargets(kind="hidden", shard=inputs.teacher.shard, hidden=hidden, head_weight=head),
        TeacherTargets(kind="logits", shard=inputs.teacher.shard, logits=hidden @ head.t()),
    ]
    sums = [ProjectedKLLoss()(replace(inputs, teacher=target)).loss_sum for target in targets]
    assert sums[0].item() == pytest.approx(sums[1].item(), rel=1e-6)


def _without(**parts: Any) -> DistillationInputs:
    return replace(Microbatch.random().inputs(), **parts)


def _alignment(student: tuple[int, int], teacher: tuple[int, int]) -> AlignmentBatch:
    return AlignmentBatch.from_chunk_ids(torch.full(student, -1), torch.full(teacher, -1))


SHARD = VocabShard(start=0, stop=23, vocab_size=23)

BAD_INPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "no teacher": ({"teacher": None}, "needs a teacher and an alignment; got no teacher"),
    "no alignment": ({"alignment": None}, "got no alignment"),
    "no projection": ({"projection": None}, "needs a vocabulary projection; got none"),
    "student ids": (
        {"alignment": _alignment((3, 7), (3, 6))},
        r"student chunk ids .* got \(3, 7\); expected \(3, 8\)",
    ),
    "teacher ids": (
        {"alignment": _alignment((3, 8), (2, 6))},
        r"teacher chunk ids .* got \(2, 6\); expected \(3, 6\)",
    ),
    "labels": (
        {"labels": torch.zeros(3, 7, dtype=torch.int64)},
        r"student logits do not fit labels .* got \(3, 8, 37\); expected \(3, 7, 37\)",
    ),
    "teacher columns": (
        {"teacher": TeacherTargets(kind="logits", shard=SHARD, logits=torch.zeros(3, 6, 24))},
        "teacher's vocabulary shard; got 24 columns; expected 23",
    ),
    "top-k targets": (
        {
            "teacher": TeacherTargets(
                kind="topk",
                shard=SHARD,
                topk_ids=torch.zeros(3, 6, 2, dtype=torch.int64),
                topk_logits=torch.zeros(3, 6, 2),
                log_normaliser=torch.zeros(3, 6),
            )
        },
        "projected_kl cannot use these teacher targets; got kind 'topk'.*neither a tail",
    ),
    "chunk mask": (
        {"chunk_mask": torch.ones(11, dtype=torch.bool)},
        r"chunk mask does not fit .* got torch.bool \(11,\); expected torch.bool \(12,\)",
    ),
    "text classes": (
        {"chunk_text_class": torch.zeros(11, dtype=torch.int8)},
        r"chunks' text classes do not fit the alignment; got \(11,\); expected \(12,\)",
    ),
    "projection of other shards": (
        {
            "projection": projection_shard(
                Microbatch.random().projection, VocabShard(start=0, stop=40, vocab_size=37), SHARD
            )
        },
        r"cut for other shards .* got \(40, 23, 23\); expected \(37, 23, 23\)",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_inputs_that_do_not_fit_are_named_with_what_was_expected(name: str) -> None:
    parts, message = BAD_INPUTS[name]
    with pytest.raises(LossError, match=message):
        ProjectedKLLoss()(_without(**parts))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_no_positive_number_is_refused(temperature: float) -> None:
    with pytest.raises(LossError, match="temperature of projected_kl must be positive"):
        ProjectedKLLoss(temperature=temperature)


def test_an_unknown_direction_is_refused_with_the_choices() -> None:
    with pytest.raises(LossError, match="got 'both'; expected one of forward, reverse"):
        ProjectedKLLoss(direction="both")


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "jensen_shannon"])
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_a_model_that_masks_all_that_is_projected_teaches_nothing(
    who: str, direction: Divergence, implementation: Implementation
) -> None:
    rows = np.arange(6)
    shards = (
        VocabShard(start=0, stop=12, vocab_size=12),
        VocabShard(start=0, stop=10, vocab_size=10),
    )
    projection = ProjectionShard.from_projection(
        SparseProjection.from_entries(rows, rows, np.ones(6), (12, 10)),
        student_shard=shards[0],
        teacher_shard=shards[1],
    )
    ids = torch.tensor([[0, 1, 2]])
    student, teacher = torch.randn(1, 3, 12), torch.randn(1, 3, 10)
    (student if who == "student" else teacher)[0, 1, :6] = -torch.inf
    student.requires_grad_()
    loss = ProjectedKLLoss(direction=direction, implementation=implementation)
    out = loss(
        DistillationInputs(
            student_logits=student,
            student_shard=shards[0],
            labels=ids,
            teacher=TeacherTargets(kind="logits", shard=shards[1], logits=teacher),
            alignment=AlignmentBatch.from_chunk_ids(ids, ids),
            projection=projection,
        )
    )
    out.loss_sum.backward()

    assert out.chunk_loss[1] == 0
    assert (out.chunk_loss[[0, 2]] > 0).all()
    assert not student.grad[0, 1].any()
    assert (student.grad[0, [0, 2]] != 0).any(dim=-1).all()
    assert all(value.isfinite() for value, _ in out.metrics.values())


def test_cross_entropy_spreads_the_mass_of_a_column_over_tokens_with_equal_rows() -> None:
    """A stationary point has ``p_i (1 + g) = f_i`` for every token ``i`` of such a group, with the
    labels' frequencies ``f`` and one ``g`` for the group: whatever the teacher says, ``p`` is
    proportional to ``f`` there. Temperature 1."""
    # Three runs of line feeds are one column of the teacher's, as with a byte token.
    projection = torch.eye(3).double()[[0, 0, 0, 1, 2]]
    labels = torch.tensor([0] * 12 + [1] * 4 + [2] * 2 + [3] * 9 + [4] * 3)[None]
    rows = labels.shape[1]
    spans = torch.arange(rows)[None]
    shards = [VocabShard(start=0, stop=size, vocab_size=size) for size in (5, 3)]
    # The teacher gives line feeds 0.2, the labels 0.6.
    teacher = torch.tensor([0.2, 0.3, 0.5]).double().log().expand(1, rows, 3)
    logits = torch.tensor([0.0, 0.0, 3.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=200, tolerance_grad=1e-10, tolerance_change=0)

    def loss() -> torch.Tensor:
        inputs = DistillationInputs(
            student_logits=logits.expand(1, rows, 5),
            student_shard=shards[0],
            labels=labels,
            teacher=TeacherTargets(kind="logits", shard=shards[1], logits=teacher),
            alignment=AlignmentBatch.from_chunk_ids(spans, spans),
            projection=projection_shard(projection, *shards),
        )
        total = ProjectedKLLoss(implementation="torch")(inputs).loss_sum
        return total + LOSS_REGISTRY["next_token"](implementation="torch")(inputs).loss_sum

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        total = loss()
        total.backward()
        return total

    optimizer.step(closure)
    found = logits.detach().softmax(0)
    assert 0.3 < float(found[:3].sum()) < 0.5
    # The loss is summed in fp32.
    frequencies = torch.tensor([12, 4, 2]).double() / 18
    torch.testing.assert_close(found[:3] / found[:3].sum(), frequencies, rtol=1e-3, atol=0)
