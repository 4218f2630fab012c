"""Teacher columns to the ranks that hold the matching student columns. C chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_ext.distributed.shard_collectives import group_size, sum_columns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def onto_student_columns(
    values: torch.Tensor, student_column: torch.Tensor, width: int, group: ProcessGroup | None
) -> torch.Tensor:
    """``values`` [C, Vpt] in the student's columns, 0 where a student column has no match.

    Args:
        values: Without a graph.
        student_column: int64 [Vpt], the global student column that each one matches, -1 for none.
        width: Student columns of a rank.

    Returns:
        [C, width]. One reduce-scatter of [C, width * ranks].
    """
    columns = width * group_size(group)
    # Columns without a match are written beyond the end, where nothing reads them.
    target = torch.where(student_column >= 0, student_column, columns)
    moved = values.new_zeros(values.shape[0], columns + 1).index_copy_(1, target, values)
    return sum_columns(moved[:, :columns], width, group)
