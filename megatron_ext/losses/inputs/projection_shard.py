"""One rank's piece of a vocabulary projection. Vs, Vt vocabularies, Vps, Vpt local columns."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import ProjectionError
from megatron_ext.ops.projected_kl import ColumnPlan, LearnedEntries, ShardedProjection

if TYPE_CHECKING:
    from megatron_ext.projection.sparse_projection import SparseProjection


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionShard:
    """The rows of this rank's student columns, and which of its teacher columns are reachable.

    Both orientations are kept, since a dense row-major matrix times a CSC one is the fastest
    product on the CPU and converts nothing on a GPU: the forward's CSC is
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
    """How kernels walk the entries; None in a shard that was made by hand."""

    learned: LearnedEntries | None = None
    """Entries of ``weight`` with a graph, of a ``LearnedProjection``."""

    def operand(self) -> ShardedProjection:
        """What the operations take of it."""
        return ShardedProjection(
            self.weight, self.weight_transposed, self.row_mass, self.reachable, self.plan
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
        return cls(
            weight=_csr(row, column, value, widths, device),
            weight_transposed=_csr(column, row, value, widths[::-1], device),
            row_mass=_to(np.bincount(row, value, minlength=widths[0]).astype(np.float32), device),
            reachable=_to(reached[teacher_shard.start : teacher_shard.stop].copy(), device),
            plan=ColumnPlan.of(
                indptr,
                indices,
                values,
                student_shard=student_shard,
                teacher_shard=teacher_shard,
                device=device,
            ),
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
        """``from_csr`` of a projection's own arrays; its padding, if any, counts for nothing.

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
        # torch announces once a process that its CSR tensors are in beta.
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            _to(indptr, device),
            _to(column[order].astype(np.int32), device),
            _to(value[order], device),
            size=shape,
            check_invariants=True,
        )


def _to(array: NDArray[np.generic], device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
