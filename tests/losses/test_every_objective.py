"""The rules that hold for every row of ``LOSS_REGISTRY``; cases are in ``objective_cases.py``."""

import os
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.errors import LossError
from megatron_ext.losses import LOSS_REGISTRY, DistillationInputs, LossOutput, TargetKind
from tests.losses import microbatch
from tests.losses.microbatch import Microbatch
from tests.losses.objective_cases import (
    CASES,
    CHOSEN,
    ObjectiveCase,
    as_kind,
    in_precision,
    table_of,
)

EVERYTHING = bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))
OVER_CHUNKS = [name for name in CHOSEN if CASES[name].over == "chunks"]
WITH_TEACHER = [name for name in CHOSEN if CASES[name].kinds]
PROPER = [name for name in CHOSEN if CASES[name].no_identity is None]
COLUMNS = range(23) if EVERYTHING else (0, 8, 15, 22)
"""Of the teacher's vocabulary."""
OF_LOGITS = [name for name in CHOSEN if CASES[name].reads_logits]
SMOOTH = [name for name in CASES if CASES[name].no_finite_difference is None]


def trained(case: ObjectiveCase, inputs: DistillationInputs) -> torch.Tensor:
    """The student's logits [B, Ts, Vp], or its states for an objective that reads these alone."""
    return inputs.student_logits if case.reads_logits else inputs.student_hidden


def run(
    case: ObjectiveCase, inputs: DistillationInputs, mode: Any = None
) -> tuple[LossOutput, torch.Tensor]:
    """The output, computed in a mode of torch, and the gradient of what is ``trained``."""
    with mode or nullcontext():
        output = case.objective()(inputs)
    own, logits = torch.autograd.grad(
        output.loss_sum, [trained(case, inputs), inputs.student_logits]
    )
    assert case.reads_logits or not logits.any()
    return output, own


def sums_of(output: LossOutput) -> dict[str, torch.Tensor]:
    """Everything that is added up over microbatches."""
    sums = {"loss": output.loss_sum.detach(), "count": output.count}
    for name, (total, count) in output.metrics.items():
        sums |= {name: total, f"{name} count": count}
    return sums


def assert_close(value: torch.Tensor, truth: torch.Tensor, tolerance: float) -> None:
    """Errors are at most ``tolerance`` of the largest true magnitude."""
    scale = truth.abs().max().item() if truth.numel() else 0.0
    torch.testing.assert_close(
        value.double(), truth.double(), rtol=0, atol=tolerance * max(scale, 1e-30)
    )


def without_rows(inputs: DistillationInputs) -> DistillationInputs:
    """No position of either model [B, 0], and so no chunk."""

    def cut(holder: Any, names: tuple[str, ...]) -> Any:
        found = {name: getattr(holder, name) for name in names}
        return replace(
            holder, **{name: value[:, :0] for name, value in found.items() if value is not None}
        )

    rows = torch.zeros(1, 0, dtype=torch.int64)
    alignment = AlignmentBatch.from_chunk_ids(rows, rows)
    completions = None
    if inputs.completions is not None:
        table = table_of(inputs)
        assert table is not None
        completions = table.of_batch(alignment, rows, rows)
    own = ("student_logits", "labels", "student_hidden", "teacher_labels", "sampled_log_probs")
    teacher = inputs.teacher and cut(inputs.teacher, ("logits", "hidden"))
    return replace(
        cut(inputs, own),
        teacher=teacher,
        alignment=inputs.alignment and alignment,
        completions=completions,
    )


def in_double(inputs: DistillationInputs) -> DistillationInputs:
    """The same inputs in fp64, as far as they are floating-point logits or targets."""
    double = in_precision(inputs, torch.float64)
    double.student_logits.requires_grad_()
    if double.student_hidden is not None:
        double.student_hidden.requires_grad_()
    if double.teacher is not None:
        double = replace(double, teacher=in_precision(double.teacher, torch.float64))
    return double


def test_every_registered_objective_has_a_case() -> None:
    assert {case.name for case in CASES.values()} == set(LOSS_REGISTRY)


@pytest.mark.parametrize("name", CHOSEN)
def test_sum_and_count_have_their_dtypes_and_the_gradient_that_of_the_logits(name: str) -> None:
    case = CASES[name]
    output, grad = run(case, case.build(case.batch(), (3, 1)))
    assert output.loss_sum.dtype == torch.float32
    assert output.loss_sum.shape == ()
    assert output.count.dtype == torch.int64
    assert int(output.count) > 0
    assert output.loss_sum.item() > 0
    assert grad.any()
    for total, count in output.metrics.values():
        assert (total.dtype, count.dtype) == (torch.float32, torch.int64)
        assert total.isfinite()
        assert not total.requires_grad


