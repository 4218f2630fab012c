"""Likelihoods of chunks: kernels and torch against sums that are written out."""

from dataclasses import replace

import pytest
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.losses.lookup import chunked_labels
from megatron_ext.ops.chunk_likelihood import RowLikelihoods, chunk_likelihoods
from tests.ops.kernel_case import BOTH, DEVICE

pytest.importorskip("triton")

NONE = -1


def _batch(samples, rows, seed):
    """An alignment of samples whose chunks have one to four rows a side, with rows of no chunk
    between some, and labels of which some are missing."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((2, samples, rows), NONE)
    chunk = 0
    for sample in range(samples):
        ends = [0, 0]
        while True:
            sizes = torch.randint(1, 5, (2,), generator=generator).tolist()
            gaps = torch.randint(-3, 2, (2,), generator=generator).clamp(min=0).tolist()
            begins = [end + gap for end, gap in zip(ends, gaps, strict=True)]
            ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
            if max(ends) > rows:
                break
            for side in range(2):
                ids[side, sample, begins[side] : ends[side]] = chunk
            chunk += 1
    labels = torch.randint(0, 9, (2, samples, rows), generator=generator)
    labels[torch.rand(2, samples, rows, generator=generator) < 0.07] = -100
    return AlignmentBatch.from_chunk_ids(*ids), labels


def _written_out(alignment, labels, likelihoods, counted):
    """What ``chunk_likelihoods`` says, chunk by chunk."""
    ids = alignment.student_chunk_id, alignment.teacher_chunk_id
    behind = alignment.student_behind, alignment.teacher_behind
    found = []
    for chunk in range(alignment.chunk_count):
        sums, ends, usable = [], [], counted is None or bool(counted[chunk])
        for side in range(2):
            flat = labels[side].flatten()
            rows = (ids[side].flatten() == chunk).nonzero()[:, 0]
            sums.append(likelihoods[side].log_prob[rows].sum())
            usable &= bool((flat[rows] >= 0).all())
            after = int(rows[-1]) + 1
            exists = after % labels.shape[-1] != 0 and bool(flat[after] >= 0)
            if behind[side] is not None:
                after = int(behind[side][chunk])
                exists = after >= 0
            ends.append(after if exists else None)
        follows = usable and None not in ends
        masses = [likelihoods[side].log_mass[ends[side]] if follows else 0.0 for side in range(2)]
        found.append((*sums, *masses, follows, usable))
    return found


@BOTH
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize(("samples", "rows"), [(2, 161), (1, 1), (3, 17)])
def test_likelihoods_and_gradients_are_those_of_the_rows(
    implementation, given, has_mask, samples, rows
):
    alignment, labels = _batch(samples, rows, seed=rows)
    count = alignment.chunk_count
    if given:
        own, its = (torch.randperm(samples * rows)[:count] for _ in range(2))
        own[::3], its[1::4] = NONE, NONE
        alignment = replace(alignment, student_behind=own, teacher_behind=its)
    counted = torch.rand(count) < 0.8 if has_mask else None
    values = torch.randn(2, 2, samples * rows, dtype=torch.float64)
    truth = [RowLikelihoods(*part.clone().requires_grad_()) for part in values]
    leaves = [part.float().to(DEVICE) for part in values]
    leaves[0].requires_grad_()
    moved = alignment.to(DEVICE)
    out = chunk_likelihoods(
        tuple(RowLikelihoods(*part) for part in leaves),
        chunked_labels(moved, *labels.to(DEVICE)),
        None if counted is None else counted.to(DEVICE),
        implementation=implementation,
    )
    expected = _written_out(alignment, labels, truth, counted)
    assert out.follows.tolist() == [line[4] for line in expected]
    assert out.usable.tolist() == [line[5] for line in expected]
    graphs = [part.requires_grad for part in out]
    assert graphs == [True, False, True, False, False, False]
    weights = torch.rand(2, count, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for place, line in enumerate(expected):
        got = torch.stack([part[place].detach().cpu().double() for part in out[:4]])
        wanted = torch.stack([torch.as_tensor(part).double() for part in line[:4]])
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
        total = total + weights[0, place] * line[0] + weights[1, place] * line[2]
    if not count:
        return
    on = weights.float().to(DEVICE)
    got_sum = (on[0] * out.student).sum() + (on[1] * out.student_boundary).sum()
    (grad,) = torch.autograd.grad(got_sum, leaves[0])
    true_grad = torch.autograd.grad(total, truth[0], allow_unused=True)
    for mine, wanted in zip(grad, true_grad, strict=True):
        exact = torch.zeros(samples * rows).double() if wanted is None else wanted
        torch.testing.assert_close(mine.cpu().double(), exact, rtol=1e-6, atol=1e-7)
