"""Kernels and compiled loops of the projected KL against its reference in fp64, and torch."""

from dataclasses import replace

import pytest
import torch

from megatron_ext.distributed import vocab_parallel
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.projected_kl import (
    LearnedEntries,
    ProjectedKLOptions,
    compiled_evaluation,
    kernel_evaluation,
    projected_kl,
)
from megatron_ext.ops.projected_kl.column_plan import SUMS
from tests.ops.allocation_record import AllocationRecord
from tests.ops.kernel_case import (
    ALL_THREE,
    BOTH,
    DEVICE,
    DIRECTIONS,
    DTYPES,
    assert_as_exact,
    combinations,
    packed,
    sampled,
)
from tests.ops.projected_kl_case import Case, column_plan, sharded

pytest.importorskip("triton")


CASES = {
    "several rows": {"lengths": (9, 8), "chunk_count": 3},
    "one chunk of five rows": {"lengths": (5, 3), "chunk_count": 1},
    "one row each": {"lengths": (3, 3), "chunk_count": 3},
}


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize(
    ("name", "direction", "dtype"),
    [
        *((*case, torch.float32) for case in combinations(tuple(CASES), DIRECTIONS)),
        *(("several rows", "forward", dtype) for dtype in DTYPES[1:]),
        ("one row each", "jensen_shannon", torch.bfloat16),
    ],
)
def test_values_and_gradients_are_the_references(by, name, direction, dtype):
    case = Case.paired(**CASES[name]).rounded(dtype)
    temperature = 1.7 if dtype == torch.float32 else 1.0
    options = {"direction": direction, "temperature": temperature, "mixture": 0.3}
    truth, true_grad = case.truth(**options)
    plain, plain_grad = case.to(torch.float32).truth(**options)
    out, grad = case.run(
        dtype=dtype, padding=(3, 9), pad_value=1e4, planned=True, implementation=by, **options
    )
    assert_as_exact(out.chunk_loss.sum(), plain, truth, slack=2e-6)
    width = true_grad.shape[1]
    assert grad.dtype == dtype
    assert not grad[:, width:].any()
    # Sums of logarithms near 16 hold 2e-6; a gradient is rounded once more as it is stored.
    slack = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert_as_exact(grad[:, :width], plain_grad, true_grad, slack=slack)
    assert not grad[case.student_chunk_id < 0].any()
    twin, _ = case.run(dtype=torch.float64, planned=True, **options)
    for field in ("teacher_entropy", "offsupport_mass", "rest_mass"):
        got, exact = getattr(out, field).double(), getattr(twin, field).double()
        torch.testing.assert_close(got, exact, rtol=2e-6, atol=1e-6)
    assert torch.equal(out.top1_agreement, twin.top1_agreement)


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize(
    ("name", "direction", "vocab_topk"),
    combinations(tuple(CASES), DIRECTIONS, (5, 1, 30)),
)
def test_the_top_columns_and_the_rest_as_one_are_compared(by, name, direction, vocab_topk):
    case = Case.paired(**CASES[name])
    options = {"direction": direction, "temperature": 1.7, "mixture": 0.3, "vocab_topk": vocab_topk}
    truth, true_grad = case.truth(**options)
    plain, plain_grad = case.to(torch.float32).truth(**options)
    given = {"padding": (3, 9), "pad_value": 1e4, "planned": True, **options}
    out, grad = case.run(dtype=torch.float32, implementation=by, **given)
    # What two columns differ by is small beside the logarithms that it is made of.
    assert_as_exact(out.chunk_loss.sum(), plain, truth, slack=1e-5)
    assert_as_exact(grad[:, : true_grad.shape[1]], plain_grad, true_grad, slack=2e-6)
    assert not grad[:, true_grad.shape[1] :].any()
    twin, _ = case.run(dtype=torch.float64, **given)
    for field in ("teacher_entropy", "offsupport_mass", "rest_mass"):
        got, exact = getattr(out, field).double(), getattr(twin, field).double()
        torch.testing.assert_close(got, exact, rtol=2e-6, atol=1e-6)
    assert torch.equal(out.top1_agreement, twin.top1_agreement)
    assert (out.rest_mass > 0).all()
    silent, same = case.run(dtype=torch.float32, implementation=by, diagnostics=False, **given)
    assert torch.equal(silent.chunk_loss, out.chunk_loss)
    assert torch.equal(same, grad)


