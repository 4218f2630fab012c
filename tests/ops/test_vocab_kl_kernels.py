"""Divergences over one vocabulary by kernel, and by torch under the same checks."""

import pytest
import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.divergence import DivergenceOptions
from megatron_ext.ops.vocab_kl import evaluate_vocab_kl, vocab_kl, vocab_kl_reference
from tests.ops.kernel_case import (
    ALL_THREE,
    DEVICE,
    DIRECTIONS,
    DTYPES,
    EVERY_COMBINATION,
    assert_as_exact,
    combinations,
    packed,
    rounding,
)

pytest.importorskip("triton")


def _shard(width, vocab):
    return VocabShard(start=0, stop=width, vocab_size=vocab)


def _shards(width, vocab):
    return dict.fromkeys(("student_shard", "teacher_shard"), _shard(width, vocab))


def _padded(logits, padding):
    """With columns of padding that would win, and with gaps between the rows."""
    rows, vocab = logits.shape
    wide = torch.full((rows, vocab + padding + 3), 1e4, dtype=logits.dtype, device=DEVICE)
    wide[:, :vocab] = logits
    return wide[:, : vocab + padding]


def _reference(student, teacher, labels, weights, ce_weight, **options):
    """Row losses, cross-entropies and the gradient, in the dtype of the logits."""
    student = student.clone().requires_grad_()
    losses = vocab_kl_reference(student, teacher, **options)
    ce = torch.nn.functional.cross_entropy(student, labels.clamp(min=0), reduction="none") * (
        labels >= 0
    )
    (grad,) = torch.autograd.grad(((losses + ce_weight * ce) * weights).sum(), student)
    return losses.detach(), ce.detach(), grad


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
@pytest.mark.parametrize(
    ("dtype", "temperature", "direction", "rows", "vocab"),
    [
        *((*case, 3, 4133) for case in combinations(DTYPES, (1.0, 2.5), DIRECTIONS)),
        *((torch.float32, 1.0, "forward", *size) for size in [(1, 7), (0, 9)]),
    ],
    ids=str,
)
def test_values_and_the_gradient_are_as_exact_as_torch(
    implementation, dtype, temperature, direction, rows, vocab
):
    torch.manual_seed(rows)
    student, teacher = (2 * torch.randn(2, rows, vocab, device=DEVICE)).to(dtype)
    labels = torch.randint(0, vocab, (rows,), device=DEVICE)
    labels[1::3] = -100
    weights = torch.rand(rows, device=DEVICE) + 0.1
    options = {"temperature": temperature, "direction": direction, "mixture": 0.3}
    truth = _reference(student.double(), teacher.double(), labels, weights.double(), 0.7, **options)
    plain = _reference(student.float(), teacher.float(), labels, weights, 0.7, **options)
    given = _padded(student, 5)
    gradient = torch.empty_like(given)
    out = evaluate_vocab_kl(
        given,
        _padded(teacher, 2),
        student_shard=_shard(vocab + 5, vocab),
        teacher_shard=_shard(vocab + 2, vocab),
        labels=labels,
        grad_scale=weights,
        label_grad_scale=0.7 * weights,
        gradient=gradient,
        implementation=implementation,
        **packed(options),
    )
    # Sums of thousands of terms in another order.
    assert_as_exact(out.row_loss, plain[0], truth[0], slack=3e-6)
    assert_as_exact(out.cross_entropy, plain[1], truth[1], slack=1e-6)
    assert_as_exact(gradient[:, :vocab], plain[2].to(dtype), truth[2], slack=rounding(dtype) + 1e-6)
    assert not gradient[:, vocab:].any()
    p = torch.softmax(teacher.double() / temperature, dim=-1)
    entropy = -(p * p.log()).sum(dim=-1)
    torch.testing.assert_close(out.teacher_entropy.double(), entropy, rtol=1e-6, atol=1e-6)
    assert torch.equal(out.top1_agreement, student.argmax(dim=-1) == teacher.argmax(dim=-1))


