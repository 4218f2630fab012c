"""Sums over chunks and labels, and flags of bad rows: kernels against torch."""

import pytest
import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.ops.sums import CountedChunks, ReadRows, bad_rows, chunk_sums, label_sums
from tests.ops.kernel_case import BOTH, DEVICE

pytest.importorskip("triton")

CHUNKS = 1100
CLASSES = 4


def _chunks(used):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 4, (CHUNKS,), generator=generator)
    classes = torch.randint(0, CLASSES, (CHUNKS,), generator=generator, dtype=torch.int8)
    offsets = torch.cat([torch.zeros(1), sizes.cumsum(0)]).int()
    return CountedChunks(used, classes.to(DEVICE), CLASSES, offsets.to(DEVICE))


@BOTH
@pytest.mark.parametrize("has_mask", [False, True])
def test_chunks_are_summed_by_column_and_class(implementation, has_mask):
    loss = torch.randn(CHUNKS, device=DEVICE)
    agreement = torch.rand(CHUNKS, device=DEVICE) > 0.5
    used = torch.rand(CHUNKS, device=DEVICE) > 0.3 if has_mask else None
    if has_mask:
        loss[~used] = torch.nan
    loss.requires_grad_()
    chunks = _chunks(used)
    kept = torch.ones_like(agreement) if used is None else used
    sums = chunk_sums(loss, [agreement, 2 * loss], chunks, implementation=implementation)
    double = loss.detach().double().where(kept, 0.0)
    close = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(sums.loss.double(), double.sum(), **close)
    torch.testing.assert_close(sums.columns[1].double(), 2 * double.sum(), **close)
    assert sums.columns[0] == (agreement & kept).sum()
    assert torch.equal(sums.kept, loss.detach().where(kept, 0.0))
    assert (sums.number, sums.rows) == (kept.sum(), chunks.offsets.diff()[kept].sum())
    assert sums.number.dtype == sums.rows.dtype == torch.int64
    for number in range(CLASSES):
        is_member = chunks.classes == number
        assert sums.by_class.chunks[number] == is_member.sum()
        assert (
            sums.by_class.counts[number] == sums.by_class.used[number] == (is_member & kept).sum()
        )
        of_class = double[is_member].sum()
        torch.testing.assert_close(sums.by_class.loss[number].double(), of_class, **close)
    (grad,) = torch.autograd.grad(3 * sums.loss, loss)
    assert torch.equal(grad, 3.0 * kept)


@BOTH
def test_a_microbatch_of_no_chunk_has_sums_of_0(implementation):
    chunks = _chunks(None)
    nothing = chunks._replace(classes=chunks.classes[:0], offsets=chunks.offsets[:1])
    sums = chunk_sums(torch.zeros(0, device=DEVICE), (), nothing, implementation=implementation)
    assert (sums.loss, sums.number, sums.rows, len(sums.columns)) == (0, 0, 0, 0)
    assert not torch.stack(sums.by_class).any()


@BOTH
def test_rows_of_no_class_are_summed(implementation):
    used = torch.tensor([True, False, True], device=DEVICE)
    values = torch.tensor([1.0, torch.nan, 4.0], device=DEVICE)
    sums = chunk_sums(values, [2 * values], CountedChunks(used), implementation=implementation)
    assert (sums.loss, sums.columns.tolist(), sums.number, sums.rows) == (5, [10.0], 2, 0)
    assert len(sums.by_class.loss) == 0


@BOTH
def test_labels_are_summed_and_counted(implementation):
    labels = torch.randint(0, 3, (5000,), device=DEVICE)
    labels[::7] = IGNORE_INDEX
    top = torch.randint(0, 3, (5000,), device=DEVICE)
    loss = torch.rand(5000, device=DEVICE).where(labels >= 0, 0.0)
    sums = label_sums(loss, top, labels, implementation=implementation)
    torch.testing.assert_close(sums.loss.double(), loss.double().sum(), rtol=1e-5, atol=0.0)
    assert (sums.hits, sums.number) == ((top == labels).sum(), (labels >= 0).sum())
    assert (sums.hits.dtype, sums.number.dtype) == (loss.dtype, torch.int64)


@BOTH
@pytest.mark.parametrize("is_bool", [False, True])
def test_bad_rows_are_told_where_they_are_read(implementation, is_bool):
    labels = torch.tensor([IGNORE_INDEX, IGNORE_INDEX, 5], device=DEVICE)
    chunk_id = torch.tensor([-1, 0, -1], device=DEVICE)
    for row in range(3):
        told = torch.tensor([1.0, torch.inf, -torch.inf], device=DEVICE)
        told[row] = torch.nan
        if is_bool:
            told = told.isnan()

        def flags(*sides):
            return bad_rows(*sides, implementation=implementation).tolist()

        student = ReadRows(told, labels, chunk_id)
        assert flags(student, ReadRows(told)) == [row > 0, True]
        assert flags(ReadRows(told[:0]), ReadRows(told, None, chunk_id)) == [False, row == 1]
