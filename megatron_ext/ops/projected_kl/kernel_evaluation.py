"""Projected KL by kernels, a tile of chunks at a time. README, equations 2 to 11.

T rows, C chunks, C' of a tile, Vps Vpt local columns, D summed columns, R residual rows, X crossing
columns.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import LogSumExp, merge_argmax
from megatron_ext.errors import LossError
from megatron_ext.ops.chunk_rows import ChunkedLogits, ChunkRows
from megatron_ext.ops.divergence import probability_floor
from megatron_ext.ops.launch import LaunchConfig, chosen_config, fitting_config, small_block
from megatron_ext.ops.projected_kl.column_plan import SUMS, Segments, pair_block
from megatron_ext.ops.projected_kl.operands import (
    ProjectedKLOptions,
    ProjectedValues,
    RequestedOutputs,
    ShardedProjection,
)
from megatron_ext.ops.projected_kl.statistics import ChunkStatistics, label_columns

CHUNKS: Final = 64
"""Chunks of a group, whose sums over columns are made together."""

_SCRATCH_BYTES: Final = 1 << 28
_SLOT_BLOCK: Final = 1024
_COLUMNS: Final = 32
_SLOTS: Final = 16
"""Columns of a group of chunks that a program holds at once, alone and with what else it needs."""

_WARPS: Final = 8

_ENTRY_SHARES: Final = 16
_FEW_PARTS: Final = 4
"""Programs for each chunk where most chunks are done by another kernel."""

_CONFIGS: Final = (
    LaunchConfig(2048, 4),
    LaunchConfig(2048, 8),
    LaunchConfig(4096, 8),
    LaunchConfig(4096, 16),
    LaunchConfig(8192, 16),
)


class _ChunkTile(NamedTuple):
    """Chunks ``[first, first + chunks)`` and their scratch memory."""

    first: int
    chunks: int
    scratch: torch.Tensor
    """fp32 [G, D, CHUNKS]: ``Q~``, then ``dD/dQ`` of summed columns, by groups of chunks."""

    residual: torch.Tensor
    """fp32 [C', R]: ``W f`` of residual rows."""

    partial: torch.Tensor
    """fp32 [4, C', blocks]: terms of D and of the entropy, largest P and Q~."""

    best: torch.Tensor
    """int32 [2, C', blocks]: columns of the largest P and Q~."""

    @property
    def groups(self) -> int:
        """G, the last of which may be short of chunks."""
        return len(self.scratch)


class KernelEvaluation:
    """Evaluation of one call; ``run`` once."""

    def __init__(
        self,
        student: ChunkedLogits,
        teacher: ChunkedLogits,
        projection: ShardedProjection,
        statistics: ChunkStatistics,
        options: ProjectedKLOptions,
        requested: RequestedOutputs,
    ) -> None:
        if projection.plan is None:
            raise LossError("the kernels of projected_kl need a plan", fix="pass plan")
        self.student, self.teacher = student, teacher
        self.plan = projection.plan
        self.weight = projection.weight.values()
        self.row_mass = projection.row_mass
        self.options, self.requested = options, requested
        self.student_lse = torch.stack(list(statistics.student))
        self.carried_lse = torch.stack(list(statistics.carried.lse))
        self.is_scaled = statistics.carried.is_scaled
        self.teacher_lse = torch.stack(list(statistics.teacher))
        self.plain_lse = _stacked(statistics.untempered)
        self.local_columns = statistics.local_columns
        self.mass = mean_over_rows(statistics.mapped, student.rows)
        self.mass.clamp_(min=probability_floor(self.mass))
        self.grad_scale = requested.grad_scale.float().contiguous()
        self.label = self.label_weight = None
        if requested.cross_entropy is not None:
            label, weight = requested.cross_entropy
            self.label = label_columns(label, student.shard)
            self.label_weight = weight.float().masked_fill(label < 0, 0.0)
        self.tempered = options.temperature != 1.0
        self.slot_blocks = -(-len(self.plan.home) // _SLOT_BLOCK)
        self.config = fitting_config(self._config(), student.shard.width)
        self.column_blocks = -(-student.shard.width // self.config.block)

    def run(self) -> ProjectedValues:
        """Evaluate all chunks; the collectives are those of ``evaluate_projected_kl``."""
        count, group = self.student.rows.chunk_count, self.student.shard.group
        sums = self.mass.new_empty(2, count)
        best = self.mass.new_empty(2, count)
        column = torch.empty(2, count, dtype=torch.int64, device=best.device)
        step = self._tile_chunks()
        for first in range(0, count, step):
            tile = self._tile(first, min(step, count - first), self.slot_blocks)
            self._summed_columns(tile)
            self._evaluate(tile)
            part = slice(first, first + tile.chunks)
            sums[:, part] = tile.partial[:2].sum(dim=-1)
            best[:, part], column[:, part] = self._largest(tile)
        self._outside_chunks()
        sums = all_reduce_sum(sums, group)
        agreement = torch.zeros(count, dtype=torch.bool, device=best.device)
        if self.options.diagnostics:
            p_top, q_top = merge_argmax(best, column, group)
            agreement = p_top == q_top
        return ProjectedValues(sums[0], sums[1], agreement, torch.zeros_like(sums[0]))

    def _tile_chunks(self) -> int:
        """C', chunks of a tile, whole groups, the same on every rank."""
        # Means and ``W f`` of residual rows, slopes of the others, and both sides of crossing ones.
        wide = 2 * self.plan.scratch_width + 6 * self.plan.crossing
        return max(1, _SCRATCH_BYTES // (4 * CHUNKS * max(wide, 1))) * CHUNKS

    def _tile(self, first: int, count: int, slot_blocks: int) -> _ChunkTile:
        device, blocks = self.mass.device, slot_blocks + self.column_blocks
        partial = torch.empty(4, count, blocks, dtype=torch.float32, device=device)
        if not self.options.diagnostics:
            partial[1:].zero_()
        return _ChunkTile(
            first,
            count,
            torch.empty(
                -(-count // CHUNKS), len(self.plan.home), CHUNKS, dtype=torch.float32, device=device
            ),
            torch.empty(count, self.plan.residual_rows, dtype=torch.float32, device=device),
            partial,
            torch.zeros(2, count, blocks, dtype=torch.int32, device=device),
        )

    def _largest(self, tile: _ChunkTile) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest P and Q~ [2, C'] of this rank's columns, and their global columns."""
        values = tile.partial[2:]
        best = values.amax(dim=-1)
        beaten = values != best[..., None]
        column = tile.best.masked_fill(beaten, torch.iinfo(torch.int32).max).amin(dim=-1)
        return best, column.long() + self.teacher.shard.start

    def _summed_columns(self, tile: _ChunkTile) -> None:
        """Q~, P and slopes of summed columns, and ``W f`` of residual rows."""
        if not len(self.plan.home):
            return
        from megatron_ext.ops.projected_kl import triton_kernels as kernels

        residual_rows = self.plan.residual_rows
        blocks = -(-residual_rows // _COLUMNS)
        means = tile.scratch.new_empty(tile.groups, residual_rows, CHUNKS)
        if blocks:
            kernels.residual_means_kernel[(tile.groups * blocks,)](
                *self._read(self.student, self.carried_lse),
                tile.first,
                tile.chunks,
                self.plan.residual,
                residual_rows,
                blocks,
                means,
                HAS_TEMPERATURE=self.tempered,
                CHUNKS=CHUNKS,
                COLUMNS=_COLUMNS,
                num_warps=_WARPS,
            )
        self._sparse_sums(tile, self.plan.by_column, means, tile.scratch, by_chunk=False)
        crossed = self._cross(tile)
        kernels.slopes_kernel[(tile.groups * self.slot_blocks,)](
            *self._read(self.teacher, self.teacher_lse),
            tile.first,
            self.plan.home,
            len(self.plan.home),
            self.plan.crossing,
            crossed,
            0 if crossed is None else crossed[0].numel(),
            tile.chunks,
            tile.scratch,
            self.mass,
            self.options.mixture,
            tile.partial,
            tile.best,
            tile.partial.shape[-1],
            self.slot_blocks,
            DIRECTION=self.options.direction,
            HAS_CROSSING=crossed is not None,
            HAS_DIAGNOSTICS=self.options.diagnostics,
            HAS_TEMPERATURE=self.tempered,
            CHUNKS=CHUNKS,
            COLUMNS=_SLOTS,
            BLOCK=_SLOT_BLOCK,
            num_warps=_WARPS,
        )
        if self._wants_gradient():
            self._sparse_sums(tile, self.plan.by_row, tile.scratch, tile.residual, by_chunk=True)

    def _sparse_sums(
        self,
        tile: _ChunkTile,
        sums: Segments,
        values: torch.Tensor,
        out: torch.Tensor,
        *,
        by_chunk: bool,
    ) -> None:
        """Sums over ``values`` [G, rows, CHUNKS] as ``out``, by groups or ``by_chunk``."""
        blocks = len(sums.blocks)
        if not blocks:
            return
        from megatron_ext.ops.projected_kl.triton_kernels import sparse_sums_kernel

        sparse_sums_kernel[(tile.groups * blocks,)](
            values,
            values.shape[1],
            *sums[:4],
            self.weight,
            sums.blocks,
            blocks,
            out,
            out.shape[1],
            tile.chunks,
            BY_CHUNK=by_chunk,
            CHUNKS=CHUNKS,
            SUMS=SUMS,
        )

    def _cross(self, tile: _ChunkTile) -> torch.Tensor | None:
        """Q~ and P of the crossing columns over all ranks, [2, G, X, CHUNKS]. One all-reduce."""
        crossing = self.plan.crossing
        if not crossing:
            return None
        from megatron_ext.ops.projected_kl.triton_kernels import crossing_teacher_kernel

        both = tile.scratch.new_empty(2, tile.groups, crossing, CHUNKS)
        both[0] = tile.scratch[:, :crossing]
        blocks = -(-crossing // _COLUMNS)
        crossing_teacher_kernel[(tile.groups * blocks,)](
            *self._read(self.teacher, self.teacher_lse),
            tile.first,
            tile.chunks,
            self.plan.home,
            crossing,
            blocks,
            both[1],
            HAS_TEMPERATURE=self.tempered,
            CHUNKS=CHUNKS,
            COLUMNS=_COLUMNS,
            num_warps=_WARPS,
        )
        return all_reduce_sum(both, self.student.shard.group)

    def _evaluate(self, tile: _ChunkTile) -> None:
        """Direct pairs, and the gradient of every student column."""
        rows = len(self.student.logits)
        is_forward = self.options.direction == "forward"
        if is_forward:
            self._singles(tile)
        if not self._wants_gradient():
            self._pass(tile, self.slot_blocks, "values", None, self.config)
            return
        shape = (2, rows, self.column_blocks)
        dots = torch.zeros(shape, dtype=torch.float32, device=self.mass.device)
        if is_forward:
            self._entries(tile, dots)
        self._pass(tile, self.slot_blocks, "values", dots, self.config)
        dots = all_reduce_sum(dots.sum(dim=-1), self.student.shard.group)
        if not is_forward:
            self._entries(tile, dots)
        if self.requested.gradient is not None:
            self._pass(tile, self.slot_blocks, "gradient", dots, self.config)

    def _singles(self, tile: _ChunkTile) -> None:
        """Direct pairs, and the whole gradient, of chunks with one student row."""
        from megatron_ext.ops.projected_kl.single_kernel import single_kernel

        shard, gradient = self.student.shard, self.requested.gradient
        aligned = self.plan.aligned
        block = pair_block(shard.width)
        for several in (False, True):
            single_kernel[(tile.chunks,)](
                *self._read(self.student, self.carried_lse)[:-1],
                self.is_scaled,
                shard.valid_width,
                shard.width,
                *self._read(self.teacher, self.teacher_lse),
                tile.first,
                tile.chunks,
                self.plan.partner,
                0 if aligned is None else aligned // 16,
                0 if aligned is None else (aligned + self.plan.residual_rows) // 16,
                self.row_mass,
                tile.residual,
                tile.residual.stride(0),
                self.mass,
                tile.partial,
                tile.best,
                tile.partial.shape[-1],
                self.slot_blocks,
                self.column_blocks,
                self.grad_scale,
                gradient,
                0 if gradient is None else gradient.stride(0),
                self.plain_lse,
                self.label,
                self.label_weight,
                *self.local_columns,
                IS_ALIGNED=aligned is not None,
                SEVERAL=several,
                HAS_GRADIENT=gradient is not None,
                HAS_DIAGNOSTICS=self.options.diagnostics,
                HAS_LABELS=self.label is not None,
                HAS_TEMPERATURE=self.tempered,
                BLOCK=block,
                PLACES=small_block(self.column_blocks, 1 << 16),
                num_warps=max(1, block // 256),
            )

    def _pass(
        self,
        tile: _ChunkTile,
        first_block: int,
        which: str,
        dots: torch.Tensor | None,
        config: LaunchConfig,
    ) -> None:
        from megatron_ext.ops.projected_kl.triton_kernels import sweep_kernel

        shard, gradient = self.student.shard, self.requested.gradient
        blocks = -(-shard.width // config.block)
        parts = min(blocks, _FEW_PARTS) if self.options.direction == "forward" else blocks
        sweep_kernel[(tile.chunks * parts,)](
            *self._read(self.student, self.student_lse)[:-1],
            self.carried_lse,
            self.is_scaled,
            shard.valid_width,
            shard.width,
            *self._read(self.teacher, self.teacher_lse),
            tile.first,
            tile.chunks,
            self.plan.partner,
            self.row_mass,
            tile.residual,
            tile.residual.stride(0),
            self.mass,
            self.options.mixture,
            tile.partial,
            tile.best,
            tile.partial.shape[-1],
            first_block,
            dots,
            len(self.student.logits) * blocks,
            self.grad_scale,
            gradient,
            0 if gradient is None else gradient.stride(0),
            self.plain_lse,
            self.label,
            self.label_weight,
            blocks,
            parts,
            DIRECTION=self.options.direction,
            PASS=which,
            HAS_DOTS=dots is not None,
            HAS_GRADIENT=gradient is not None and dots is not None,
            HAS_DIAGNOSTICS=self.options.diagnostics,
            HAS_LABELS=self.label is not None,
            HAS_TEMPERATURE=self.tempered,
            BLOCK=config.block,
            num_warps=config.num_warps,
        )

    def _config(self) -> LaunchConfig:
        """Configuration of the pass over columns, timed without its gradient, which may be in
        place."""
        count = min(self.student.rows.chunk_count, self._tile_chunks(), 1024)

        def run(config: LaunchConfig) -> None:
            config = fitting_config(config, self.student.shard.width)
            self.column_blocks = -(-self.student.shard.width // config.block)
            self._pass(self._tile(0, count, 0), 0, "values", None, config)

        if not count:
            return _CONFIGS[0]
        widths = self.student.shard.width, self.teacher.shard.width
        dtypes = self.student.logits.dtype, self.teacher.logits.dtype
        return chosen_config(("projected_kl", dtypes, widths, self.tempered), _CONFIGS, run)

    def _entries(self, tile: _ChunkTile, dots: torch.Tensor) -> None:
        """Add the tile's part of the learned entries' gradient."""
        learned, total = self.requested.learned, self.requested.entry_gradient
        if learned is None or total is None or not len(total):
            return
        from megatron_ext.ops.projected_kl.triton_kernels import entry_gradient_kernel

        entries = len(total)
        blocks = -(-entries // _SLOT_BLOCK)
        out = torch.empty(_ENTRY_SHARES, entries, dtype=torch.float32, device=total.device)
        entry_gradient_kernel[(_ENTRY_SHARES * blocks,)](
            *self._read(self.student, self.carried_lse),
            tile.first,
            tile.chunks,
            learned.row,
            learned.column,
            self.plan.slot,
            entries,
            tile.scratch,
            len(self.plan.home),
            dots,
            self.mass,
            self.grad_scale,
            -(-tile.chunks // _ENTRY_SHARES),
            blocks,
            out,
            DIRECTION=self.options.direction,
            HAS_TEMPERATURE=self.tempered,
            CHUNKS=CHUNKS,
            BLOCK=_SLOT_BLOCK,
        )
        total += self.options.temperature**2 * out.sum(dim=0)

    def _outside_chunks(self) -> None:
        gradient, logits = self.requested.gradient, self.student.logits
        if gradient is None or not len(logits):
            return
        from megatron_ext.ops.projected_kl.triton_kernels import outside_kernel

        shard, rows = self.student.shard, self.student.rows
        outside_kernel[(len(logits) * self.column_blocks,)](
            logits,
            rows.order,
            rows.offsets,
            rows.chunk_count,
            logits.stride(0),
            len(logits),
            shard.valid_width,
            shard.width,
            gradient,
            gradient.stride(0),
            self.plain_lse,
            self.label,
            self.label_weight,
            self.column_blocks,
            HAS_LABELS=self.label is not None,
            BLOCK=self.config.block,
            num_warps=self.config.num_warps,
        )

    def _wants_gradient(self) -> bool:
        return self.requested.gradient is not None or self.requested.entry_gradient is not None

    def _read(
        self, side: ChunkedLogits, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor, int, float]:
        """Arguments of kernels for one model's logits."""
        order, offsets, _ = side.rows
        logits = side.logits
        stride, rows = logits.stride(0), len(logits)
        return logits, order, offsets, stride, lse, rows, self.options.temperature


def mean_over_rows(values: torch.Tensor, rows: ChunkRows) -> torch.Tensor:
    """Means [C] of ``values`` fp32 [T] over the rows of each chunk, in a fixed order."""
    return sum_over_rows(values, rows).div_(rows.sizes().clamp(min=1))


def sum_over_rows(values: torch.Tensor, rows: ChunkRows) -> torch.Tensor:
    """Sums [C] of ``values`` fp32 [T] over the rows of each chunk, in a fixed order."""
    from megatron_ext.ops.projected_kl.triton_kernels import chunk_sums_kernel

    out = torch.empty(rows.chunk_count, dtype=torch.float32, device=values.device)
    if len(out):
        block = small_block(len(out), _SLOT_BLOCK)
        chunk_sums_kernel[(-(-len(out) // block),)](
            values, rows.order, rows.offsets, len(out), out, BLOCK=block
        )
    return out


def _stacked(lse: LogSumExp | None) -> torch.Tensor | None:
    return None if lse is None else torch.stack(list(lse))
