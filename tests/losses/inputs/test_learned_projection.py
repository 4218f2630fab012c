"""Shares of inexact rows that are trained: gradients, checkpoints and export."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.distributed import vocab_parallel
from megatron_ext.errors import ProjectionError
from megatron_ext.losses import ProjectedKLLoss
from megatron_ext.losses.learned_projection import LearnedProjection
from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.projected_kl import (
    LearnedEntries,
    ProjectedKL,
    ProjectedKLOptions,
    ShardedProjection,
    projected_kl,
    projected_kl_reference,
)
from megatron_ext.projection import SparseProjection
from tests.losses.microbatch import Microbatch, csr_arrays
from tests.ops.kernel_case import packed, vocab_shard
from tests.ops.projected_kl_case import Case, random_projection

DIRECTIONS = ("forward", "reverse", "jensen_shannon")


def sparse(dense: torch.Tensor) -> SparseProjection:
    indptr, indices, values = csr_arrays(dense)
    return SparseProjection(indptr, indices, values, (dense.shape[0], dense.shape[1]))


def learned(dense: torch.Tensor, padding: tuple[int, int] = (0, 0)) -> LearnedProjection:
    shards = [
        vocab_shard(n, extra, 0, 1, None) for n, extra in zip(dense.shape, padding, strict=True)
    ]
    return LearnedProjection(sparse(dense), student_shard=shards[0], teacher_shard=shards[1])


def of_entries(
    case: Case, dense: torch.Tensor, entries: LearnedEntries, **options: Any
) -> ProjectedKL:
    """The op with a dense projection [Vs, Vt], some of whose entries are learned."""
    shards = [vocab_shard(size, 0, 0, 1, None) for size in dense.shape]
    count = case.chunk_count
    return projected_kl(
        ChunkedLogits.of(case.student_logits, case.student_chunk_id, count, shards[0]),
        ChunkedLogits.of(case.teacher_logits, case.teacher_chunk_id, count, shards[1]),
        ShardedProjection(
            dense.to_sparse_csr(),
            dense.t().contiguous().to_sparse_csr(),
            dense.sum(dim=-1),
            (case.projection > 0).any(dim=0),
        ),
        learned=entries,
        **packed(options, ProjectedKLOptions),
    )


def loss_of_entries(case: Case, values: torch.Tensor, **options: object) -> torch.Tensor:
    """The op's weighted loss as a function of the entries of its projection."""
    row, column = case.projection.nonzero(as_tuple=True)
    dense = torch.zeros_like(case.projection).index_put((row, column), values.detach())
    out = of_entries(case, dense, LearnedEntries(values, row, column), **options)
    return (out.chunk_loss * torch.arange(1, case.chunk_count + 1)).sum()


def entries(case: Case) -> torch.Tensor:
    row, column = case.projection.nonzero(as_tuple=True)
    return case.projection[row, column].clone().requires_grad_()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_gradient_of_free_entries_is_that_of_the_dense_reference(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.random(chunk_count=4)
    values = entries(case)
    row, column = case.projection.nonzero(as_tuple=True)
    dense = torch.zeros_like(case.projection).index_put((row, column), values)
    losses = projected_kl_reference(
        case.student_logits,
        case.teacher_logits,
        student_chunk_id=case.student_chunk_id,
        teacher_chunk_id=case.teacher_chunk_id,
        chunk_count=4,
        projection=dense,
        direction=direction,
        temperature=1.7,
    )
    weighted = (losses * torch.arange(1, 5)).sum()
    (truth,) = torch.autograd.grad(weighted, values)
    (grad,) = torch.autograd.grad(
        loss_of_entries(case, values, direction=direction, temperature=1.7), values
    )
    torch.testing.assert_close(grad, truth, rtol=0, atol=1e-13 * truth.abs().max().item())
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, "cpu", 40)
    (sliced,) = torch.autograd.grad(
        loss_of_entries(case, values, direction=direction, temperature=1.7), values
    )
    torch.testing.assert_close(sliced, truth, rtol=0, atol=1e-13 * truth.abs().max().item())


def test_the_first_shares_are_the_projections_and_its_loss_is_the_same() -> None:
    batch = Microbatch.random()
    inputs = batch.inputs(padding=(3, 1))
    module = learned(batch.projection, (3, 1))
    shard = module()
    for name in ("weight", "weight_transposed"):
        torch.testing.assert_close(
            getattr(shard, name).to_dense(),
            getattr(inputs.projection, name).to_dense(),
            rtol=1e-6,
            atol=0,
        )
    sums = [
        ProjectedKLLoss()(replace(inputs, projection=given)).loss_sum.item()
        for given in (inputs.projection, shard)
    ]
    assert sums[0] == pytest.approx(sums[1], rel=1e-6)


