"""One rank's shard of a vocabulary projection, and teacher distributions carried through it.

C rows, Vs Vt vocabularies, Vps Vpt local columns.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.distributed.shard_collectives import all_reduce_sum, gather_columns, group_size
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    merge_log_sum_exp,
    row_slices,
    scaled_logits,
)
from megatron_ext.errors import ProjectionError
from megatron_ext.ops.projected_kl import ColumnPlan, LearnedEntries, ShardedProjection
from megatron_ext.ops.softmax_statistics import row_statistics

if TYPE_CHECKING:
    from megatron_ext.projection.sparse_projection import SparseProjection


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionShard:
    """Rows of this rank's student columns, and a mask of its reachable teacher columns.

    Both orientations are kept, since a dense row-major matrix times a CSC one is the fastest
    product on the CPU and needs no conversion on a GPU: the forward's CSC is
    ``weight_transposed.t()``, the backward's ``weight.t()``.
    """

    weight: torch.Tensor
    """fp32 CSR [Vps, Vt] with int32 indices; rows of padding are empty."""

    weight_transposed: torch.Tensor
    """fp32 CSR [Vt, Vps], the same entries."""

    row_mass: torch.Tensor
    """fp32 [Vps]: sum of each row, 1 or 0."""

    reachable: torch.Tensor
    """bool [Vpt]: this rank's teacher columns that any student token projects onto."""

    plan: ColumnPlan | None = None
    """Order in which kernels read the entries; None in a shard that was made by hand."""

    sum_weights: tuple[torch.Tensor, torch.Tensor] | None = None
    """See ``ShardedProjection``."""

    learned: LearnedEntries | None = None
    """Entries of ``weight`` with a graph, from a ``LearnedProjection``."""

    def __deepcopy__(self, memo: object) -> ProjectionShard:
        """Itself: nothing in it changes, and torch copies no sparse tensors."""
        return self

    def operand(self) -> ShardedProjection:
        """Operand of the operations in ``ops/projected_kl``."""
        return ShardedProjection(
            self.weight,
            self.weight_transposed,
            self.row_mass,
            self.reachable,
            self.plan,
            self.sum_weights,
        )

    @classmethod
    def from_csr(
        cls,
        indptr: NDArray[np.int64],
        indices: NDArray[np.int32],
        values: NDArray[np.float32],
        *,
        shape: tuple[int, int],
        student_shard: VocabShard,
        teacher_shard: VocabShard,
        device: torch.device | str = "cpu",
    ) -> ProjectionShard:
        """Cut a CSR matrix [Vs, Vt] to the rows and columns of this rank.

        Raises:
            ProjectionError: The arrays do not make a matrix of ``shape``, a shard is of another
                vocabulary, or no entry is positive.
        """
        _check(indptr, indices, values, shape)
        for side, size, shard in (
            ("student", shape[0], student_shard),
            ("teacher", shape[1], teacher_shard),
        ):
            if shard.vocab_size != size:
                raise ProjectionError(
                    f"the projection is of another {side} vocabulary",
                    got=f"{size} tokens",
                    expected=f"{shard.vocab_size}",
                    fix="build the projection from this pair of tokenizers",
                )
        first = min(student_shard.start, shape[0])
        bounds = indptr[first : first + student_shard.valid_width + 1]
        entries = slice(int(bounds[0]), int(bounds[-1]))
        counts = np.zeros(student_shard.width, dtype=np.int64)
        counts[: student_shard.valid_width] = np.diff(bounds)
        row = np.repeat(np.arange(student_shard.width, dtype=np.int64), counts)
        column = indices[entries].astype(np.int64)
        value = values[entries].astype(np.float32)
        widths = (student_shard.width, shape[1])

        reached = np.zeros(max(shape[1], teacher_shard.stop), dtype=np.bool_)
        reached[indices[values > 0]] = True
        weight = _csr(row, column, value, widths, device)
        plan = ColumnPlan.of(
            indptr,
            indices,
            values,
            student_shard=student_shard,
            teacher_shard=teacher_shard,
            device=device,
        )
        return cls(
            weight=weight,
            weight_transposed=_csr(column, row, value, widths[::-1], device),
            row_mass=_to(np.bincount(row, value, minlength=widths[0]).astype(np.float32), device),
            reachable=_to(reached[teacher_shard.start : teacher_shard.stop].copy(), device),
            plan=plan,
            sum_weights=plan.sum_weights(weight),
        )

    @classmethod
    def from_projection(
        cls,
        projection: SparseProjection,
        *,
        student_shard: VocabShard,
        teacher_shard: VocabShard,
        device: torch.device | str = "cpu",
    ) -> ProjectionShard:
        """``from_csr`` of a projection's arrays, without its padding.

        Raises:
            ProjectionError: As ``from_csr``.
        """
        projection = projection.padded(*projection.vocab_sizes)
        return cls.from_csr(
            projection.indptr,
            projection.indices,
            projection.values,
            shape=projection.shape,
            student_shard=student_shard,
            teacher_shard=teacher_shard,
            device=device,
        )


