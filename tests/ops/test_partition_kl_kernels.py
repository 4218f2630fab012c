"""The kernels of the partition KL, interpreted or on a GPU, against the reference in fp64."""

from dataclasses import replace

import pytest
import torch

from megatron_ext.errors import LossError
from megatron_ext.ops.partition_kl import EventComparison, values_by_chunk
from tests.ops.kernel_case import (
    ALL_THREE,
    BOTH,
    DEVICE,
    DIRECTIONS,
    DTYPES,
    assert_as_exact,
    combinations,
    rounding,
    sampled,
)
from tests.ops.partition_kl_case import Case

pytest.importorskip("triton")


FEW = ((1, 1), (1, 2), (2, 1), (2, 2))

SIZES = {
    "chunks of every kind": {},
    "one token a side": {"sizes": ((1, 1),) * 3},
    "chains alone": {"sizes": ((1, 2), (4, 1), (5, 5))},
    "every token shared": {"vocabs": (23, 23), "shared": 23},
    "no token shared": {"shared": 0},
    "no completion": {"completions": 0},
    "no chunk": {"sizes": ()},
    "a teacher of one token": {"vocabs": (33, 1), "shared": 1, "completions": 1},
    "several blocks": {"sizes": ((1, 1), (1, 2)), "vocabs": (4101, 8195), "shared": 3000},
    "pairs side by side": {
        "sizes": ((1, 1), (1, 2)),
        "vocabs": (6301, 8195),
        "shared": 2500,
        "side_by_side": True,
    },
    "whole blocks of pairs": {
        "sizes": ((1, 1), (2, 1)),
        "vocabs": (4096, 4096),
        "shared": 4096,
        "side_by_side": True,
    },
}


def run(by, case, dtype, **options):
    """Divergences and the gradient of their weighted sum, by kernels or loops."""
    out, grad = case.run(dtype=dtype, device=DEVICE, implementation=by, **options)
    return out.divergences().cpu(), grad.cpu()


def check(by, case, dtype, **options):
    """Value and gradient of kernels or loops on logits of ``dtype`` against fp64."""
    padding = options.pop("padding", (0, 0))
    same = case.to(dtype).to(torch.float64)
    truth, true_grad = same.truth(**options)
    plain, plain_grad = same.to(torch.float32).truth(**options)
    value, grad = run(by, same, dtype, padding=padding, **options)
    assert value.dtype == torch.float32
    assert grad.dtype == dtype
    width = true_grad.shape[1]
    assert (grad[:, width:] == 0).all(), "padding has a gradient"
    assert_as_exact(value, plain, truth, slack=2e-6)
    # Stored once, in the dtype of the logits.
    slack = 2e-6 + rounding(dtype)
    assert_as_exact(grad[:, :width], plain_grad, true_grad, slack=slack)


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("name", SIZES)
def test_values_and_gradient_are_the_references(by, name):
    check(by, Case.random(**SIZES[name]), torch.float32, padding=(3, 9))


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize(
    ("direction", "dtype", "temperature"), combinations(DIRECTIONS, DTYPES, (1.0, 2.5)), ids=str
)
def test_every_direction_dtype_and_temperature(by, direction, dtype, temperature):
    case = Case.random(sizes=FEW, vocabs=(2101, 300), shared=200)
    check(by, case, dtype, direction=direction, temperature=temperature, mixture=0.3)
    case = Case.random(sizes=FEW, vocabs=(4201, 2200), shared=2100, side_by_side=True)
    check(by, case, dtype, direction=direction, temperature=temperature, mixture=0.3)


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("direction", sampled(["jensen_shannon", "forward", "reverse"]))
def test_kernels_agree_with_torch_on_extreme_logits(by, direction):
    # Ruled out by one model and not by the other, where the reference is infinite.
    case = Case.random(scale=30.0, sizes=FEW, vocabs=(2101, 300), shared=200)
    case.student_logits[:, 4:9] = -torch.inf
    case.teacher_logits[:, 1:4] = -torch.inf
    case.student_logits[3] += 1e4
    case = case.to(torch.float32).to(torch.float64)
    truth, true_grad = case.run(direction=direction)
    exact = truth.divergences()
    plain, _ = case.run(dtype=torch.float32, direction=direction)
    value, grad = run(by, case, torch.float32, direction=direction)
    assert grad.isfinite().all()
    assert (grad[:, 4:9] == 0).all()
    same = plain.divergences()
    assert_as_exact(value, same, exact, slack=2e-6)
    # Slopes as large as the divergence, which is up to 87, cancel in the gradient.
    largest = max(float(exact.max()), 1.0) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(grad.double(), true_grad, rtol=0, atol=largest)


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
def test_what_has_the_scale_0_has_no_gradient_whatever_it_holds(implementation):
    case = Case.random(sizes=((1, 1), (1, 2), (1, 1), (2, 1)))
    # A row of no chunk, a single and a step of a chain.
    rows = [0, case.singles[1].student_rows[0], case.chains[1].student_rows[0]]
    grad_scale = torch.ones(len(case.singles) + len(case.chains), dtype=torch.float64)
    grad_scale[[1, len(case.singles) + 1]] = 0.0
    clean = case.run(device=DEVICE, dtype=torch.float32, grad_scale=grad_scale)[1]
    case.student_logits[rows] = torch.nan
    case.teacher_logits[case.singles[1].teacher_rows[0]] = torch.nan
    _, grad = case.run(
        device=DEVICE, dtype=torch.float32, grad_scale=grad_scale, implementation=implementation
    )
    dead = [*rows, *case.chains[1].student_rows]
    assert (grad[dead] == 0).all()
    kept = [row for row in range(len(grad)) if row not in dead]
    torch.testing.assert_close(grad[kept], clean[kept], rtol=1e-5, atol=2e-6)