def test_columns_that_equal_the_last_of_the_top_ones_are_all_kept(by):
    case = Case.paired(lengths=(4, 4), chunk_count=4)
    logits = torch.zeros_like(case.teacher_logits)
    logits[:, :3] = 1.0
    case = replace(case, teacher_logits=logits)
    given = {"dtype": torch.float32, "planned": True, "implementation": by}
    ties, grad = case.run(vocab_topk=9, **given)
    every, of_every = case.run(**given)
    assert not ties.rest_mass.any()
    torch.testing.assert_close(ties.chunk_loss, every.chunk_loss)
    torch.testing.assert_close(grad, of_every)
    three, _ = case.run(vocab_topk=2, **given)
    assert (three.rest_mass > 0).all()


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
def test_no_chunk_gives_zero_with_a_graph(implementation):
    out, grad = Case.paired(chunk_count=0, lengths=(2, 2)).run(
        dtype=torch.float32, planned=True, implementation=implementation
    )
    assert out.chunk_loss.shape == out.offsupport_mass.shape == (0,)
    assert not grad.any()


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("direction", sampled(["forward", "reverse"]))
@pytest.mark.parametrize("by", sampled(["cpu", "triton"]))
def test_several_blocks_of_columns_and_a_column_of_more_entries_than_a_program_holds(by, direction):
    case = Case.paired(vocabs=(2700, 1300), lengths=(3, 2), chunk_count=2)
    hub = case.projection.clone()
    hub[1400:2600] = 0.0
    hub[1400:2600, 5] = 1.0
    case = replace(case, projection=hub)
    plan = column_plan(
        hub,
        VocabShard(start=0, stop=2700, vocab_size=2700),
        VocabShard(start=0, stop=1300, vocab_size=1300),
    )
    assert plan.by_column.offsets.diff().max() > SUMS
    truth, true_grad = case.truth(direction=direction)
    plain, plain_grad = case.to(torch.float32).truth(direction=direction)
    out, grad = case.run(dtype=torch.float32, planned=True, implementation=by, direction=direction)
    assert_as_exact(out.chunk_loss.sum(), plain, truth, slack=2e-6)
    assert_as_exact(grad, plain_grad, true_grad, slack=2e-6)