@pytest.mark.usefixtures("nan_filled", "in_any_order")
@ALL_THREE
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_gradient_can_take_the_place_of_the_logits(implementation, direction):
    # Loops for bf16 take four seconds to compile.
    is_half = implementation != "cpu" or EVERY_COMBINATION
    student, teacher = torch.randn(2, 4, 4200, device=DEVICE).to(
        torch.bfloat16 if is_half else torch.float32
    )
    labels = torch.tensor([3, -1, 4199, 0], device=DEVICE)
    options = {
        **_shards(4200, 4190),
        "temperature": 1.5,
        "direction": direction,
        "labels": labels,
        "implementation": implementation,
    }
    apart = torch.empty_like(student)
    truth = evaluate_vocab_kl(student, teacher, gradient=apart, **packed(options))
    out = evaluate_vocab_kl(student, teacher, gradient=student, **packed(options))
    assert torch.equal(student, apart)
    assert torch.equal(out.row_loss, truth.row_loss)


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rows_of_scale_0_are_not_read(implementation, direction):
    student, teacher = torch.randn(2, 4, 70, device=DEVICE)
    alone = torch.empty_like(student)
    options = {**_shards(70, 70), "direction": direction, "implementation": implementation}
    truth = evaluate_vocab_kl(student, teacher, gradient=alone, **packed(options))
    student[1], teacher[2] = torch.nan, torch.nan
    grad_scale = torch.tensor([1.0, 0.0, 0.0, 1.0], device=DEVICE)
    gradient = torch.empty_like(student)
    out = evaluate_vocab_kl(
        student, teacher, gradient=gradient, grad_scale=grad_scale, **packed(options)
    )
    read = grad_scale != 0
    assert torch.equal(gradient, alone * read[:, None])
    for got, whole in zip(out[:3], truth[:3], strict=True):
        assert isinstance(got, torch.Tensor)
        assert isinstance(whole, torch.Tensor)
        assert torch.equal(got, torch.where(read, whole, torch.zeros_like(whole)))
    # A label alone: the teacher's NaN does not get into the gradient.
    labels = torch.tensor([-1, -1, 5, -1], device=DEVICE)
    out = evaluate_vocab_kl(
        student, teacher, labels=labels, grad_scale=grad_scale, gradient=gradient, **packed(options)
    )
    expected = torch.softmax(student[2], dim=-1)
    expected[5] -= 1
    torch.testing.assert_close(gradient[2], expected, rtol=1e-5, atol=1e-7)
    assert not gradient[1].any()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_huge_and_masked_logits_are_those_of_torch(by, direction):
    student, teacher = torch.randn(2, 5, 300, device=DEVICE)
    student[0], teacher[0] = student[0] + 1e4, teacher[0] - 1e4
    student[1, 3], teacher[1, 3] = -torch.inf, -torch.inf
    teacher[2, 10:] = -torch.inf
    student[3, :290] = -torch.inf
    student[4, 2], teacher[4, 2] = -torch.inf, 20.0
    found = []
    for implementation in (by, "torch"):
        gradient = torch.empty_like(student)
        out = evaluate_vocab_kl(
            student,
            teacher,
            **_shards(300, 300),
            gradient=gradient,
            implementation=implementation,
            options=DivergenceOptions(direction=direction),
        )
        found.append((out.row_loss, gradient))
    (loss, gradient), (true_loss, true_gradient) = found
    assert gradient.isfinite().all()
    torch.testing.assert_close(loss, true_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, true_gradient, rtol=1e-4, atol=1e-6)
    if direction == "forward":
        # What the teacher says where the student can say nothing moves none of the rest.
        others = torch.cat([student[4, :2], student[4, 3:]])
        known = torch.cat([teacher[4, :2], teacher[4, 3:]])
        mass = 1 - torch.softmax(teacher[4].double(), dim=-1)[2]
        expected = mass * (torch.softmax(others, dim=-1) - torch.softmax(known, dim=-1))
        got = torch.cat([gradient[4, :2], gradient[4, 3:]])
        torch.testing.assert_close(got.double(), expected.double(), rtol=1e-4, atol=1e-11)
        assert gradient[4, 2] == 0


@ALL_THREE
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_equal_logits_have_no_loss_and_no_gradient(implementation, direction):
    logits = (5 * torch.randn(3, 5000, device=DEVICE)).requires_grad_()
    out = vocab_kl(
        logits,
        logits.detach(),
        **_shards(5000, 5000),
        implementation=implementation,
        options=DivergenceOptions(direction=direction),
    )
    (grad,) = torch.autograd.grad(out.row_loss.sum(), logits)
    assert out.row_loss.abs().max() < (1e-7 if implementation == "torch" else 1e-6)
    assert grad.abs().max() < 1e-7
    assert out.top1_agreement.all()


