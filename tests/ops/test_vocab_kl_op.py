import pytest
import torch

from megatron_ext.distributed import vocab_parallel
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.vocab_kl import vocab_kl, vocab_kl_reference
from tests.ops.kernel_case import DIRECTIONS, kept_for_backward, packed


def _logits(rows=9, vocab=37, seed=0):
    generator = torch.Generator().manual_seed(seed)
    both = 3 * torch.randn(2, rows, vocab, generator=generator, dtype=torch.float64)
    return both[0], both[1]


def _run(student, teacher, *, padding=(0, 0), dtype=torch.float64, weights=None, **options):
    """The op on padded logits, and the gradient of the real columns."""
    vocab = student.shape[-1]
    padded = [
        torch.nn.functional.pad(logits, (0, extra), value=60.0).to(dtype)
        for logits, extra in zip((student, teacher), padding, strict=True)
    ]
    shards = [VocabShard(start=0, stop=vocab + extra, vocab_size=vocab) for extra in padding]
    logits = padded[0].requires_grad_()
    out = vocab_kl(
        logits, padded[1], student_shard=shards[0], teacher_shard=shards[1], **packed(options)
    )
    weights = torch.ones_like(out.row_loss) if weights is None else weights
    (grad,) = torch.autograd.grad(out.row_loss, logits, weights)
    assert not grad[:, vocab:].any(), "padding has a gradient"
    return out, grad[:, :vocab]


@pytest.mark.parametrize("padding", [(0, 0), (3, 9), (9, 3)], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("rows", "vocab"), [(9, 37), (1, 2), (4, 1), (0, 5)])
def test_value_and_gradient_equal_the_references(rows, vocab, direction, temperature, padding):
    student, teacher = _logits(rows, vocab)
    options = {"direction": direction, "temperature": temperature, "mixture": 0.3}
    weights = torch.rand(rows, dtype=torch.float64) + 0.1
    student.requires_grad_()
    truth = vocab_kl_reference(student, teacher, **options)
    (true_grad,) = torch.autograd.grad(truth, student, weights)
    out, grad = _run(student.detach(), teacher, padding=padding, weights=weights, **options)
    torch.testing.assert_close(out.row_loss, truth, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(grad, true_grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_fp32_and_bf16_lose_no_more_than_torch_in_fp32(direction):
    student, teacher = _logits(30, 301)
    for dtype in (torch.float32, torch.bfloat16):
        rounded = student.to(dtype).double().requires_grad_()
        given = teacher.to(dtype).double()
        truth = vocab_kl_reference(rounded, given, direction=direction)
        (true_grad,) = torch.autograd.grad(truth.sum(), rounded)
        single = rounded.detach().float().requires_grad_()
        plain = vocab_kl_reference(single, given.float(), direction=direction)
        (plain_grad,) = torch.autograd.grad(plain.sum(), single)
        out, grad = _run(rounded.detach(), given, dtype=dtype, direction=direction)
        assert out.row_loss.dtype == torch.float32
        errors = [(value.double() - truth).abs().max() for value in (out.row_loss, plain)]
        assert errors[0] <= 2 * errors[1] + 1e-7
        if dtype == torch.bfloat16:
            # Rounded once, to 8 bits.
            torch.testing.assert_close(grad.double(), true_grad, rtol=2**-8, atol=1e-6)
        else:
            errors = [(value.double() - true_grad).abs().max() for value in (grad, plain_grad)]
            assert errors[0] <= 2 * errors[1] + 1e-7


def test_a_row_without_an_upstream_gradient_gives_none_and_is_not_looked_at():
    student, teacher = _logits()
    student[2], teacher[4] = torch.nan, torch.nan
    weights = torch.ones(9, dtype=torch.float64)
    weights[[2, 4]] = 0.0
    out, grad = _run(student, teacher, weights=weights)
    assert out.row_loss.isnan().nonzero()[:, 0].tolist() == [2, 4]
    assert grad.isfinite().all()
    assert not grad[[2, 4]].any()


def test_entropy_and_agreement_are_the_rows():
    student, teacher = _logits()
    student[:4] = teacher[:4] * 2
    out, _ = _run(student, teacher, padding=(3, 1), temperature=2.0)
    p = torch.softmax(teacher / 2.0, dim=-1)
    torch.testing.assert_close(out.teacher_entropy, -(p * p.log()).sum(dim=-1))
    assert torch.equal(out.top1_agreement, student.argmax(dim=-1) == teacher.argmax(dim=-1))
    assert out.top1_agreement[:4].all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_slices_of_rows_change_nothing(monkeypatch, direction):
    student, teacher = _logits()
    whole = _run(student, teacher, direction=direction)
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, "cpu", 80)
    sliced = _run(student, teacher, direction=direction)
    assert torch.equal(whole[0].row_loss, sliced[0].row_loss)
    assert torch.equal(whole[1], sliced[1])


def test_only_the_gradient_and_vectors_are_kept_for_backward():
    student, teacher = _logits(50, 400)
    kept = kept_for_backward(lambda: _run(student, teacher, dtype=torch.bfloat16))
    assert [tensor.dtype for tensor in kept if tensor.numel() > 50] == [torch.bfloat16]