@pytest.mark.parametrize("direction", sampled(DIRECTIONS))
@pytest.mark.parametrize("by", sampled(["cpu", "triton"]))
def test_tiles_of_one_chunk_change_nothing(by, monkeypatch, direction):
    # The kernels take chunks by 64, which takes the interpreter long.
    case = Case.paired(vocabs=(17, 13), lengths=(66, 66), chunk_count=65)
    options = {"implementation": by, "direction": direction}
    whole, whole_grad = case.run(dtype=torch.float32, planned=True, **options)
    for module in (kernel_evaluation, compiled_evaluation):
        monkeypatch.setattr(module, "_SCRATCH_BYTES", 4)
    parts, grad = case.run(dtype=torch.float32, planned=True, **options)
    assert torch.equal(whole_grad, grad)
    said = [[part for part in out if part is not None] for out in (whole, parts)]
    assert all(torch.equal(a, b) for a, b in zip(*said, strict=True))


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("direction", sampled(["reverse", "forward", "jensen_shannon"]))
def test_logits_of_ten_thousand_and_minus_infinity_are_as_in_torch(by, direction):
    case = Case.paired(scale=1e4, lengths=(6, 6), chunk_count=3)
    case.student_logits[:, 4:9] = -torch.inf
    case.teacher_logits[:, 1:4] = -torch.inf
    twin, twin_grad = case.run(dtype=torch.float32, planned=True, direction=direction)
    out, grad = case.run(dtype=torch.float32, planned=True, direction=direction, implementation=by)
    torch.testing.assert_close(out.chunk_loss, twin.chunk_loss, rtol=1e-5, atol=1e-6)
    assert grad.isfinite().all()
    assert not grad[:, 4:9].any()
    if direction != "forward":
        # The forward direction of one row leaves out a sum that is 0 but for what the floor cuts
        # off, which is everything here.
        scale = twin_grad.abs().max().item()
        torch.testing.assert_close(grad, twin_grad, rtol=0, atol=1e-5 * scale)


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize(
    ("direction", "name"), combinations(DIRECTIONS, ["several rows", "one row each"])
)
def test_mapped_tokens_far_below_one_that_stands_for_nothing_are_compared_as_ever(
    by, name, direction
):
    case = Case.paired(**CASES[name]).dominated(120.0).emptied().rounded(torch.float32)
    truth, true_grad = case.truth(direction=direction, temperature=1.3)
    out, grad = case.run(
        dtype=torch.float32,
        padding=(3, 9),
        planned=True,
        implementation=by,
        direction=direction,
        temperature=1.3,
    )
    # What weighs one row against another is a difference of 100 nats, which fp32 holds to 4e-6.
    assert_as_exact(out.chunk_loss.sum(), truth, truth, slack=2e-5)
    assert_as_exact(grad[:, : true_grad.shape[1]], true_grad, true_grad, slack=2e-5)
    assert (out.chunk_loss > 0).all()


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("direction", sampled(["jensen_shannon", "forward"]))
def test_rows_that_count_for_nothing_may_hold_anything(by, direction):
    case = Case.paired(lengths=(8, 7), chunk_count=4)
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0], device=DEVICE)
    options = {"dtype": torch.float32, "planned": True, "direction": direction, "weights": weights}
    _, expected = case.run(**options)
    used = torch.isin(case.student_chunk_id, torch.tensor([0, 1, 3], device=DEVICE))
    case.student_logits[~used] = torch.nan
    case.teacher_logits[(case.teacher_chunk_id < 0) | (case.teacher_chunk_id == 2)] = torch.nan
    for grad_scale in (None, weights):
        out, grad = case.run(implementation=by, grad_scale=grad_scale, **options)
        assert out.chunk_loss.isnan().tolist() == [False, False, True, False]
        assert not grad[~used].any()
        torch.testing.assert_close(grad[used], expected[used], rtol=1e-5, atol=1e-7)


def call(case, student, teacher, **options):
    shards = [
        VocabShard(start=0, stop=x.shape[1], vocab_size=x.shape[1]) for x in (student, teacher)
    ]
    return projected_kl(
        ChunkedLogits.of(student, case.student_chunk_id, case.chunk_count, shards[0]),
        ChunkedLogits.of(teacher, case.teacher_chunk_id, case.chunk_count, shards[1]),
        sharded(case.projection.float(), column_plan(case.projection, *shards)),
        **packed(options, ProjectedKLOptions),
    )


@pytest.mark.usefixtures("in_any_order")
@BOTH
def test_strided_rows_and_their_gradient_in_place(implementation):
    case = Case.paired(lengths=(6, 5), chunk_count=3)
    _, expected = case.run(dtype=torch.float32, planned=True)
    wide = torch.full((6, 60), 7.0, device=DEVICE)
    wide[:, :47] = case.student_logits.float()
    teacher = torch.full((5, 50), 7.0, device=DEVICE)
    teacher[:, :41] = case.teacher_logits.float()
    source = wide.clone().requires_grad_()
    logits = source * 1.0
    out = call(case, logits[:, :47], teacher[:, :41], implementation=implementation, in_place=True)
    torch.testing.assert_close(logits[:, :47].detach(), expected, rtol=1e-5, atol=1e-7)
    assert (logits[:, 47:] == 7.0).all()
    (grad,) = torch.autograd.grad(out.chunk_loss.sum(), source)
    torch.testing.assert_close(grad[:, :47], expected, rtol=1e-5, atol=1e-7)
    assert not grad[:, 47:].any()