@ALL_THREE
def test_what_arrives_may_differ_from_the_scale(implementation):
    student, teacher = torch.randn(2, 4, 60, device=DEVICE)
    grad_scale = torch.tensor([0.5, 1.0, 0.0, 2.0], device=DEVICE)
    got = torch.tensor([0.5, 3.0, 1.0, -1.0], device=DEVICE)
    nothing = torch.full((4,), -1, device=DEVICE)
    truth = _reference(
        student.double(), teacher.double(), nothing, (got * (grad_scale != 0)).double(), 0.0
    )
    for in_place in (False, True):
        leaf = student.clone().requires_grad_()
        logits = leaf * 1.0
        out = vocab_kl(
            logits,
            teacher,
            **_shards(60, 60),
            grad_scale=grad_scale,
            in_place=in_place,
            implementation=implementation,
        )
        (kept,) = torch.autograd.grad((out.row_loss * got).sum(), leaf, retain_graph=True)
        (grad,) = torch.autograd.grad((out.row_loss * got).sum(), leaf)
        assert torch.equal(kept, grad)
        torch.testing.assert_close(grad.double(), truth[2], rtol=1e-5, atol=1e-6)
        expected = truth[0] * (grad_scale != 0)
        torch.testing.assert_close(out.row_loss.double(), expected, rtol=1e-5, atol=1e-6)


def test_without_a_gradient_the_logits_stay_as_they_are():
    student, teacher = torch.randn(2, 4, 60, device=DEVICE)
    before = student.clone()
    with torch.no_grad():
        vocab_kl(student.requires_grad_(), teacher, **_shards(60, 60), in_place=True)
    assert torch.equal(student, before)


def test_a_stale_reader_of_overwritten_logits_gets_an_error():
    leaf = torch.randn(2, 30, requires_grad=True)
    logits = leaf * 1.0
    other = logits.square().sum()
    out = vocab_kl(logits, torch.randn(2, 30), **_shards(30, 30), in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (other + out.row_loss.sum()).backward()


@ALL_THREE
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_shards_give_what_one_rank_does(implementation, direction):
    """Two ranks in one process: what each sums of its columns, merged by hand."""
    from megatron_ext.distributed.vocab_parallel import LogSumExp
    from megatron_ext.ops.vocab_kl.pair_evaluation import PairEvaluation, pair_statistics

    student, teacher = 3 * torch.randn(2, 3, 90, device=DEVICE)
    whole = torch.empty_like(student)
    truth = evaluate_vocab_kl(
        student,
        teacher,
        **_shards(90, 90),
        gradient=whole,
        implementation=implementation,
        options=DivergenceOptions(temperature=1.3, direction=direction),
    )
    cuts = [slice(0, 50), slice(50, 90)]
    local = [
        pair_statistics(
            student[:, cut],
            teacher[:, cut],
            temperature=1.3,
            with_plain=False,
            read=None,
            held_width=cut.stop - cut.start,
            by=implementation,
        )
        for cut in cuts
    ]

    def merged(side):
        peaks = torch.stack([part[side].peak for part in local])
        totals = torch.stack([part[side].total for part in local])
        top = peaks.amax(dim=0)
        return LogSumExp(top, (totals * (peaks - top).exp()).sum(dim=0).log())

    options = DivergenceOptions(temperature=1.3, direction=direction)
    weight = torch.ones(3, device=DEVICE)
    sweeps = [
        PairEvaluation(
            student[:, cut],
            teacher[:, cut],
            merged(0),
            merged(1),
            weight,
            None,
            options,
            cut.stop - cut.start,
        )
        for cut in cuts
    ]
    value, centre, entropy = sum(sweep.run(by=implementation) for sweep in sweeps)
    gradient = torch.empty_like(student)
    for sweep, cut in zip(sweeps, cuts, strict=True):
        sweep.run(centre=centre, gradient=gradient[:, cut], by=implementation)
    torch.testing.assert_close(1.3**2 * value, truth.row_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy, truth.teacher_entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, whole, rtol=1e-4, atol=1e-6)
