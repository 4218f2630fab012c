"""The matched divergence by kernels. C' chunks of a slice, T student rows."""

from __future__ import annotations

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum, group_size
from megatron_ext.distributed.vocab_parallel import row_slices
from megatron_ext.ops.matched_divergence.kernel_steps import (
    MatchedPair,
    compare_by_kernel,
    write_gradient,
)
from megatron_ext.ops.matched_divergence.values import MatchedTask, MatchedValues
from megatron_ext.ops.sorted_l1.comparison import compare_sorted
from megatron_ext.ops.sorted_l1.kernel_steps import (
    capacity_of,
    keep_chosen,
    select_by_kernel,
    write_chosen,
)


def evaluate_by_kernels(task: MatchedTask) -> MatchedValues:
    """Values of all chunks, and their rows of the gradient. Collectives: ``evaluation.py``."""
    places = task.options.top_u
    assert places is not None
    found, gradient, student = MatchedValues.empty(task.scale), task.gradient, task.student
    group, weight = student.shard.group, task.options.uncommon_weight
    models = (student, task.teacher)
    excluded = task.matching.excluded(student.shard, task.teacher.shard)
    pair = MatchedPair.of(task)
    if gradient is not None:
        kept = gradient.new_empty(len(gradient), capacity_of(places, student.shard.width))
    for chunks in row_slices(len(task.scale), _widest(task, places), device=task.scale.device):
        own, other = (
            select_by_kernel(model, chunks, places, out)
            for model, out in zip(models, excluded, strict=True)
        )
        compared = compare_sorted(own, other, places, group)
        found.uncommon[chunks], found.discarded[chunks] = compared.value, compared.left_out

        moved = pair.moved(chunks)
        values = compare_by_kernel(pair, chunks, moved)
        found.best[:, chunks], found.column[:, chunks] = values.best, values.column
        if gradient is None:
            found.value[chunks] = all_reduce_sum(values.value, group)
            continue
        chosen = keep_chosen(student, chunks, own.columns, compared.signs, kept)
        sums = all_reduce_sum(torch.cat([values.value, values.row_slope, chosen]), group)
        lengths = [len(values.value), len(chosen), len(chosen)]
        found.value[chunks], row_slope, chosen = sums.split(lengths)
        shift, centre = _centre(task, row_slope, weight * chosen)
        base, scale = task.rest.slope, task.scale
        write_gradient(
            pair, chunks, moved, gradient, base=base, shift=shift, centre=centre, scale=scale
        )
        candidates = (own.columns, compared.signs, kept)
        write_chosen(
            student, chunks, *candidates, centre, scale, gradient, weight=weight, base=base
        )
    return found


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
    """README 6: what matched columns lose [C], and ``q_i . g_c`` of each row [T].

    Rows of chunks in other slices hold what is of no use.
    """
    model, used = task.student, task.rest.used[0]
    last = max(model.rows.chunk_count - 1, 0)
    slot = model.rows.slots.clamp(max=last)
    if task.matching.with_rest:
        slope = task.rest.slope[slot]
        return torch.zeros_like(used), row_slope + model.member_mass * slope + chosen
    # Not over its square, which can underflow.
    shift = model.mean_over_rows(row_slope) / used / used
    return shift, row_slope / used[slot] - shift[slot] * model.member_mass + chosen