@pytest.mark.parametrize("name", CHOSEN)
def test_nothing_to_sum_over_gives_zero_with_a_graph(name: str) -> None:
    case = CASES[name]
    output, grad = run(case, case.build(case.batch().without_work(), (3, 1)))
    assert (output.loss_sum.item(), int(output.count)) == (0.0, 0)
    assert not grad.any()
    assert all(total == 0 and count == 0 for total, count in output.metrics.values())


@pytest.mark.parametrize("name", CHOSEN)
def test_no_rows_give_zero_with_a_graph(name: str) -> None:
    """As on a context-parallel rank that owns no chunk."""
    case = CASES[name]
    inputs = without_rows(case.build(case.batch(batch=1), (3, 1)))
    output, grad = run(case, inputs)
    assert (output.loss_sum.item(), int(output.count)) == (0.0, 0)
    assert grad.shape == trained(case, inputs).shape
    assert all(total == 0 and count == 0 for total, count in output.metrics.values())


@pytest.mark.parametrize("name", OF_LOGITS)
def test_sequences_of_one_token_are_summed(name: str) -> None:
    case = CASES[name]
    batch = case.batch(batch=2, lengths=(1, 1), chunks=1)
    batch = replace(batch, labels=torch.tensor([[3], [5]]))
    output, grad = run(case, case.build(batch, (0, 0)))
    assert int(output.count) == 2
    assert output.loss_sum.isfinite()
    assert grad.isfinite().all()


@pytest.mark.parametrize("name", CHOSEN)
def test_padded_columns_with_huge_logits_take_no_mass_and_no_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    monkeypatch.setattr(microbatch, "PAD_LOGIT", 1e30)
    batch = case.batch()
    plain, plain_grad = run(case, case.build(batch, (0, 0)))
    padded, padded_grad = run(case, case.build(batch, (11, 5)))
    for key, value in sums_of(padded).items():
        torch.testing.assert_close(value, sums_of(plain)[key], rtol=1e-6, atol=1e-7)
    width = plain_grad.shape[-1]
    # Sums in another order: log-ratios of 16 nats, as in a reverse KL, hold 1e-6 in fp32.
    assert_close(padded_grad[..., :width], plain_grad, 2e-6)
    assert not padded_grad[..., width:].any()


@pytest.mark.parametrize("name", OF_LOGITS)
def test_logits_of_ten_thousand_and_masked_columns_stay_finite(name: str) -> None:
    case = CASES[name]
    batch = case.batch()
    batch.student_logits.mul_(3e3)
    batch.teacher_logits.mul_(3e3)
    masked = torch.arange(batch.student_logits.shape[-1]) % 6 == 4
    # A masked token is no label.
    labels = torch.where(masked[batch.labels.clamp(min=0)], IGNORE_INDEX, batch.labels)
    batch = replace(batch, labels=labels)
    batch.student_logits[..., masked] = -torch.inf
    batch.teacher_logits[..., masked[: batch.teacher_logits.shape[-1]]] = -torch.inf
    output, grad = run(case, case.build(batch, (3, 1)))
    assert all(value.isfinite() for value in sums_of(output).values())
    assert grad.isfinite().all()
    assert not grad[..., : len(masked)][..., masked].any()


@pytest.mark.parametrize("name", CHOSEN)
def test_models_that_are_certain_of_one_token_whichever_stay_finite(name: str) -> None:
    case = CASES[name]
    # Among them are tokens that the projection does not reach and that are not shared.
    for column in COLUMNS:
        batch = case.batch()
        batch.teacher_logits[..., column] = 1e4
        batch.student_logits[..., -1 - column] = 1e4
        output, grad = run(case, case.build(batch, (3, 1)))
        assert all(value.isfinite() for value in sums_of(output).values())
        assert grad.isfinite().all()


@pytest.mark.parametrize("name", OF_LOGITS)
def test_bf16_logits_are_summed_in_fp32(name: str) -> None:
    case = CASES[name]
    batch = case.batch()
    batch = replace(
        batch,
        student_logits=batch.student_logits.bfloat16(),
        teacher_logits=batch.teacher_logits.bfloat16(),
    )
    output, grad = run(case, case.build(batch, (3, 1)))
    truth, true_grad = run(case, in_double(case.build(batch, (3, 1))))
    assert output.loss_sum.dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    assert_close(output.loss_sum.detach(), truth.loss_sum.detach(), 1e-5)
    # The gradient is rounded once, to 8 bits: half a unit is 2^-9 of the value.
    assert_close(grad, true_grad, 2**-8)


