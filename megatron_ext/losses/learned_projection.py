"""A projection whose inexact rows are trained with the student. Vs, Vt vocabularies, N entries.

No bytes decide which share of ``17`` each of ``1`` and ``7`` should get, or which of two similar
tokens stands for a third. The shares of such a row start at those of the projection and are trained
by the loss.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.distributed.shard_collectives import copy_to_shards
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import ProjectionError
from megatron_ext.losses.projection_shard import ProjectionShard
from megatron_ext.ops.projected_kl import LearnedEntries
from megatron_ext.projection.compressed_rows import with_step
from megatron_ext.projection.sparse_projection import SparseProjection


class LearnedProjection(torch.nn.Module):
    """Shares of inexact rows of several entries, a softmax over each row; other rows are fixed.

    The parameter ``logits`` [N] holds every such row, the same on each tensor-parallel rank, so
    that a checkpoint fits any layout: 0.2 MB for Llama 3.2 to Qwen3. Rows keep their candidates and
    their sum of 1, and reachable columns stay reachable.

    Args:
        projection: Initial shares.
        student_shard: This rank's student columns.
        teacher_shard: This rank's teacher columns.
        device: Device of the parameter and of the shards that ``forward`` returns.

    Raises:
        ProjectionError: As ``ProjectionShard.from_projection``, or no row has several entries.
    """

    logits: torch.nn.Parameter
    _source: torch.Tensor
    _place: torch.Tensor
    _transposed_place: torch.Tensor
    _row: torch.Tensor
    _column: torch.Tensor
    _segment: torch.Tensor

    def __init__(
        self,
        projection: SparseProjection,
        *,
        student_shard: VocabShard,
        teacher_shard: VocabShard,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self._projection = projection.padded(*projection.vocab_sizes)
        self._group = student_shard.group
        self._shard = ProjectionShard.from_projection(
            projection, student_shard=student_shard, teacher_shard=teacher_shard, device=device
        )
        rows, counts = self._projection.entry_rows, np.diff(self._projection.indptr)
        self._is_learned = ((counts > 1) & ~self._projection.is_exact_row)[rows]
        if not self._is_learned.any():
            raise ProjectionError(
                "the projection has nothing to learn",
                got="no inexact row of several tokens",
                fix="use it as it is, or build it with a larger top_k",
            )
        start = self._projection.values[self._is_learned].astype(np.float32)
        self.logits = torch.nn.Parameter(torch.from_numpy(np.log(start)).to(device))
        self._keep("_segment", np.unique(rows[self._is_learned], return_inverse=True)[1], device)
        self._place_entries(student_shard, device)

    def forward(self) -> ProjectionShard:
        """This rank's rows with the current shares, whose gradient reaches ``logits``.

        Forward: no collectives. Backward: one all-reduce of [N].
        """
        shares = copy_to_shards(self._shares(), self._group)[self._source]
        values = self._shard.weight.values().clone()
        values[self._place] = shares.detach()
        transposed = self._shard.weight_transposed.values().clone()
        transposed[self._transposed_place] = shares.detach()
        return replace(
            self._shard,
            weight=_with_values(self._shard.weight, values),
            weight_transposed=_with_values(self._shard.weight_transposed, transposed),
            sum_weights=None,
            learned=LearnedEntries(shares, self._row, self._column),
        )

    def to_projection(self) -> SparseProjection:
        """The current shares as a projection without padding, to save or to build others from."""
        weights = self._projection.values.astype(np.float64)
        weights[self._is_learned] = self._shares().detach().double().cpu().numpy()
        return SparseProjection.from_entries(
            self._projection.entry_rows,
            self._projection.indices,
            weights,
            self._projection.shape,
            with_step(self._projection.metadata, "learn"),
            is_exact_row=self._projection.is_exact_row,
        )

    def _shares(self) -> torch.Tensor:
        """[N] fp32; sums to 1 over each row."""
        logits = self.logits.float()
        count = int(self._projection.shape[0])
        peak = logits.new_full((count,), -torch.inf)
        peak = peak.scatter_reduce(0, self._segment, logits.detach(), "amax")
        mass = (logits - peak[self._segment]).exp()
        return mass / mass.new_zeros(count).index_add(0, self._segment, mass)[self._segment]

    def _place_entries(self, shard: VocabShard, device: torch.device | str) -> None:
        """Keep the places of this rank's learned entries: among all, by row and by column."""
        indptr, learned = self._projection.indptr, self._is_learned
        first = min(shard.start, self._projection.shape[0])
        stop = first + shard.valid_width
        entries = slice(int(indptr[first]), int(indptr[stop]))
        place = np.flatnonzero(learned[entries])
        row = self._projection.entry_rows[entries] - shard.start
        column = self._projection.indices[entries].astype(np.int64)
        # Order of the transpose: by column, and by row within a column.
        transposed = np.empty(len(row), dtype=np.int64)
        transposed[np.lexsort((row, column))] = np.arange(len(row))
        source = (np.cumsum(learned) - 1)[entries][place]
        for name, array in (
            ("_source", source),
            ("_place", place),
            ("_transposed_place", transposed[place]),
            ("_row", row[place]),
            ("_column", column[place]),
        ):
            self._keep(name, array, device)

    def _keep(self, name: str, ids: NDArray[np.int64], device: torch.device | str) -> None:
        """Register a buffer that checkpoints omit: it follows from the projection and the
        layout."""
        tensor = torch.from_numpy(ids.astype(np.int64)).to(device)
        self.register_buffer(name, tensor, persistent=False)


def _with_values(matrix: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_csr_tensor(
        matrix.crow_indices(),
        matrix.col_indices(),
        values,
        size=matrix.shape,
        check_invariants=False,
    )
