"""Numbers of rows and chunks of the matched divergence that kernels make. T rows, C chunks."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from megatron_ext.ops.launch import small_block
from megatron_ext.ops.matched_divergence.matching import MatchedOptions, MatchedTask, RestMasses
from megatron_ext.ops.model_rows import ModelRows

_BLOCK: Final = 128


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
        block = small_block(count, _BLOCK)
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
        block = small_block(rows, _BLOCK)
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
