"""Chunk means, their member masses and their gradient against autograd over means in fp64."""

import pytest
import torch

from megatron_ext.distributed import vocab_parallel
from megatron_ext.ops.model_rows import (
    chunk_means,
    chunk_means_by_kernel,
    host_offsets,
    pair_of_models,
    row_scale,
    write_row_gradients,
    write_rows_of_no_chunk,
)
from tests.ops.chunk_pair import MANY, ChunkPair
from tests.ops.kernel_case import DEVICE, DTYPES, rounding

SIZES = (*MANY, (0, 1), (1, 0))


def models_of(case, members=None):
    return pair_of_models(*case.sides(), temperature=1.3, members=members, implementation="torch")


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by", ["triton", "torch"])
def test_means_are_those_of_softmaxes_and_padding_is_zero(dtype, by):
    if by == "triton":
        pytest.importorskip("triton")
    case = ChunkPair.random((301, 205), sizes=SIZES, dtype=dtype)
    models = models_of(case)
    ends, everything = host_offsets(*models), slice(0, len(SIZES))
    for model, own, truth in zip(models, ends, case.means(temperature=1.3), strict=True):
        if by == "torch":
            means = chunk_means(model, own, everything)
        else:
            means = chunk_means_by_kernel(model, everything)
        assert means.dtype == torch.float32
        torch.testing.assert_close(means[:, : truth.shape[1]].double(), truth, rtol=1e-5, atol=1e-8)
        assert not means[:, truth.shape[1] :].any()


def test_the_mass_of_members_is_their_probability():
    case = ChunkPair.random((60, 41), sizes=SIZES)
    members = tuple(torch.arange(side.shape[1], device=DEVICE) % 3 == 0 for side in case.logits)
    for model, chosen, truth in zip(
        models_of(case, (members[0], members[1])), members, case.means(temperature=1.3), strict=True
    ):
        mass = model.rows.means(model.member_mass)
        inside = truth[:, chosen[: truth.shape[1]]].sum(dim=-1)
        torch.testing.assert_close(mass.double(), inside, rtol=1e-5, atol=1e-7)


def test_rows_of_no_chunk_do_not_reach_a_mean_over_rows():
    case = ChunkPair.random((20, 10), sizes=((2, 1), (0, 1), (3, 1)))
    model, _ = models_of(case)
    values = torch.where(case.chunk_ids[0] < 0, torch.nan, 1.0)
    assert model.rows.means(values).tolist() == [1.0, 0.0, 1.0]


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [1 << 20, 400], ids=["at once", "in slices"])
def test_a_slope_of_the_means_becomes_the_gradient_of_the_logits(dtype, elements, monkeypatch):
    case = ChunkPair.random((61, 41), sizes=SIZES, dtype=dtype)
    torch.manual_seed(1)
    weights = torch.randn(len(SIZES), 66, device=DEVICE)
    _, truth = case.truth(lambda q, _: (q * weights[:, :61].double()).sum(-1), temperature=1.3)
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, DEVICE.type, elements)
    model, _ = models_of(case)
    gradient, scale = torch.empty_like(case.logits[0]), row_scale(model, case.weights)
    ends = host_offsets(model)[0]
    for chunks in vocab_parallel.row_slices(len(SIZES), 66, device=DEVICE):
        write_row_gradients(model, ends, chunks, weights[chunks], scale, gradient)
    write_rows_of_no_chunk(gradient, model, by_kernel=False)
    slack = 1e-6 + rounding(dtype)
    limit = slack * float(truth.abs().max())
    torch.testing.assert_close(gradient.double(), truth, rtol=0, atol=limit)
    assert (gradient[case.chunk_ids[0] < 0] == 0).all()
