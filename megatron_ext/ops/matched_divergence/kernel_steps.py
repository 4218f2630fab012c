"""Launches of the kernels of the matched divergence. C' chunks of a slice, T student rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from megatron_ext.ops.chunk_distributions import ModelRows, chunk_means_by_kernel
from megatron_ext.ops.launch import LaunchConfig, chosen_config, small_block
from megatron_ext.ops.matched_divergence.comparison import MatchedOptions
from megatron_ext.ops.matched_divergence.exchange import onto_student_columns
from megatron_ext.ops.matched_divergence.matching import Matching
from megatron_ext.ops.matched_divergence.values import MatchedTask

_CONFIGS = (
    LaunchConfig(2048, 8),
    LaunchConfig(4096, 8),
    LaunchConfig(4096, 16),
    LaunchConfig(8192, 16),
)


class MatchedPair(NamedTuple):
    """What both kernels read."""

    student: ModelRows

    teacher: ModelRows

    matching: Matching

    used: tuple[torch.Tensor, torch.Tensor]
    """[C] of student and teacher: the mass that each side is normalised by."""

    columns: torch.Tensor
    """int32 [Vps], ``Matching.teacher_columns``."""

    options: MatchedOptions

    @classmethod
    def of(cls, task: MatchedTask) -> MatchedPair:
        """Without tensors over chunks and columns."""
        columns = task.matching.teacher_columns(task.student.shard)
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
            "pairs_ptr": self.columns,
            "moved_ptr": moved,
            "moved_stride": 0 if moved is None else moved.stride(0),
            "temperature": self.options.temperature,
            "mixture": self.options.mixture,
            "DIRECTION": self.options.direction,
            "MOVED": moved is not None,
            "HAS_TEMPERATURE": self.options.temperature != 1.0,
        }


class SliceValues(NamedTuple):
    """Of this rank's columns."""

    value: torch.Tensor
    """[C']"""

    row_slope: torch.Tensor
    """[T]: ``sum_v q_i f_q`` of the rows of these chunks, 0 elsewhere."""

    best: torch.Tensor
    """[2, C']: largest P^ and Q^; -inf where there is no real column."""

    column: torch.Tensor
    """int64 [2, C']: their global columns."""


def compare_by_kernel(pair: MatchedPair, chunks: slice, moved: torch.Tensor | None) -> SliceValues:
    """One read of both models' rows of these chunks."""
    from megatron_ext.ops.matched_divergence.triton_kernels import compare_kernel

    student, count = pair.student, chunks.stop - chunks.start
    width = student.shard.valid_width
    value = student.lse.peak.new_empty(count)
    row_slope = torch.zeros_like(student.lse.peak)
    best = value.new_empty(2, count)
    column = torch.empty(2, count, dtype=torch.int64, device=value.device)

    def launch(config: LaunchConfig) -> None:
        compare_kernel[(count,)](
            value_ptr=value,
            row_slope_ptr=row_slope,
            best_ptr=best,
            column_ptr=column,
            first_chunk=chunks.start,
            width=width,
            padded_width=student.shard.width,
            column_start=student.shard.start,
            BLOCK=small_block(width, config.block),
            num_warps=config.num_warps,
            **pair.arguments(moved),
        )

    if count:
        logits = (student.logits.dtype, pair.teacher.logits.dtype)
        flags = (pair.options.direction, moved is None, pair.options.temperature != 1.0)
        launch(chosen_config(("matched", logits, width, flags), _CONFIGS, launch))
    if not width:
        column.fill_(torch.iinfo(torch.int64).max)
    return SliceValues(value, row_slope, best, column)


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
    """Write the rows of these chunks.

    Args:
        base: [C], slope of every column without a match.
        shift: [C], taken off the slope of every matched column.
        centre: [T], ``q_i . g``.
        scale: [C], of ``row_scale``.
    """
    from megatron_ext.ops.matched_divergence.triton_kernels import gradient_kernel

    shard = pair.student.shard
    if chunks.stop > chunks.start:
        gradient_kernel[(chunks.stop - chunks.start,)](
            gradient_ptr=gradient,
            gradient_stride=gradient.stride(0),
            base_ptr=base,
            shift_ptr=shift,
            centre_ptr=centre,
            scale_ptr=scale,
            first_chunk=chunks.start,
            width=shard.width,
            valid_width=shard.valid_width,
            BLOCK=small_block(shard.width, 4096),
            num_warps=8,
            **pair.arguments(moved),
        )