def test_logits_that_were_overwritten_are_an_error_to_who_reads_them_later():
    case = Case.paired(lengths=(6, 5), chunk_count=3)
    logits = case.student_logits.float().requires_grad_() * 1.0
    read = (logits * logits).sum()
    call(case, logits, case.teacher_logits.float(), in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        read.backward()


@BOTH
def test_a_graph_that_is_kept_is_weighed_anew(implementation):
    case = Case.paired(lengths=(6, 5), chunk_count=3)
    logits = case.student_logits.float().requires_grad_()
    out = call(case, logits, case.teacher_logits.float(), implementation=implementation)
    arriving = torch.tensor([[1.0, 0.5, 0.0], [2.0, 4.0, 0.0]], device=DEVICE)
    (grad,) = torch.autograd.grad(out.chunk_loss, logits, arriving[0], retain_graph=True)
    first = grad.clone()
    (second,) = torch.autograd.grad(out.chunk_loss, logits, arriving[1])
    factor = torch.tensor([2.0, 8.0, 1.0, 1.0], device=DEVICE)[case.student_chunk_id][:, None]
    torch.testing.assert_close(second, first * factor)


@pytest.mark.parametrize("direction", sampled(DIRECTIONS))
def test_learned_entries_have_the_gradient_that_torch_gives_them(by, direction):
    case = Case.paired(lengths=(7, 6), chunk_count=3)
    dense = case.projection.float()
    rows, columns = ((dense > 0) & ((dense > 0).sum(dim=1, keepdim=True) > 1)).nonzero().unbind(1)
    weights = torch.tensor([1.0, 0.0, 3.0], device=DEVICE)
    found = []
    for implementation in ("torch", by):
        value = dense[rows, columns].clone().requires_grad_()
        logits = case.student_logits.float().requires_grad_()
        out = call(
            case,
            logits,
            case.teacher_logits.float(),
            learned=LearnedEntries(value, rows, columns),
            direction=direction,
            temperature=1.3,
            implementation=implementation,
        )
        both = torch.autograd.grad(out.chunk_loss, (logits, value), weights, retain_graph=True)
        # The logits may be those of a model that does not learn.
        alone = torch.autograd.grad(out.chunk_loss, value, weights)
        found.append((*both, *alone))
    assert found[0][1].abs().max() > 1e-3
    for torch_grad, grad in zip(*found, strict=True):
        scale = torch_grad.abs().max().item()
        torch.testing.assert_close(grad, torch_grad, rtol=0, atol=3e-6 * scale)


def test_without_diagnostics_the_loss_is_the_same(by):
    case = Case.paired(lengths=(4, 4), chunk_count=2)
    options = {"planned": True, "implementation": by, "dtype": torch.float32}
    with_them, grad_with = case.run(**options)
    silent, grad = case.run(diagnostics=False, **options)
    assert torch.equal(with_them.chunk_loss, silent.chunk_loss)
    assert torch.equal(grad_with, grad)
    assert not silent.teacher_entropy.any()


def test_what_the_kernels_cannot_do_is_refused_when_they_are_asked_for():
    case = Case.paired(lengths=(4, 4), chunk_count=2)
    for by in ("triton", "cpu"):
        with pytest.raises(LossError, match="need a plan"):
            case.run(dtype=torch.float32, implementation=by)
    with pytest.raises(LossError, match="no such implementation of projected_kl"):
        case.run(implementation="cuda")
    with pytest.raises(LossError, match=r"do not read these logits; got torch\.float64"):
        case.run(dtype=torch.float64, planned=True, implementation="cpu")
    case.run(dtype=torch.float32, implementation="auto")


def test_torch_makes_no_fp32_tensor_of_more_rows_than_a_slice(monkeypatch):
    case = Case.random(vocabs=(500, 400), lengths=(64, 64), chunk_count=60)
    case = replace(case, projection=torch.eye(500, 400, dtype=torch.float64)).on(DEVICE)
    logits = case.student_logits.bfloat16().requires_grad_()
    teacher = case.teacher_logits.bfloat16()
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, DEVICE.type, 8 * 500)
    with AllocationRecord() as record:
        call(case, logits, teacher, implementation="torch").chunk_loss.sum().backward()
    # The test makes the projection itself, as a dense matrix.
    made = {found.shape for found in record.wide_tensors(rows=16, columns=400)}
    assert made <= {(500, 400), (400, 500)}
    assert logits.grad.any()