@pytest.mark.parametrize("name", CHOSEN)
def test_modes_of_the_loop_leave_sums_and_gradients_as_they_are(name: str) -> None:
    case = CASES[name]
    inputs = case.build(case.batch(), (3, 1))
    output, grad = run(case, inputs)
    under_autocast = run(case, inputs, torch.autocast("cpu", torch.bfloat16))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        by_default = run(case, inputs)
    finally:
        torch.set_default_dtype(default)
    with torch.inference_mode():
        inferred = case.objective()(inputs)
    for other, its_grad in (under_autocast, by_default, (inferred, grad)):
        assert sums_of(other) == sums_of(output)
        assert torch.equal(its_grad, grad)


@pytest.mark.parametrize("name", SMOOTH)
def test_the_gradient_is_that_of_finite_differences(name: str) -> None:
    case = CASES[name]
    inputs = in_double(case.build(case.batch(), (3, 1)))
    generator = torch.Generator().manual_seed(3)
    shape = inputs.student_logits.shape
    direction = torch.randn(shape, generator=generator, dtype=torch.float64)
    _, grad = run(case, inputs)
    with torch.no_grad():
        sides = [
            case.objective()(
                replace(inputs, student_logits=inputs.student_logits + step * direction)
            ).loss_sum
            for step in (1e-6, -1e-6)
        ]
    slope = (sides[0] - sides[1]).item() / 2e-6
    assert (grad * direction).sum().item() == pytest.approx(slope, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("name", OVER_CHUNKS)
def test_masking_the_chunks_of_a_sample_is_leaving_the_sample_out(name: str) -> None:
    case = CASES[name]
    batch = case.batch()
    inputs = case.build(batch, (3, 1))
    # Nothing of the sample is looked at: it may be another teacher's, and hold anything.
    kept = inputs.alignment.sample > 0
    logits = inputs.student_logits.detach().clone()
    # strict_topk multiplies a masked row's gradient of zero by what the row holds.
    anything = (1e4, -1e4) if case.name == "strict_topk" else (torch.nan, torch.inf)
    logits[0] = anything[0]
    teacher = inputs.teacher
    if teacher is not None and teacher.logits is not None:
        others = teacher.logits.clone()
        others[0] = anything[1]
        teacher = replace(teacher, logits=others)
    other = replace(inputs, student_logits=logits.requires_grad_(), teacher=teacher)
    masked, grad = run(case, replace(other, chunk_mask=kept))
    alone, alone_grad = run(case, case.build(batch.samples(slice(1, 3)), (3, 1)))
    assert int(masked.count) == int(alone.count) > 0
    assert_close(masked.loss_sum.detach(), alone.loss_sum.detach(), 1e-6)
    assert not grad[:1].any()
    assert_close(grad[1:], alone_grad, 1e-6)
    assert not masked.chunk_loss[~kept].any()
    assert_close(masked.chunk_loss.sum(), masked.loss_sum.detach(), 1e-6)
    nothing, no_grad = run(case, replace(inputs, chunk_mask=torch.zeros_like(kept)))
    assert (nothing.loss_sum.item(), int(nothing.count)) == (0.0, 0)
    assert not no_grad.any()


@pytest.mark.parametrize("name", CHOSEN)
def test_eight_microbatches_add_up_to_one(name: str) -> None:
    case = CASES[name]
    batch = case.batch(batch=8)
    whole, whole_grad = run(case, case.build(batch, (3, 1)))
    parts = [run(case, case.build(batch.samples(slice(row, row + 1)), (3, 1))) for row in range(8)]
    for key, value in sums_of(whole).items():
        summed = torch.stack([sums_of(output)[key] for output, _ in parts]).sum(dim=0)
        # What is one class's alone can be a thousandth of the loss.
        atol = 0.0 if key == "loss" else 1e-6
        torch.testing.assert_close(summed, value, rtol=1e-6, atol=atol)
    assert_close(torch.cat([grad for _, grad in parts]), whole_grad, 1e-6)


@pytest.mark.parametrize("name", PROPER)
def test_models_that_agree_have_neither_loss_nor_gradient(name: str) -> None:
    case = CASES[name]
    batch = case.same()
    inputs = in_double(case.build(batch, (3, 3)))
    output, grad = run(case, inputs)
    assert int(output.count) > 0
    # fp64 rounding of a few hundred terms.
    assert abs(output.loss_sum.item()) < 1e-12
    assert grad.abs().max().item() < 1e-12


@pytest.mark.parametrize("name", [name for name in PROPER if "label" in CASES[name].kinds])
def test_models_that_agree_but_for_rounding_have_neither_loss_nor_gradient(name: str) -> None:
    """A teacher's log-probabilities come from another program than the student's."""
    case = CASES[name]
    output, grad = run(case, as_kind(case.build(case.same(), (3, 3)), "label", 0))
    assert int(output.count) > 0
    assert abs(output.loss_sum.item()) < 1e-6
    assert grad.abs().max().item() < 1e-5


@pytest.mark.parametrize("name", CHOSEN)
def test_no_input_is_overwritten(name: str) -> None:
    case = CASES[name]
    inputs = case.build(case.batch(), (3, 1))
    holders = [inputs, *([inputs.teacher] if inputs.teacher is not None else [])]
    tensors = [
        value
        for holder in holders
        for part in fields(holder)
        if torch.is_tensor(value := getattr(holder, part.name))
    ]
    before = [tensor.detach().clone() for tensor in tensors]
    run(case, inputs)
    for tensor, its in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, its, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", get_args(TargetKind))
@pytest.mark.parametrize("name", WITH_TEACHER)
def test_teacher_targets_of_any_form_serve_as_logits_do_or_are_refused_by_name(
    name: str, kind: TargetKind
) -> None:
    case = CASES[name]
    inputs = case.build(case.batch(), (3, 1))
    if inputs.teacher is not None and inputs.teacher.kind == "logits":
        given = as_kind(inputs, kind, top_k=1000)
    else:
        pytest.skip("the case gives its targets in a form of its own")
    if kind not in case.kinds:
        with pytest.raises(LossError, match=f"objective {case.name} cannot use.*kind '{kind}'"):
            case.objective()(given)
        return
    if "logits" not in case.kinds:
        pytest.skip("nothing to compare with")
    truth, true_grad = run(case, inputs)
    output, grad = run(case, given)
    for key, value in sums_of(truth).items():
        torch.testing.assert_close(sums_of(output)[key], value, rtol=2e-6, atol=1e-6)
    assert_close(grad, true_grad, 2e-6)


def with_last_rows_that_predict_nothing(batch: Microbatch) -> Microbatch:
    """As the packed layout has it; samples have different numbers of labels."""
    pairs = []
    for student, teacher in batch.chunk_ids:
        gone = torch.stack([student[-1], teacher[-1]])
        kept = [side.masked_fill(torch.isin(side, gone), -1) for side in (student, teacher)]
        numbers = torch.cat([side[side >= 0] for side in kept]).unique()
        first, second = (
            torch.where(side >= 0, torch.searchsorted(numbers, side), -1) for side in kept
        )
        pairs.append((first, second))
    labels = batch.labels.clone()
    labels[:, -1] = IGNORE_INDEX
    labels[0, 1] = IGNORE_INDEX
    return replace(batch, chunk_ids=pairs, labels=labels)


def packed(inputs: DistillationInputs) -> DistillationInputs:
    """The samples of ``inputs`` one behind the other in one row."""

    def flat(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.detach().flatten(0, 1)[None]

    alignment, teacher = inputs.alignment, inputs.teacher
    sides = alignment.student_chunk_id, alignment.teacher_chunk_id
    bounds = [torch.arange(0, side.numel() + 1, side.shape[1], dtype=torch.int32) for side in sides]
    logits, labels = flat(inputs.student_logits), flat(inputs.labels)
    hidden = flat(inputs.student_hidden)
    if teacher is not None:
        teacher = replace(teacher, logits=flat(teacher.logits), hidden=flat(teacher.hidden))
    return replace(
        inputs,
        student_logits=logits.requires_grad_(),
        labels=labels,
        teacher=teacher,
        teacher_labels=flat(inputs.teacher_labels),
        student_hidden=hidden if hidden is None else hidden.requires_grad_(),
        alignment=AlignmentBatch.from_chunk_ids(
            *(side.reshape(1, -1) for side in sides),
            student_cu_seqlens=bounds[0],
            teacher_cu_seqlens=bounds[1],
        ),
    )


@pytest.mark.parametrize("name", CHOSEN)
def test_packed_rows_have_the_sums_and_gradients_of_rows_of_their_own(name: str) -> None:
    case = CASES[name]
    inputs = case.build(with_last_rows_that_predict_nothing(case.batch()), (3, 1))
    truth, true_grad = run(case, inputs)
    output, grad = run(case, packed(inputs))
    assert int(truth.count) > 0
    for key, value in sums_of(truth).items():
        torch.testing.assert_close(sums_of(output)[key], value, rtol=1e-6, atol=1e-6)
    assert_close(grad, true_grad.flatten(0, 1)[None], 1e-6)
