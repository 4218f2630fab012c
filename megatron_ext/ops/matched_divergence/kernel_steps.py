"""Matched divergence by Triton kernels. C' chunks of a slice, T student rows."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch.distributed import ProcessGroup

from megatron_ext.distributed.shard_collectives import all_reduce_sum, group_size
from megatron_ext.distributed.vocab_parallel import row_slices
from megatron_ext.ops.launch import (
    HALF_FULL,
    LANE_CONFIGS,
    LaunchConfig,
    chosen_config,
    fitting_config,
    small_block,
)
from megatron_ext.ops.matched_divergence.matching import (
    MatchedOptions,
    MatchedTask,
    MatchedValues,
    Matching,
    PairColumns,
    RestMasses,
    onto_student_columns,
)
from megatron_ext.ops.model_rows import ModelRows, chunk_means_by_kernel
from megatron_ext.ops.sorted_l1.comparison import compare_sorted
from megatron_ext.ops.sorted_l1.kernel_steps import (
    capacity_of,
    keep_chosen,
    select_by_kernel,
    write_chosen,
)


class MatchedPair(NamedTuple):
    """Operands of both kernels."""

    student: ModelRows

    teacher: ModelRows

    matching: Matching

    used: tuple[torch.Tensor, torch.Tensor]
    """[C] of student and teacher: mass that each side is normalised by."""

    columns: PairColumns

    options: MatchedOptions

    @classmethod
    def of(cls, task: MatchedTask) -> MatchedPair:
        """Build from the task; allocates nothing over chunks and columns."""
        columns = task.matching.pairs(task.student.shard, task.teacher.shard)
        return cls(task.student, task.teacher, task.matching, task.rest.used, columns, task.options)

    def moved(self, chunks: slice) -> torch.Tensor | None:
        """Teacher's chunk distributions in this rank's student columns [C', Vps], if pairs cross.

        One reduce-scatter of [C', Vs].
        """
        shard = self.student.shard
        if not self.matching.pairs_cross or shard.group is None:
            return None
        means = chunk_means_by_kernel(self.teacher, chunks)
        column = self.matching.student_column
        return onto_student_columns(means, column, shard.width, shard.group)

    def arguments(self, moved: torch.Tensor | None) -> dict[str, Any]:
        """Arguments of both kernels by name."""
        sides = {"student": self.student, "teacher": self.teacher}
        named: dict[str, Any] = {}
        for (name, side), used in zip(sides.items(), self.used, strict=True):
            named |= {
                f"{name}_ptr": side.logits,
                f"{name}_order_ptr": side.rows.order,
                f"{name}_offsets_ptr": side.rows.offsets,
                f"{name}_peak_ptr": side.lse.peak,
                f"{name}_log_sum_ptr": side.lse.log_sum,
                f"{name}_used_ptr": used,
                f"{name}_stride": side.logits.stride(0),
            }
        return named | {
            "pairs_ptr": self.columns.teacher,
            "aligned": self.columns.aligned,
            "paired": self.columns.end,
            "moved_ptr": moved,
            "moved_stride": 0 if moved is None else moved.stride(0),
            "temperature": self.options.temperature,
            "mixture": self.options.mixture,
            "DIRECTION": self.options.direction,
            "MOVED": moved is not None,
            "HAS_TEMPERATURE": self.options.temperature != 1.0,
        }


class SliceSums(NamedTuple):
    """Sums of a slice of chunks over this rank's columns, or over all shards."""

    value: torch.Tensor
    """[C']"""

    row_slope: torch.Tensor
    """[T]: ``sum_v q_i f_q`` of the rows of these chunks, 0 elsewhere."""

    chosen: torch.Tensor
    """[T]: ``sum_v q_i[v] sign[v]`` of the rows of these chunks, 0 elsewhere."""

    memory: torch.Tensor
    """All of them, each from a multiple of 16 bytes on: a kernel is compiled anew for another."""

    @classmethod
    def zeros(cls, student: ModelRows, chunks: slice) -> SliceSums:
        """Memory of zeros for the sums of a slice."""
        lengths = chunks.stop - chunks.start, len(student.logits)
        size = sum(map(_padded, (*lengths, lengths[1])))
        return cls._of(student.lse.peak.new_zeros(size), *lengths)

    @classmethod
    def _of(cls, memory: torch.Tensor, chunks: int, rows: int) -> SliceSums:
        first, second = _padded(chunks), _padded(chunks) + _padded(rows)
        row_slope, chosen = memory[first : first + rows], memory[second : second + rows]
        return cls(memory[:chunks], row_slope, chosen, memory)

    def over_shards(self, group: ProcessGroup | None) -> SliceSums:
        """Sums over all shards; one all-reduce."""
        return self._of(all_reduce_sum(self.memory, group), len(self.value), len(self.chosen))


def _padded(length: int) -> int:
    """``length`` numbers of 4 bytes, up to a multiple of 16 bytes."""
    return -(-length // 4) * 4


def compare_by_kernel(
    pair: MatchedPair, chunks: slice, moved: torch.Tensor | None, sums: SliceSums
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare these chunks; one read of both models' rows.

    Returns:
        [2, C'], largest P^ and Q^, -inf without a real column; and int64 [2, C'], global columns of
        these.
    """
    from megatron_ext.ops.matched_divergence.triton_kernels import compare_kernel

    student, count = pair.student, chunks.stop - chunks.start
    width = student.shard.valid_width
    best = sums.value.new_empty(2, count)
    column = torch.empty(2, count, dtype=torch.int64, device=best.device)

    def launch(config: LaunchConfig) -> None:
        compare_kernel[(2 * count,)](
            value_ptr=sums.value,
            row_slope_ptr=sums.row_slope,
            best_ptr=best,
            column_ptr=column,
            first_chunk=chunks.start,
            width=width,
            padded_width=student.shard.width,
            column_start=student.shard.start,
            BLOCK=small_block(width, config.block),
            num_warps=config.num_warps,
            **HALF_FULL,
            **pair.arguments(moved),
        )

    if count:
        logits = (student.logits.dtype, pair.teacher.logits.dtype)
        flags = (pair.options.direction, moved is None, pair.options.temperature != 1.0)
        launch(chosen_config(("matched", logits, width, flags), LANE_CONFIGS, launch))
    if not width:
        column.fill_(torch.iinfo(torch.int64).max)
    return best, column


def write_gradient(
    pair: MatchedPair,
    chunks: slice,
    moved: torch.Tensor | None,
    gradient: torch.Tensor,
    *,
    base: torch.Tensor,
    shift: torch.Tensor,
    centre: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    """Write the gradient of these chunks' rows, with that of their labels.

    Args:
        base: [C], slope of every column without a match.
        shift: [C], subtracted from the slope of every matched column.
        centre: [T], ``q_i . g``.
        scale: [C], from ``row_scale``.
    """
    from megatron_ext.ops.matched_divergence.triton_kernels import gradient_kernel

    shard = pair.student.shard
    labels = ("label_ptr", "label_weight_ptr", "plain_peak_ptr", "plain_log_sum_ptr")
    config = fitting_config(LANE_CONFIGS[0], shard.width)
    if chunks.stop > chunks.start:
        gradient_kernel[(2 * (chunks.stop - chunks.start),)](
            gradient_ptr=gradient,
            gradient_stride=gradient.stride(0),
            base_ptr=base,
            shift_ptr=shift,
            centre_ptr=centre,
            scale_ptr=scale,
            **dict(zip(labels, pair.student.label_vectors(), strict=True)),
            first_chunk=chunks.start,
            width=shard.width,
            valid_width=shard.valid_width,
            BLOCK=config.block,
            num_warps=config.num_warps,
            **HALF_FULL,
            **pair.arguments(moved),
        )


def evaluate_by_kernels(task: MatchedTask) -> MatchedValues:
    """Values of all chunks, and their rows of the gradient. Collectives: ``function.py``."""
    places = task.options.top_u
    assert places is not None
    results: list[MatchedValues] = []
    gradient, student = task.gradient, task.student
    group, weight = student.shard.group, task.options.uncommon_weight
    models = (student, task.teacher)
    pair = MatchedPair.of(task)
    if gradient is not None:
        chosen_logits = gradient.new_empty(len(gradient), capacity_of(places, student.shard.width))
    for chunks in row_slices(len(task.scale), _widest(task, places), device=task.scale.device):
        student_top, teacher_top = (
            select_by_kernel(model, chunks, places, excluded, first)
            for model, excluded, first in zip(
                models, pair.columns.excluded, pair.columns.first_open, strict=True
            )
        )
        compared = compare_sorted(student_top, teacher_top, places, group, by_kernel=True)

        moved = pair.moved(chunks)
        sums = SliceSums.zeros(student, chunks)
        best, column = compare_by_kernel(pair, chunks, moved, sums)
        if gradient is not None:
            keep_chosen(
                student, chunks, student_top.columns, compared.signs, chosen_logits, sums.chosen
            )
        sums = sums.over_shards(group)
        results.append(MatchedValues(sums.value, compared.value, compared.left_out, best, column))
        if gradient is None:
            continue
        shift, centre = _centre(task, sums.row_slope, sums.chosen)
        base, scale = task.rest.slope, task.scale
        write_gradient(
            pair, chunks, moved, gradient, base=base, shift=shift, centre=centre, scale=scale
        )
        candidates = (student_top.columns, compared.signs, chosen_logits)
        write_chosen(
            student, chunks, *candidates, centre, scale, gradient, weight=weight, base=base
        )
    return MatchedValues.joined(results, task.scale)


def _widest(task: MatchedTask, places: int) -> int:
    """Columns of the largest temporary of a chunk, the same on every rank."""
    widths = [model.shard.width for model in (task.student, task.teacher)]
    ranks = group_size(task.student.shard.group)
    gathered = (sum(capacity_of(places, width) for width in widths) + 2) * ranks
    if ranks == 1 or not task.matching.pairs_cross:
        return gathered
    return max(gathered, widths[0] * ranks, widths[1])


def _centre(
    task: MatchedTask, row_slope: torch.Tensor, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """README 6: shift of matched columns [C], and ``q_i . g_c`` of each row [T].

    Rows of chunks in other slices are arbitrary.
    """
    model, used, weight = task.student, task.rest.used[0], task.options.uncommon_weight
    if task.matching.with_rest:
        return torch.zeros_like(used), rest_centre(task, row_slope, chosen)
    last = max(model.rows.chunk_count - 1, 0)
    slot = model.rows.slots.clamp(max=last)
    # Not divided by the square, which can underflow.
    shift = model.rows.means(row_slope) / used / used
    centre = row_slope / used[slot] - shift[slot] * model.member_mass + weight * chosen
    return shift, centre


_CHUNKS: Final = 128
"""Chunks, or rows, of a program that makes their numbers."""


class ChunkMasses(NamedTuple):
    """What follows from the masses of the members of both models' rows."""

    rest: RestMasses

    scale: torch.Tensor
    """[C] ``row_scale`` of the student."""

    row_mass: torch.Tensor
    """[Ts] ``ModelRows.member_mass`` of the student's rows of chunks; arbitrary elsewhere."""


def chunk_masses(
    student: ModelRows,
    teacher: ModelRows,
    options: MatchedOptions,
    grad_scale: torch.Tensor | None,
    *,
    with_rest: bool,
) -> ChunkMasses:
    """Sum the rows' masses by chunk; one launch."""
    from megatron_ext.ops.matched_divergence.number_kernels import chunk_masses_kernel

    count, new = student.rows.chunk_count, student.lse.peak.new_empty
    # Each by itself: a kernel is compiled anew for a pointer that is no multiple of 16 bytes.
    numbers, row_mass = [new(count) for _ in range(7)], new(len(student.logits))
    if count:
        block = small_block(count, _CHUNKS)
        chunk_masses_kernel[(-(-count // block),)](
            *(
                argument
                for side in (student, teacher)
                for argument in (*side.lse, *side.members, side.rows.order, side.rows.offsets)
            ),
            None if grad_scale is None else grad_scale.float().contiguous(),
            count,
            options.temperature,
            options.mixture,
            row_mass,
            *numbers,
            DIRECTION=options.direction,
            WITH_REST=with_rest,
            BLOCK=block,
        )
    used, masses = (numbers[0], numbers[1]), (numbers[2], numbers[3])
    return ChunkMasses(RestMasses(used, masses, numbers[4], numbers[5]), numbers[6], row_mass)


def rest_centre(task: MatchedTask, row_slope: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """``q_i . g_c`` of each row [T], where the masses outside are compared, too; one launch.

    Args:
        row_slope: [T] sums over the matched columns.
        chosen: [T] sums over the columns that are sorted, to be weighed.
    """
    from megatron_ext.ops.matched_divergence.number_kernels import rest_centre_kernel

    rows, centre = len(row_slope), torch.empty_like(row_slope)
    if rows:
        block = small_block(rows, _CHUNKS)
        rest_centre_kernel[(-(-rows // block),)](
            task.student.rows.chunk_id,
            row_slope,
            chosen,
            task.row_mass,
            task.rest.slope,
            rows,
            task.options.uncommon_weight,
            centre,
            BLOCK=block,
        )
    return centre
