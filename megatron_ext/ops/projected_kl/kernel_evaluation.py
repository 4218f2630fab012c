"""Projected KL by kernels, a tile of chunks at a time. README, equations 2 to 11.

T rows, C chunks, C' of a tile, Vps Vpt local columns, D summed columns, R residual rows, X crossing
columns.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import LogSumExp
from megatron_ext.errors import LossError
from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.launch import HALF_FULL, LaunchConfig, chosen_config, fitting_config
from megatron_ext.ops.projected_kl.column_plan import SUMS
from megatron_ext.ops.projected_kl.kept_columns import kept_columns
from megatron_ext.ops.projected_kl.kernel_numbers import KernelNumbers, chunk_values, launch_singles
from megatron_ext.ops.projected_kl.operands import (
    ProjectedKLOptions,
    ProjectedValues,
    RequestedOutputs,
    ShardedProjection,
)

CHUNKS: Final = 32
"""Chunks of a group, whose sums over columns are made together."""

_SCRATCH_BYTES: Final = 1 << 29
_ENTRY_BLOCK: Final = 1024
_COLUMNS: Final = 32
"""Columns of a group that a program holds at once, and fewer where it needs more of each."""

_SLOTS: Final = 8

_ENTRIES: Final = 64
"""Entries that a program of a long sum reads at once."""

_SLOT_BLOCK: Final = 64
_ROW_BLOCK: Final = 128
"""Summed columns, and residual rows, of a program."""

_WARPS: Final = 4

_ENTRY_SHARES: Final = 16
_FEW_PARTS: Final = 4
"""Programs for each chunk where most chunks are done by another kernel."""

_OUTSIDE_PROGRAMS: Final = 2048
"""More than a GPU runs at once; there are mostly few rows of no chunk."""

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
    """fp32 [G, D, chunks]: ``Q~``, then ``dD/dQ`` of summed columns, by groups of chunks."""

    residual: torch.Tensor
    """fp32 [C', R]: ``W f`` of residual rows, of chunks that the sweep compares."""

    partial: torch.Tensor
    """fp32 [4, C', blocks]: terms of D and of the entropy, largest P and Q~."""

    best: torch.Tensor
    """int32 [2, C', blocks]: columns of the largest P and Q~."""

    groups: int
    """G, the last of which may be short of chunks."""


class KernelEvaluation:
    """Evaluation of one call; ``run`` once."""

    def __init__(
        self,
        student: ChunkedLogits,
        teacher: ChunkedLogits,
        projection: ShardedProjection,
        numbers: KernelNumbers,
        options: ProjectedKLOptions,
        requested: RequestedOutputs,
    ) -> None:
        if projection.plan is None:
            raise LossError("the kernels of projected_kl need a plan", fix="pass plan")
        self.student, self.teacher = student, teacher
        self.projection, self.plan = projection, projection.plan
        # In the order in which they are read, which would otherwise wait for their places.
        self.sum_weights = projection.sum_weights or self.plan.sum_weights(projection.weight)
        self.numbers = numbers
        self.options, self.requested = options, requested
        self.tempered = options.temperature != 1.0
        self.is_forward = options.direction == "forward"
        reached = LogSumExp(*numbers.teacher_lse)
        self.kept = kept_columns(teacher, reached, projection.reachable, options, "triton")
        self.has_singles = self.is_forward and self.kept is None
        self.slot_blocks = -(-len(self.plan.home) // _SLOT_BLOCK)
        self.config = fitting_config(self._config(), student.shard.width)
        self.column_blocks = -(-student.shard.width // self.config.block)

    def run(self) -> ProjectedValues:
        """Evaluate all chunks; the collectives are those of ``evaluate_projected_kl``."""
        count = self.student.rows.chunk_count
        partial, best = self._terms(count, self.slot_blocks + self.column_blocks)
        step = self._tile_chunks()
        dots = self._dots()
        for first in range(0, count, step):
            chosen = slice(first, min(first + step, count))
            tile = self._tile(partial[:, chosen], best[:, chosen], first)
            self._summed_columns(tile)
            self._evaluate(tile, dots)
        # After the residual columns are read, which have no gradient from here.
        singles = self._singles() if self.has_singles else None
        self._outside_chunks()
        values = chunk_values(
            (partial, best),
            self.slot_blocks,
            singles,
            self.student.rows,
            self.numbers,
            self.teacher.shard,
            self.options,
        )
        return values if self.kept is None else self._with_rest(values)

    def _with_rest(self, values: ProjectedValues) -> ProjectedValues:
        """Add the term of the columns that are compared as one."""
        assert self.kept is not None
        compared, numbers = self.numbers.compared, self.numbers
        term = self.options.temperature**2 * self.kept.terms(numbers.mass, self.options).value
        return values._replace(
            value=values.value + torch.where(compared, term, 0.0),
            rest_mass=torch.where(compared, self.kept.rest[0], 0.0),
        )

    def _tile_chunks(self) -> int:
        """C', chunks of a tile, whole groups, the same on every rank."""
        # Means and ``W f`` of residual rows, sums, and both sides of the crossing columns.
        wide = self.plan.scratch_width + self.plan.residual_rows + 4 * self.plan.crossing
        return max(1, _SCRATCH_BYTES // (4 * CHUNKS * max(wide, 1))) * CHUNKS

    def _terms(self, count: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for terms of D by blocks of columns, which only those that compare write."""
        new = self.numbers.mass.new_empty
        return new(4, count, blocks), new(2, count, blocks, dtype=torch.int32)

    def _dots(self) -> torch.Tensor | None:
        """Memory for what rows add up, written and read for chunks that ``_evaluate`` compares."""
        if not self._wants_gradient():
            return None
        return self.numbers.mass.new_empty(2, len(self.student.logits), self.column_blocks)

    def _tile(self, partial: torch.Tensor, best: torch.Tensor, first: int) -> _ChunkTile:
        new, count = partial.new_empty, partial.shape[1]
        groups = -(-count // CHUNKS)
        scratch = new(groups, len(self.plan.home), CHUNKS)
        residual = new(count, self.plan.residual_rows)
        return _ChunkTile(first, count, scratch, residual, partial, best, groups)

    def _summed_columns(self, tile: _ChunkTile) -> None:
        """Q~, P and slopes of summed columns, ``W f`` and gradients of residual rows."""
        crossed = None
        if len(self.plan.home):
            self._sums(tile, self._means(tile))
            crossed = self._cross(tile) if self.plan.crossing else None
        if self.kept is not None:
            self._rest(tile, crossed)
        if not len(self.plan.home):
            return
        self._slopes(tile, crossed)
        if self._wants_gradient():
            self._residual_rows(tile)

    def _means(self, tile: _ChunkTile) -> torch.Tensor:
        """Means of residual columns, fp32 [G, R, chunks]."""
        from megatron_ext.ops.projected_kl.summed_kernels import residual_means_kernel

        plan, shard, rows = self.plan, self.student.shard, self.plan.residual_rows
        means = tile.scratch.new_empty(tile.groups, rows, CHUNKS)
        blocks = -(-rows // _ROW_BLOCK)
        if blocks:
            residual_means_kernel[(tile.groups * blocks,)](
                *self._read(self.student, self.numbers.carried_lse),
                self.options.temperature,
                tile.first,
                tile.chunks,
                shard.valid_width,
                shard.width,
                plan.residual,
                self._sixteen_pairs(),
                rows,
                means,
                blocks,
                IS_ALIGNED=plan.aligned is not None,
                HAS_TEMPERATURE=self.tempered,
                CHUNKS=CHUNKS,
                COLUMNS=_COLUMNS,
                BLOCK=_ROW_BLOCK,
                num_warps=_WARPS,
            )
        return means

    def _sums(self, tile: _ChunkTile, means: torch.Tensor) -> None:
        """``Q~`` of summed columns, of this rank's residual rows."""
        from megatron_ext.ops.projected_kl.summed_kernels import column_sums_kernel

        sums = self.plan.by_column
        column_sums_kernel[(tile.groups * len(sums.blocks),)](
            means,
            means.shape[1],
            *sums[:3],
            self.sum_weights[0],
            sums.blocks,
            tile.scratch,
            len(self.plan.home),
            len(sums.blocks),
            CHUNKS=CHUNKS,
            SUMS=SUMS,
            ENTRIES=_ENTRIES,
            num_warps=_WARPS,
        )

    def _rest(self, tile: _ChunkTile, crossed: torch.Tensor | None) -> None:
        """Masses of the columns that are compared as one; one all-reduce of [2, C']."""
        assert self.kept is not None
        if len(self.plan.home):
            self._slopes(tile, crossed, "rest")
        self._pass(tile, self.slot_blocks, "rest", None, self.config)
        sums = tile.partial[:2].sum(dim=-1)
        chosen = slice(tile.first, tile.first + tile.chunks)
        self.kept.rest[:, chosen] = all_reduce_sum(sums, self.student.shard.group)

    def _kept(self) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
        """Arguments of kernels that compare columns."""
        if self.kept is None:
            return None, None, 0
        return *self.kept, self.kept.rest.stride(0)

    def _slopes(
        self, tile: _ChunkTile, crossed: torch.Tensor | None, which: str = "values"
    ) -> None:
        """``dD/dQ`` in place of ``Q~``, and the terms of D; of pass "rest" its sums alone."""
        from megatron_ext.ops.projected_kl.summed_kernels import summed_slopes_kernel

        plan = self.plan
        summed_slopes_kernel[(tile.groups * self.slot_blocks,)](
            *self._read(self.teacher, self.numbers.teacher_lse),
            self.options.temperature,
            tile.first,
            plan.home,
            len(plan.home),
            plan.crossing,
            crossed,
            0 if crossed is None else crossed[0].numel(),
            tile.chunks,
            tile.scratch,
            self.numbers.mass,
            *self._kept(),
            self.options.mixture,
            tile.partial,
            tile.best,
            tile.partial.shape[-1],
            tile.partial.stride(0),
            self.slot_blocks,
            DIRECTION=self.options.direction,
            PASS=which,
            HAS_REST=self.kept is not None,
            HAS_CROSSING=crossed is not None,
            HAS_DIAGNOSTICS=self.options.diagnostics,
            HAS_TEMPERATURE=self.tempered,
            CHUNKS=CHUNKS,
            COLUMNS=_SLOTS,
            BLOCK=_SLOT_BLOCK,
            num_warps=_WARPS,
        )

    def _residual_rows(self, tile: _ChunkTile) -> None:
        """``W f`` of residual rows, and gradients of their columns."""
        from megatron_ext.ops.projected_kl.summed_kernels import residual_gradients_kernel

        plan, numbers, shard = self.plan, self.numbers, self.student.shard
        gradient, blocks = self.requested.gradient, -(-plan.residual_rows // _ROW_BLOCK)
        if not blocks:
            return
        residual_gradients_kernel[(tile.groups * blocks,)](
            tile.scratch,
            len(plan.home),
            plan.by_row.offsets,
            plan.by_row.source,
            self.sum_weights[1],
            tile.residual,
            plan.residual_rows,
            *self._read(self.student, numbers.carried_lse),
            self.options.temperature,
            tile.first,
            tile.chunks,
            shard.valid_width,
            shard.width,
            plan.residual,
            self._sixteen_pairs(),
            self.projection.row_mass,
            numbers.is_scaled,
            numbers.mass,
            numbers.grad_scale,
            gradient,
            0 if gradient is None else gradient.stride(0),
            numbers.plain_lse,
            numbers.label,
            numbers.label_weight,
            blocks,
            HAS_SINGLES=self.has_singles,
            IS_ALIGNED=plan.aligned is not None,
            HAS_GRADIENT=gradient is not None,
            HAS_LABELS=numbers.label is not None,
            HAS_TEMPERATURE=self.tempered,
            CHUNKS=CHUNKS,
            SUMS=SUMS,
            BLOCK=_ROW_BLOCK,
            num_warps=2 * _WARPS,
            **HALF_FULL,
        )

    def _sixteen_pairs(self) -> int:
        """Direct pairs of an aligned plan, in units of 16."""
        return 0 if self.plan.aligned is None else self.plan.aligned // 16

    def _cross(self, tile: _ChunkTile) -> torch.Tensor:
        """Q~ and P of the crossing columns over all ranks, [2, G, X, chunks]. One all-reduce."""
        from megatron_ext.ops.projected_kl.summed_kernels import crossing_teacher_kernel

        crossing = self.plan.crossing
        both = tile.scratch.new_empty(2, tile.groups, crossing, CHUNKS)
        both[0] = tile.scratch[:, :crossing]
        blocks = -(-crossing // _COLUMNS)
        crossing_teacher_kernel[(tile.groups * blocks,)](
            *self._read(self.teacher, self.numbers.teacher_lse),
            self.options.temperature,
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

    def _singles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Direct pairs of chunks with one student row, whose statistics ranks have exchanged."""
        return launch_singles(
            self.student,
            self.teacher,
            self.projection,
            self.numbers,
            self.options,
            self.requested.gradient,
        )

    def _evaluate(self, tile: _ChunkTile, dots: torch.Tensor | None) -> None:
        """Direct pairs and gradients of chunks that ``single_kernel`` leaves."""
        if dots is None:
            self._pass(tile, self.slot_blocks, "values", None, self.config)
            return
        if self.is_forward:
            self._entries(tile, dots)
        self._pass(tile, self.slot_blocks, "values", dots, self.config)
        sums = all_reduce_sum(dots.sum(dim=-1), self.student.shard.group)
        if not self.is_forward:
            self._entries(tile, sums)
        if self.requested.gradient is not None:
            self._pass(tile, self.slot_blocks, "gradient", sums, self.config)

    def _pass(
        self,
        tile: _ChunkTile,
        first_block: int,
        which: str,
        dots: torch.Tensor | None,
        config: LaunchConfig,
    ) -> None:
        from megatron_ext.ops.projected_kl.triton_kernels import sweep_kernel

        shard, gradient, numbers = self.student.shard, self.requested.gradient, self.numbers
        blocks = -(-shard.width // config.block)
        parts = min(blocks, _FEW_PARTS) if self.has_singles else blocks
        sweep_kernel[(tile.chunks * parts,)](
            *self._read(self.student, numbers.student_lse),
            numbers.carried_lse,
            numbers.is_scaled,
            shard.valid_width,
            shard.width,
            *self._read(self.teacher, numbers.teacher_lse),
            self.options.temperature,
            tile.first,
            tile.chunks,
            self.plan.partner,
            self.projection.row_mass,
            tile.residual,
            tile.residual.stride(0),
            numbers.mass,
            *self._kept(),
            self.options.mixture,
            tile.partial,
            tile.best,
            tile.partial.shape[-1],
            tile.partial.stride(0),
            first_block,
            dots,
            len(self.student.logits) * blocks,
            numbers.grad_scale,
            gradient,
            0 if gradient is None else gradient.stride(0),
            numbers.plain_lse,
            numbers.label,
            numbers.label_weight,
            blocks,
            parts,
            DIRECTION=self.options.direction,
            PASS=which,
            HAS_REST=self.kept is not None,
            HAS_DOTS=dots is not None,
            HAS_GRADIENT=gradient is not None and dots is not None,
            HAS_DIAGNOSTICS=self.options.diagnostics,
            HAS_LABELS=self.numbers.label is not None,
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
            terms = self._terms(count, -(-self.student.shard.width // config.block))
            self._pass(self._tile(*terms, 0), 0, "values", None, config)

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
        blocks = -(-entries // _ENTRY_BLOCK)
        out = torch.empty(_ENTRY_SHARES, entries, dtype=torch.float32, device=total.device)
        entry_gradient_kernel[(_ENTRY_SHARES * blocks,)](
            *self._read(self.student, self.numbers.carried_lse),
            self.options.temperature,
            tile.first,
            tile.chunks,
            learned.row,
            learned.column,
            self.plan.slot,
            entries,
            tile.scratch,
            len(self.plan.home),
            dots,
            self.numbers.mass,
            self.numbers.grad_scale,
            -(-tile.chunks // _ENTRY_SHARES),
            blocks,
            out,
            DIRECTION=self.options.direction,
            HAS_TEMPERATURE=self.tempered,
            CHUNKS=CHUNKS,
            BLOCK=_ENTRY_BLOCK,
        )
        total += self.options.temperature**2 * out.sum(dim=0)

    def _outside_chunks(self) -> None:
        gradient, logits = self.requested.gradient, self.student.logits
        if gradient is None or not len(logits):
            return
        from megatron_ext.ops.projected_kl.triton_kernels import outside_kernel

        shard, rows = self.student.shard, self.student.rows
        outside_kernel[(min(len(logits) * self.column_blocks, _OUTSIDE_PROGRAMS),)](
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
            self.numbers.plain_lse,
            self.numbers.label,
            self.numbers.label_weight,
            self.column_blocks,
            HAS_LABELS=self.numbers.label is not None,
            BLOCK=self.config.block,
            num_warps=self.config.num_warps,
        )

    def _wants_gradient(self) -> bool:
        return self.requested.gradient is not None or self.requested.entry_gradient is not None

    def _read(
        self, side: ChunkedLogits, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor, int]:
        """Arguments of kernels for one model's logits."""
        order, offsets, _ = side.rows
        logits = side.logits
        stride, rows = logits.stride(0), len(logits)
        return logits, order, offsets, stride, lse, rows
