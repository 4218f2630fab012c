"""The matched divergence in torch, a slice of chunks at a time. C' chunks of a slice."""

from __future__ import annotations

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum, group_size
from megatron_ext.distributed.vocab_parallel import VocabShard, local_argmax, row_slices
from megatron_ext.ops.chunk_distributions import chunk_means, host_offsets, write_row_gradients
from megatron_ext.ops.divergence import divergence_slope
from megatron_ext.ops.matched_divergence.exchange import onto_student_columns
from megatron_ext.ops.matched_divergence.matching import Matching
from megatron_ext.ops.matched_divergence.values import MatchedTask, MatchedValues
from megatron_ext.ops.sorted_l1.comparison import Compared, Largest, compare_sorted, select_largest


def evaluate_by_torch(task: MatchedTask) -> MatchedValues:
    """Values of all chunks, and their rows of the gradient. Collectives: ``evaluation.py``."""
    found, gradient, models = (
        MatchedValues.empty(task.scale),
        task.gradient,
        (task.student, task.teacher),
    )
    shard, ends = task.student.shard, host_offsets(*models)
    for chunks in row_slices(len(task.scale), _widest(task), device=task.scale.device):
        q, p = (
            chunk_means(model, own, chunks).to(task.scale.dtype)
            for model, own in zip(models, ends, strict=True)
        )
        tops, compared = _uncommon(task, q, p)
        found.uncommon[chunks], found.discarded[chunks] = compared.value, compared.left_out

        used = task.rest.used
        p = _onto_student(p, task.matching, shard).div_(used[1][chunks, None])
        q.masked_fill_(~task.matching.is_common, 0.0).div_(used[0][chunks, None])
        for side, values in enumerate((p, q)):
            found.best[side, chunks], found.column[side, chunks] = local_argmax(values, shard)
        terms, slope = divergence_slope(p, q, task.options)
        sums = torch.stack([terms.sum(dim=-1), (q * slope).sum(dim=-1)])
        found.value[chunks], centre = all_reduce_sum(sums, shard.group)
        if gradient is None:
            continue
        slope = _centred(task, chunks, slope, centre)
        signs = compared.signs.to(slope.dtype).mul_(task.options.uncommon_weight)
        slope.scatter_add_(1, tops.columns, signs)
        write_row_gradients(task.student, ends[0], chunks, slope, task.scale, gradient)
    return found


def _centred(
    task: MatchedTask, chunks: slice, slope: torch.Tensor, centre: torch.Tensor
) -> torch.Tensor:
    """README 6 from ``f_q`` [C', Vps] and its mean [C'].

    With a bucket a constant would do no harm, but then rows would be centred by a sum that is
    rounded like their largest slopes.
    """
    rest, is_common = task.rest, task.matching.is_common
    own = rest.slope[chunks]
    if not task.matching.with_rest:
        slope = slope.sub_(centre[:, None]).div_(rest.used[0][chunks, None])
        return slope.masked_fill_(~is_common, 0.0)
    centre = centre + rest.masses[0][chunks] * own
    return torch.where(is_common, slope, own[:, None]).sub_(centre[:, None])


def _widest(task: MatchedTask) -> int:
    """Columns of the largest temporary of a chunk, the same on every rank."""
    student, teacher = (model.shard.width for model in (task.student, task.teacher))
    ranks = group_size(task.student.shard.group)
    return max(student * ranks, (_kept(task, student) + _kept(task, teacher) + 2) * ranks, teacher)


def _kept(task: MatchedTask, width: int) -> int:
    places = task.options.top_u
    return width if places is None else min(places, width)


def _uncommon(task: MatchedTask, q: torch.Tensor, p: torch.Tensor) -> tuple[Largest, Compared]:
    """The student's candidates of the sorted L1, and what came out."""
    shards = task.student.shard, task.teacher.shard
    tops = [
        select_largest(side, _kept(task, shard.width), excluded)
        for side, shard, excluded in zip(
            (q, p), shards, task.matching.excluded(*shards), strict=True
        )
    ]
    return tops[0], compare_sorted(tops[0], tops[1], task.options.top_u, shards[0].group)


def _onto_student(p: torch.Tensor, matching: Matching, shard: VocabShard) -> torch.Tensor:
    """[C', Vpt] in this rank's student columns [C', Vps], 0 where there is no match."""
    if matching.pairs_cross and shard.group is not None:
        return onto_student_columns(p, matching.student_column, shard.width, shard.group)
    column = matching.teacher_columns(shard)
    return p[:, column.clamp(min=0)].masked_fill_(column < 0, 0.0)