def test_the_gradient_of_the_parameter_is_that_of_finite_differences() -> None:
    batch = Microbatch.random()
    inputs = batch.inputs()
    inputs = replace(inputs, student_logits=inputs.student_logits.detach().double())
    teacher = replace(inputs.teacher, logits=inputs.teacher.logits.double())
    module = learned(batch.projection)

    def loss() -> torch.Tensor:
        return ProjectedKLLoss()(replace(inputs, teacher=teacher, projection=module())).loss_sum

    (grad,) = torch.autograd.grad(loss(), module.logits)
    direction = torch.randn(grad.shape, generator=torch.Generator().manual_seed(0))
    start, step = module.logits.detach().clone(), 1e-2
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            module.logits.copy_(start + sign * step * direction)
            sides.append(loss().item())
    # Shares are fp32, and the step is large for that: 1e-4 of the slope is left of the curvature.
    slope = (sides[0] - sides[1]) / (2 * step)
    assert (grad * direction).sum().item() == pytest.approx(slope, rel=1e-3)


def test_training_lowers_the_loss_and_leaves_exact_rows_support_and_sums() -> None:
    batch = Microbatch.random()
    module = learned(batch.projection)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.5)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = ProjectedKLLoss()(replace(batch.inputs(), projection=module())).loss_sum
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]

    before, after = sparse(batch.projection), module.to_projection()
    assert after.indptr.tolist() == before.indptr.tolist()
    assert after.indices.tolist() == before.indices.tolist()
    exact = before.is_exact_row[before.entry_rows]
    assert after.values[exact].tolist() == before.values[exact].tolist()
    assert abs(after.values[~exact] - before.values[~exact]).max() > 0.1
    shard = module()
    dense = torch.zeros(before.shape).index_put(
        (torch.from_numpy(after.entry_rows), torch.tensor(after.indices).long()),
        torch.from_numpy(after.values.copy()),
    )
    torch.testing.assert_close(shard.weight.to_dense(), dense, rtol=1e-6, atol=0)
    torch.testing.assert_close(shard.weight_transposed.to_dense(), dense.t(), rtol=1e-6, atol=0)


def test_a_checkpoint_holds_the_parameter_alone_and_fits_any_shards() -> None:
    dense = Microbatch.random().projection
    module = learned(dense)
    with torch.no_grad():
        module.logits.add_(torch.linspace(-1, 1, len(module.logits)))
    state = module.state_dict()
    assert list(state) == ["logits"]
    rows = []
    for rank in range(4):
        part = LearnedProjection(
            sparse(dense),
            student_shard=vocab_shard(37, 15, rank, 4, None),
            teacher_shard=vocab_shard(23, 5, rank, 4, None),
        )
        part.load_state_dict(state)
        rows.append(part().weight.to_dense())
    assert torch.equal(torch.cat(rows)[:37], module().weight.to_dense())


def test_an_average_of_the_module_has_shares_of_its_own() -> None:
    module = learned(Microbatch.random().projection)
    average = torch.optim.swa_utils.AveragedModel(module).module
    before = average().weight.values().clone()
    with torch.no_grad():
        module.logits.mul_(2)
    assert torch.equal(average().weight.values(), before)
    assert not torch.equal(module().weight.values(), before)


def test_a_projection_of_exact_rows_has_nothing_to_learn() -> None:
    with pytest.raises(ProjectionError, match="nothing to learn; got no inexact row"):
        learned(torch.eye(5))


def test_an_uncounted_chunk_gives_the_entries_nothing_whatever_it_holds() -> None:
    case = Case.random(vocabs=(9, 7), lengths=(6, 5), chunk_count=3)
    case = replace(case, projection=random_projection(9, 7))
    values = entries(case)
    case.student_logits[case.student_chunk_id == 0] = torch.nan
    row, column = case.projection.nonzero(as_tuple=True)
    out, _ = case.run(weights=torch.tensor([0.0, 1, 1], dtype=torch.float64))
    assert out.chunk_loss.isnan().tolist() == [True, False, False]
    compared = of_entries(case, case.projection, LearnedEntries(values, row, column))
    (grad,) = torch.autograd.grad(compared.chunk_loss[1:].sum(), values)
    assert grad.isfinite().all()
    assert grad.any()