def _check(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    values: NDArray[np.float32],
    shape: tuple[int, int],
) -> None:
    if indptr.shape != (shape[0] + 1,) or indptr[0] != 0 or (np.diff(indptr) < 0).any():
        raise ProjectionError(
            "row pointers do not fit the projection's rows",
            got=f"{indptr.shape[0]} row pointers",
            expected=f"{shape[0] + 1}, ascending from 0",
        )
    if not indices.shape == values.shape == (int(indptr[-1]),):
        raise ProjectionError(
            "a projection's indices and values differ in number from what its rows hold",
            got=f"{indices.shape[0]} indices and {values.shape[0]} values",
            expected=f"{int(indptr[-1])} each",
        )
    if not (values > 0).any():
        raise ProjectionError(
            "the projection maps no token",
            fix="build it from two tokenizers that share at least one token",
        )
    if indices.min() < 0 or indices.max() >= shape[1]:
        raise ProjectionError(
            "a projection's column lies outside the teacher's vocabulary",
            got=f"columns {indices.min()} to {indices.max()}",
            expected=f"0 to {shape[1] - 1}",
        )


def _csr(
    row: NDArray[np.int64],
    column: NDArray[np.int64],
    value: NDArray[np.float32],
    shape: tuple[int, int],
    device: torch.device | str,
) -> torch.Tensor:
    order = np.lexsort((column, row))
    indptr = np.zeros(shape[0] + 1, dtype=np.int32)
    indptr[1:] = np.cumsum(np.bincount(row, minlength=shape[0]))
    with warnings.catch_warnings():
        # torch warns once a process that its CSR tensors are in beta.
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            _to(indptr, device),
            _to(column[order].astype(np.int32), device),
            _to(value[order], device),
            size=shape,
            device=device,
            check_invariants=True,
        )


def _to(array: NDArray[np.generic], device: torch.device | str) -> torch.Tensor:
    # Of an empty array torch 2.6 takes a stride of 0, which its sparse tensors refuse.
    return torch.from_numpy(array).clone(memory_format=torch.contiguous_format).to(device)


Sharing = Literal["split", "copy"]


class CarriedTargets(NamedTuple):
    """Teacher distributions on the student's vocabulary, without a graph."""

    log_probs: torch.Tensor
    """[C, Vps] fp32 (fp64 for fp64 logits), not normalised; -inf for tokens without mass."""

    offsupport_mass: torch.Tensor
    """[C]: teacher mass on tokens that no student token maps to."""

    is_empty: torch.Tensor
    """bool [C]: True where the teacher has logits above -inf only at tokens that no student token
    maps to; there is no distribution then."""


@torch.no_grad()
def carried_targets(
    teacher_logits: torch.Tensor,
    projection: ProjectionShard,
    *,
    teacher_shard: VocabShard,
    temperature: float,
    sharing: Sharing,
) -> CarriedTargets:
    """``log( p diag(1 / n) W^T )`` for ``p = softmax(logits / temperature)``.

    W [Vs, Vt] is the projection and n[t] its column sum, the number of student tokens that map to
    t; with ``sharing`` "copy" n is 1. p is over the tokens that some student token maps to: a
    teacher that is certain of another token still has a distribution over these.

    Args:
        teacher_logits: [C, Vpt], any float dtype.
        projection: This rank's rows of W.

    Collectives: three all-reduces, of [2, C] twice and of [Vt], and one all-gather of [C', Vt] a
    slice of C' rows.
    """
    group, reachable = teacher_shard.group, projection.reachable
    statistics = row_statistics(
        teacher_logits, teacher_shard, temperature=temperature, members=reachable, with_column=False
    )
    merged = merge_log_sum_exp(statistics.peak, statistics.total, group)
    whole, lse = (LogSumExp(*parts) for parts in zip(*merged, strict=True))
    left_out = -torch.expm1((lse.peak - whole.peak).add_(lse.log_sum).sub_(whole.log_sum))
    onto_student = projection.weight.to(left_out.dtype).t()
    width, vocab = projection.weight.shape
    ones = left_out.new_ones(width, 1)
    shares = (projection.weight_transposed.to(left_out.dtype) @ ones)[:, 0]
    shares = all_reduce_sum(shares, group)
    divisor = torch.where(shares > 0, shares, 1.0) if sharing == "split" else None
    out = left_out.new_empty(len(left_out), width)
    excluded = teacher_shard.excluded_columns(teacher_logits.device, reachable)
    gathered = teacher_shard.width * group_size(group)
    for rows in row_slices(len(left_out), gathered, device=left_out.device):
        scaled = scaled_logits(teacher_logits[rows], temperature, excluded)
        probs = lse.normalise_(scaled, rows).exp_()
        everywhere = gather_columns(probs, group)[:, :vocab]
        out[rows] = (everywhere if divisor is None else everywhere / divisor) @ onto_student
    is_empty = lse.log_sum.isneginf() & ~whole.log_sum.isneginf()
    return CarriedTargets(out.log_(), left_out, is_empty)
