"""Signals of sampled chunks: the kernel and torch against what is written out in Python."""

import math

import pytest
import torch

from megatron_ext.ops.chunk_rows import ChunkRows
from megatron_ext.ops.sampled_signal import SignalLimits, sampled_signals
from tests.ops.kernel_case import BOTH, DEVICE

pytest.importorskip("triton")

LIMITS = SignalLimits(signal=3.0, ratio=1.5)


def _case(count):
    generator = torch.Generator().manual_seed(count)
    sizes = torch.randint(1, 5, (count,), generator=generator)
    chunk_id = torch.repeat_interleave(torch.arange(count), sizes)
    chunk_id = torch.cat([chunk_id, torch.tensor([-1, -1])])
    own, its = -6 * torch.rand(2, count, generator=generator)
    sampled = -torch.rand(len(chunk_id), generator=generator) * 2
    usable = torch.rand(count, generator=generator) < 0.9
    if count > 8:
        own[:3], its[2:5] = -torch.inf, -torch.inf
        its[5], own[6], usable[5:7] = own[5], torch.nan, torch.tensor([True, False])
        sampled[chunk_id == 7] = torch.nan
        # Ratios beyond all limits.
        own[8], sampled[chunk_id == 8] = -0.1, -200.0
    return own, its, usable, sampled, chunk_id


def _written_out(own, its, sampled):
    signal = min(max(its - own, -LIMITS.signal), LIMITS.signal)
    ratio = 1.0
    if sampled is not None and not any(map(math.isnan, sampled)):
        ratio = math.exp(min(own - sum(sampled), 20.0))
    near = min(signal, 5.0)
    return math.expm1(near) - near, ratio, -min(ratio, LIMITS.ratio) * signal


@BOTH
@pytest.mark.parametrize("has_samples", [False, True])
@pytest.mark.parametrize("count", [0, 1, 300])
def test_signals_are_those_of_the_definition(implementation, has_samples, count):
    own, its, usable, sampled, chunk_id = _case(count)
    student = own.to(DEVICE).requires_grad_()
    out = sampled_signals(
        student,
        its.to(DEVICE),
        usable.to(DEVICE),
        sampled.to(DEVICE) if has_samples else None,
        ChunkRows.of(chunk_id.to(DEVICE), count),
        LIMITS,
        implementation=implementation,
    )
    (slope,) = torch.autograd.grad(out.loss.where(out.kept, 0.0).sum(), student)
    kept = usable & own.isfinite() & its.isfinite()
    assert torch.equal(out.kept.cpu(), kept)
    assert not slope[~out.kept].any()
    for chunk in kept.nonzero()[:, 0].tolist():
        of_chunk = sampled[chunk_id == chunk].tolist() if has_samples else None
        value, ratio, expected = _written_out(own[chunk].item(), its[chunk].item(), of_chunk)
        assert out.loss[chunk].item() == pytest.approx(value, rel=1e-5, abs=1e-6)
        assert out.ratio[chunk].item() == pytest.approx(ratio, rel=1e-5)
        assert out.cut[chunk].item() == (ratio > LIMITS.ratio)
        assert slope[chunk].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert out.student_nats[chunk].item() == -own[chunk].item()
        assert out.teacher_nats[chunk].item() == -its[chunk].item()
    if count > 8:
        assert (out.loss[5], slope[5]) == (0.0, 0.0)
        assert has_samples == bool((out.cut > 0).any())


@BOTH
def test_not_a_number_of_a_usable_chunk_shows(implementation):
    nan = torch.tensor([torch.nan], device=DEVICE)
    one = torch.tensor([-1.0], device=DEVICE)
    for pair in ((nan, one), (one, nan)):
        usable, rows = torch.ones(1, dtype=torch.bool, device=DEVICE), torch.zeros(1).long()
        rows = ChunkRows.of(rows.to(DEVICE), 1)
        out = sampled_signals(*pair, usable, None, rows, LIMITS, implementation=implementation)
        assert out.kept.all()
        assert out.loss.isnan().all()