@pytest.mark.usefixtures("nan_filled", "in_any_order")
@ALL_THREE
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_the_gradient_can_be_written_over_the_logits(implementation, strided):
    case = Case.random(sizes=FEW)
    value, grad = run("triton", case, torch.float32)
    again, overwritten = case.run(
        device=DEVICE,
        dtype=torch.float32,
        in_place=True,
        strided=strided,
        implementation=implementation,
    )
    found = again.divergences().cpu()
    torch.testing.assert_close(found, value, rtol=0, atol=2e-6)
    torch.testing.assert_close(overwritten.cpu(), grad, rtol=0, atol=2e-6)


def test_a_reader_of_overwritten_logits_gets_an_error(by):
    logits = Case.random().student_logits.float().to(DEVICE).requires_grad_()
    between = logits * 1.0
    before = between.square()
    Case.random().run(
        device=DEVICE,
        dtype=torch.float32,
        logits=between,
        in_place=True,
        implementation=by,
        backward=False,
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.sum().backward()


def test_values_without_a_gradient_are_those_with_one(by):
    case = Case.random(sizes=FEW)
    for direction in sampled(DIRECTIONS):
        with_gradient, _ = run(by, case, torch.float32, direction=direction)
        with torch.no_grad():
            out, _ = case.run(
                device=DEVICE,
                dtype=torch.float32,
                direction=direction,
                implementation=by,
                backward=False,
            )
        found = out.divergences().cpu()
        torch.testing.assert_close(found, with_gradient, rtol=0, atol=1e-6)


def test_rests_and_agreement_are_those_of_torch(by):
    case = Case.random(seed=3, sizes=((1, 1),) * 6 + ((1, 2),))
    by_kernel, _ = case.run(dtype=torch.float32, device=DEVICE, implementation=by)
    by_torch, _ = case.run(dtype=torch.float32, device=DEVICE, implementation="torch")
    for one, other in zip(by_kernel[:2], by_torch[:2], strict=True):
        torch.testing.assert_close(one.student_rest, other.student_rest, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(one.teacher_rest, other.teacher_rest, rtol=1e-5, atol=1e-7)
        assert torch.equal(one.agreement, other.agreement)
    assert 0 < int(by_kernel.singles.agreement.sum()) < 6


@pytest.mark.usefixtures("nan_filled", "in_any_order")
@pytest.mark.parametrize(
    ("direction", "implementation", "temperature"),
    combinations(DIRECTIONS, ["triton", "cpu", "torch"], [1.7, 1.0]),
)
def test_cross_entropy_rides_along(direction, temperature, implementation):
    case = Case.random(sizes=((1, 1), (1, 2), (2, 1)))
    rows, vocab = case.student_logits.shape
    # Equal largest logits, of a shared token and of others.
    shared = {own for own, _ in case.shared}
    others = [column for column in range(vocab) if column not in shared]
    for row, tied in enumerate(([min(shared), others[-1]], [max(shared), others[0]], others[1:3])):
        case.student_logits[row, tied] = 20.0
    labels = torch.arange(rows) * 5 % vocab
    # One label is among the chosen columns of its row.
    labels[case.chains[1].student_rows[0]] = case.chains[1].student_prefix[0]
    labels[2] = -100
    weight = torch.linspace(0.5, 1.5, rows, dtype=torch.float64)
    weight[4] = 0.0
    options = {"direction": direction, "temperature": temperature}

    def truth(dtype):
        logits = case.student_logits.to(dtype).requires_grad_()
        taught = case.divergences_of(logits, **options)
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        terms = (taught * case.weights()).sum(), (losses * weight.to(dtype)).sum()
        total = terms[0] + terms[1]
        return taught.detach(), torch.autograd.grad(total, logits)[0]

    exact, same = truth(torch.float64), truth(torch.float32)
    device_labels, ce_weight = labels.to(DEVICE), weight.float().to(DEVICE)
    values, grad = case.run(
        device=DEVICE,
        dtype=torch.float32,
        padding=(3, 9),
        labels=device_labels,
        ce_weight=ce_weight,
        implementation=implementation,
        in_place=True,
        **options,
    )
    token_loss = values.token_loss
    divergences = values.divergences().cpu()
    assert_as_exact(divergences, same[0], exact[0], slack=2e-6)
    assert_as_exact(grad[:, :vocab].cpu(), same[1], exact[1], slack=2e-6)
    assert (grad[:, vocab:] == 0).all()
    losses = torch.nn.functional.cross_entropy(case.student_logits, labels, reduction="none")
    torch.testing.assert_close(token_loss.cpu().double(), losses, rtol=1e-6, atol=1e-6)
    assert token_loss[2] == 0
    assert torch.equal(values.top_column.cpu(), case.student_logits.float().argmax(dim=-1))


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
@pytest.mark.parametrize("temperature", [1.0, 1.4])
def test_the_largest_column_is_found_wherever_it_lies(implementation, temperature):
    # Blocks of shared tokens, of others and of both, and a part of a block.
    sizes = ((1, 1),) * 6 + ((1, 2),)
    case = Case.random(sizes=sizes, vocabs=(9001, 2200), shared=2100, side_by_side=True)
    case = replace(case, student_logits=case.student_logits.clamp(max=9.0))
    # Two of a lane, in blocks that are not read in their order; two that 1.4 makes equal.
    tied = ([2150, 4198], [2050, 8999], [2047, 2101], [8990], [4095, 4096], [17, 5000])
    for row, columns in enumerate(tied):
        case.student_logits[row + 1, columns] = 10.0
    near = torch.nextafter(torch.tensor(10.0), torch.tensor(20.0)).item()
    case.student_logits[7, [3, 40]] = torch.tensor([10.0, near]).double()
    labels = torch.zeros(len(case.student_logits), dtype=torch.int64, device=DEVICE)
    values, _ = case.run(
        device=DEVICE,
        dtype=torch.float32,
        labels=labels,
        temperature=temperature,
        implementation=implementation,
    )
    assert torch.equal(values.top_column.cpu(), case.student_logits.float().argmax(dim=-1))


def test_logits_that_kernels_do_not_read_are_refused():
    case = Case.random()
    with pytest.raises(LossError, match="do not read these logits"):
        case.run(implementation="triton")
    turned = replace(case, student_logits=case.student_logits.t().contiguous().t())
    with pytest.raises(LossError, match="not contiguous in their columns"):
        turned.run(logits=turned.student_logits)


@BOTH
@pytest.mark.parametrize("has_factors", [False, True])
@pytest.mark.parametrize(("singles", "chains", "chunks"), [(300, 70, 413), (0, 3, 5), (2, 0, 3)])
def test_values_are_put_where_their_chunks_are(
    implementation, has_factors, singles, chains, chunks
):
    generator = torch.Generator().manual_seed(chunks)
    chunk = torch.randperm(chunks, generator=generator)[: singles + chains]
    place = torch.full((chunks,), -1, dtype=torch.int32)
    place[chunk] = torch.arange(len(chunk), dtype=torch.int32)
    numbers = torch.randn(3, len(chunk), generator=generator)
    agrees = torch.rand(len(chunk), generator=generator) < 0.5
    counted = torch.rand(chains, generator=generator) < 0.7
    factor = torch.rand(chunks, generator=generator) if has_factors else 0.25
    expected, compared = torch.zeros(4, chunks), torch.zeros(chunks, dtype=torch.bool)
    expected[:, chunk] = torch.cat([numbers, agrees[None].float()])
    expected[0] *= factor
    compared[chunk] = torch.cat([torch.ones(singles, dtype=torch.bool), counted])
    columns = [*(row.to(DEVICE) for row in numbers), agrees.to(DEVICE)]
    parts = [EventComparison(*(x[part] for x in columns)) for part in _halves(singles)]
    values, usable = values_by_chunk(
        parts,
        counted.to(DEVICE),
        place.to(DEVICE),
        factor.to(DEVICE) if has_factors else factor,
        implementation=implementation,
    )
    torch.testing.assert_close(values.cpu(), expected, rtol=1e-6, atol=0)
    assert torch.equal(usable.cpu(), compared)


def _halves(singles):
    return slice(0, singles), slice(singles, None)
