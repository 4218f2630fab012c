"""Chunk distributions of two models against means of softmaxes in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ext.distributed import row_slices
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.chunk_distributions import chunk_distributions
from megatron_ext.ops.chunk_reduce.reference import chunk_mean_softmax_reference
from tests.ops.projected_kl_case import random_chunks

SIZES: dict[str, dict[str, Any]] = {
    "chunks of several rows": {},
    "one-token sequences": {"lengths": (1, 1), "chunks": 1},
    "no chunk": {"chunks": 0},
    "every row its own chunk": {"lengths": (8, 8), "chunks": 8},
}


class Case:
    def __init__(
        self,
        *,
        lengths: tuple[int, int] = (11, 7),
        vocabs: tuple[int, int] = (19, 13),
        chunks: int = 4,
        scale: float = 3.0,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.logits = [
            scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)
            for rows, width in zip(lengths, vocabs, strict=True)
        ]
        self.chunk_ids = random_chunks(lengths, chunks)
        self.chunks, self.vocabs = chunks, vocabs
        shape = (chunks, vocabs[0])
        self.weights = torch.randn(shape, generator=generator, dtype=torch.float64)

    def run(
        self, *, dtype: torch.dtype = torch.float64, padding: int = 0, temperature: float = 1.3
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q, P, and the gradient of a weighted sum of Q."""
        logits = [
            torch.nn.functional.pad(side, (0, padding), value=1e30).to(dtype)
            for side in self.logits
        ]
        shards = [VocabShard(start=0, stop=size + padding, vocab_size=size) for size in self.vocabs]
        student = logits[0].requires_grad_()
        q, p = chunk_distributions(
            student,
            logits[1],
            student_chunk_id=self.chunk_ids[0],
            teacher_chunk_id=self.chunk_ids[1],
            chunk_count=self.chunks,
            student_shard=shards[0],
            teacher_shard=shards[1],
            temperature=temperature,
        )
        # Padding weighs much: its gradient must not arrive.
        weights = torch.nn.functional.pad(self.weights, (0, padding), value=1e6).to(q.dtype)
        (grad,) = torch.autograd.grad((q * weights).sum(), student)
        return q, p, grad

    def truth(self, temperature: float = 1.3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        student = self.logits[0].detach().requires_grad_()
        q, p = (
            chunk_mean_softmax_reference(logits, ids, self.chunks, temperature=temperature)
            for logits, ids in zip((student, self.logits[1]), self.chunk_ids, strict=True)
        )
        (grad,) = torch.autograd.grad((q * self.weights).sum(), student)
        return q, p, grad


@pytest.mark.parametrize("padding", [0, 5], ids=["unpadded", "padded"])
@pytest.mark.parametrize("name", SIZES)
def test_both_means_and_the_gradient_equal_the_references(name: str, padding: int) -> None:
    case = Case(**SIZES[name])
    truth = case.truth()
    for dtype, slack in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        for value, true_value in zip(case.run(dtype=dtype, padding=padding), truth, strict=True):
            width = true_value.shape[1]
            torch.testing.assert_close(
                value[:, :width].double(), true_value, rtol=10 * slack, atol=slack
            )
            assert not value[:, width:].any(), "padding takes part"


def test_rows_of_no_chunk_are_not_looked_at() -> None:
    case = Case()
    truth = case.truth()
    for logits, ids in zip(case.logits, case.chunk_ids, strict=True):
        logits[ids < 0] = torch.nan
    for value, true_value in zip(case.run(), truth, strict=True):
        torch.testing.assert_close(value, true_value, rtol=1e-13, atol=1e-14)


def test_bf16_logits_are_summed_in_fp32_and_get_a_gradient_rounded_once() -> None:
    case = Case(vocabs=(301, 205), lengths=(40, 30), chunks=20)
    case.logits = [side.bfloat16().double() for side in case.logits]
    (true_q, true_p, true_grad), (q, p, grad) = case.truth(), case.run(dtype=torch.bfloat16)
    assert (q.dtype, p.dtype, grad.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    torch.testing.assert_close(q.double(), true_q, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(p.double(), true_p, rtol=1e-5, atol=1e-8)
    # Half a unit of 8 bits is 2^-9 of the value.
    torch.testing.assert_close(grad.double(), true_grad, rtol=2**-8, atol=1e-7)


def test_extreme_and_masked_logits_stay_finite() -> None:
    case = Case(scale=1e4)
    case.logits[0][:, 3:6] = -torch.inf
    q, p, grad = case.run(dtype=torch.float32)
    assert all(tensor.isfinite().all() for tensor in (q, p, grad))
    assert not q[:, 3:6].any()
    assert not grad[:, 3:6].any()
    torch.testing.assert_close(q.sum(dim=-1), torch.ones(4))


def test_the_logits_and_vectors_are_all_that_is_kept() -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    case = Case(vocabs=(400, 30), lengths=(50, 40), chunks=10)
    student = case.logits[0].float().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chunk_distributions(
            student,
            case.logits[1].float(),
            student_chunk_id=case.chunk_ids[0],
            teacher_chunk_id=case.chunk_ids[1],
            chunk_count=10,
            student_shard=VocabShard(start=0, stop=400, vocab_size=400),
            teacher_shard=VocabShard(start=0, stop=30, vocab_size=30),
        )
    large = [tensor for tensor in kept if tensor.dim() > 1]
    assert len(large) == 1
    assert large[0].data_ptr() == student.data_ptr()


def test_the_value_does_not_depend_on_how_rows_are_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Case().run()
    monkeypatch.setitem(row_slices.SLICE_ELEMENTS, "cpu", 40)
    for one, other in zip(whole, Case().run(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-16)
