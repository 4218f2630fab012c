"""Matched divergence of chunks, with sorted L1 over the other columns: value, gradient, reference.

T rows, Vp local columns, C chunks, U compared places, N matches. Equations and bytes are in the
README.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum, group_size
from megatron_ext.distributed.vocab_parallel import (
    VocabShard,
    local_argmax,
    merge_argmax,
    row_slices,
)
from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.divergence import divergence_reference, divergence_slope
from megatron_ext.ops.labels import RowLabels
from megatron_ext.ops.launch import (
    Implementation,
    check_implementation,
    uses_triton,
    without_kernels,
)
from megatron_ext.ops.matched_divergence.kernel_steps import chunk_masses, evaluate_by_kernels
from megatron_ext.ops.matched_divergence.matching import (
    MatchedDivergence,
    MatchedOptions,
    MatchedTask,
    MatchedValues,
    Matching,
    RestMasses,
    onto_student_columns,
)
from megatron_ext.ops.model_rows import (
    ModelRows,
    chunk_means,
    host_offsets,
    pair_of_models,
    row_scale,
    write_row_gradients,
    write_rows_of_no_chunk,
)
from megatron_ext.ops.sorted_l1.comparison import (
    Candidates,
    Compared,
    Largest,
    add_signs_,
    compare_sorted,
    select_largest,
)
from megatron_ext.ops.unit_gradient import kept_gradient


@torch.no_grad()
def evaluate_matched_divergence(
    student: ChunkedLogits,
    teacher: ChunkedLogits,
    matching: Matching,
    options: MatchedOptions,
    *,
    labels: RowLabels | None = None,
    grad_scale: torch.Tensor | None = None,
    gradient: torch.Tensor | None = None,
    implementation: Implementation = "auto",
) -> MatchedDivergence:
    """Divergence of the chunk distributions, and the gradient of the student's logits.

    Args:
        labels: Of the student's rows, whose cross-entropy is evaluated, too; None: it is not.
        grad_scale: [C], the upstream gradient of each chunk's loss; None: 1.
        gradient: [Ts, Vps] in the student's dtype, which receives the gradient of ``sum_c
            grad_scale_c chunk_loss_c``, and of the labels, rounded once; it may be the logits
            themselves. Rows of no chunk and of chunks of scale 0 that have no label get exactly 0.
            None: no gradient is computed.

    Temporaries over a vocabulary are slices of chunks in torch. By kernel there is one only if
    pairs cross, and [Ts, 5 U / 4] logits where a gradient is asked for. ``top_u=None`` is a sort,
    in torch whatever the ``implementation``. In torch the host waits for the device once.

    Collectives on the shards' group: those of ``model_rows.pair_of_models`` with members, and two
    all-reduces of [2, C]. A slice of
    C' chunks adds a reduce-scatter of [C', Vs] if pairs cross, an all-gather of
    [C', U_s + U_t + 2] (a quarter more by kernel), and an all-reduce: by kernel of [C' + 2 Ts], in
    torch of [2, C'] and, for the gradient, one of [T'] a slice of its rows.

    Raises:
        LossError: ``triton`` was asked for and cannot run.
    """
    check_implementation("matched_divergence", implementation)
    fits = uses_triton(implementation, student.logits, teacher.logits)
    by_kernel = fits and options.top_u is not None
    student_rows, teacher_rows = pair_of_models(
        student,
        teacher,
        temperature=options.temperature,
        members=matching.members(),
        labels=labels,
        implementation="triton" if by_kernel else without_kernels(implementation),
    )
    row_mass = None
    if by_kernel:
        with_rest = matching.with_rest
        rest, scale, row_mass = chunk_masses(
            student_rows, teacher_rows, options, grad_scale, with_rest=with_rest
        )
    else:
        rest = _rest(student_rows, teacher_rows, matching, options)
        scale = row_scale(student_rows, grad_scale)
    task = MatchedTask(
        student_rows, teacher_rows, matching, options, rest, scale, gradient, row_mass
    )
    values = evaluate_by_kernels(task) if by_kernel else evaluate_by_torch(task)
    if gradient is not None:
        write_rows_of_no_chunk(gradient, student_rows, by_kernel=by_kernel)
    p_top, q_top = merge_argmax(values.best, values.column, student.shard.group)
    common, labelled = values.value + rest.value, student_rows.labelled
    return MatchedDivergence(
        torch.add(common, values.uncommon, alpha=options.uncommon_weight),
        common,
        values.uncommon,
        values.discarded,
        *rest.masses,
        (p_top == q_top).to(common.dtype),
        student_rows.lse.log_sum,
        teacher_rows.lse.log_sum,
        None if labelled is None else labelled.loss,
        None if labelled is None else labelled.top_column,
    )


def _rest(
    student: ModelRows, teacher: ModelRows, matching: Matching, options: MatchedOptions
) -> RestMasses:
    models = (student, teacher)
    mass = [model.rows.means(model.member_mass) for model in models]
    if matching.with_rest:
        one = torch.ones_like(mass[0])
        value, slope = divergence_slope(mass[1], mass[0], options)
        return RestMasses((one, one), (mass[0], mass[1]), value, slope)
    outside = [
        ((model.rows.sizes() > 0).to(inside.dtype) - inside).clamp_(min=0)
        for model, inside in zip(models, mass, strict=True)
    ]
    used = [inside.clamp(min=1024 * torch.finfo(inside.dtype).tiny) for inside in mass]
    nothing = torch.zeros_like(mass[0])
    return RestMasses((used[0], used[1]), (outside[0], outside[1]), nothing, nothing)


def matched_divergence(
    student: ChunkedLogits,
    teacher: ChunkedLogits,
    matching: Matching,
    options: MatchedOptions,
    *,
    grad_scale: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> MatchedDivergence:
    """``evaluate_matched_divergence`` with a graph from ``chunk_loss`` to the student's logits.

    Args:
        in_place: Write the gradient over the student's logits, which must not be read afterwards.

    Keeps the gradient [Ts, Vps] for backward, which has no collectives.
    """

    def evaluate(logits: torch.Tensor, gradient: torch.Tensor | None) -> MatchedDivergence:
        return evaluate_matched_divergence(
            student._replace(logits=logits),
            teacher,
            matching,
            options,
            grad_scale=grad_scale,
            gradient=gradient,
            implementation=implementation,
        )

    values = kept_gradient(
        student.logits,
        evaluate,
        grad_scale=grad_scale,
        slots=student.rows.chunk_id,
        in_place=in_place,
        implementation=implementation,
    )
    return MatchedDivergence(*values)


def evaluate_by_torch(task: MatchedTask) -> MatchedValues:
    """Values of all chunks, and their rows of the gradient; see ``evaluate_matched_divergence``."""
    results, gradient, models = (
        MatchedValues.empty(task.scale),
        task.gradient,
        (task.student, task.teacher),
    )
    shard, ends = task.student.shard, host_offsets(*models)
    candidates = _candidates(task)
    pairs = _pairs(task)
    for chunks in row_slices(len(task.scale), _widest(task, candidates), device=task.scale.device):
        q, p = (
            chunk_means(model, offsets, chunks).to(task.scale.dtype)
            for model, offsets in zip(models, ends, strict=True)
        )
        top, compared = _uncommon(task, q, p, candidates)
        results.uncommon[chunks], results.discarded[chunks] = compared.value, compared.left_out

        if task.student.by_loops:
            sums, slope = _terms_by_loops(task, chunks, p, q, results, pairs)
        else:
            sums, slope = _terms_by_torch(task, chunks, p, q, results)
        results.value[chunks], centre = all_reduce_sum(sums, shard.group)
        if gradient is None:
            continue
        slope = _centred(task, chunks, slope, centre)
        add_signs_(
            slope, top, compared, task.options.uncommon_weight, by_loops=task.student.by_loops
        )
        write_row_gradients(task.student, ends[0], chunks, slope, task.scale, gradient)
    return results


def _terms_by_torch(
    task: MatchedTask, chunks: slice, p: torch.Tensor, q: torch.Tensor, results: MatchedValues
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums [2, C'] of D and of the slope under Q, and the slope [C', Vps]; the largest columns."""
    used, shard = task.rest.used, task.student.shard
    p = _onto_student(p, task.matching, shard).div_(used[1][chunks, None])
    q.masked_fill_(~task.matching.is_common, 0.0).div_(used[0][chunks, None])
    for side, values in enumerate((p, q)):
        results.best[side, chunks], results.column[side, chunks] = local_argmax(values, shard)
    terms, slope = divergence_slope(p, q, task.options)
    return torch.stack([terms.sum(dim=-1), (q * slope).sum(dim=-1)]), slope


def _pairs(task: MatchedTask) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns int32 [Vps] of ``loops.MatchedWork``: the teacher's, or its moved row's, and own."""
    shard, matching = task.student.shard, task.matching
    own = torch.arange(shard.width, dtype=torch.int32, device=matching.is_common.device)
    own.masked_fill_(~matching.is_common, -1)
    if matching.pairs_cross and shard.group is not None:
        return own, own
    return matching.teacher_columns(shard), own


def _terms_by_loops(
    task: MatchedTask,
    chunks: slice,
    p: torch.Tensor,
    q: torch.Tensor,
    results: MatchedValues,
    pairs: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    from megatron_ext.ops import divergence_loops as loops
    from megatron_ext.ops.row_loops import in_threads

    shard, matching, options = task.student.shard, task.matching, task.options
    if matching.pairs_cross and shard.group is not None:
        p = _onto_student(p, matching, shard)
    slope, sums = torch.empty_like(q), q.new_zeros(2, len(q))
    best, top = q.new_empty(2, len(q)), torch.zeros(2, len(q), dtype=torch.int64)
    mass = torch.stack([used[chunks] for used in task.rest.used]).float()
    work = loops.MatchedWork(
        p.contiguous().numpy(),
        q.numpy(),
        pairs[0].numpy(),
        pairs[1].numpy(),
        mass.numpy(),
        loops.DIRECTIONS[options.direction],
        np.float32(options.mixture),
    )
    found = slope.numpy(), sums.numpy(), best.numpy(), top.numpy()
    in_threads(lambda a, b: loops.matched_terms(a, b, work, *found), len(q))
    results.best[:, chunks], results.column[:, chunks] = best, top + shard.start
    return sums, slope


def _centred(
    task: MatchedTask, chunks: slice, slope: torch.Tensor, centre: torch.Tensor
) -> torch.Tensor:
    """README 6 from ``f_q`` [C', Vps] and its mean [C'].

    With a bucket any constant would be right, but rows would then be centred by a sum that is
    rounded like their largest slopes.
    """
    rest, is_common = task.rest, task.matching.is_common
    rest_slope = rest.slope[chunks]
    if task.student.by_loops:
        return _centred_by_loops(task, chunks, slope, centre)
    if not task.matching.with_rest:
        slope = slope.sub_(centre[:, None]).div_(rest.used[0][chunks, None])
        return slope.masked_fill_(~is_common, 0.0)
    centre = centre + rest.masses[0][chunks] * rest_slope
    return torch.where(is_common, slope, rest_slope[:, None]).sub_(centre[:, None])


def _centred_by_loops(
    task: MatchedTask, chunks: slice, slope: torch.Tensor, centre: torch.Tensor
) -> torch.Tensor:
    from megatron_ext.ops import divergence_loops as loops
    from megatron_ext.ops.row_loops import in_threads

    rest = task.rest
    if task.matching.with_rest:
        centre = centre + rest.masses[0][chunks] * rest.slope[chunks]
        factor, outside = torch.ones_like(centre), rest.slope[chunks] - centre
    else:
        factor, outside = 1 / rest.used[0][chunks], torch.zeros_like(centre)
    own = task.matching.is_common.int() - 1
    arguments = (x.float().numpy() for x in (centre, factor, outside))
    given = (slope.numpy(), own.numpy(), *arguments)
    in_threads(lambda a, b: loops.centre_slopes(a, b, *given), len(slope))
    return slope


def _candidates(task: MatchedTask) -> tuple[Candidates, Candidates]:
    """Student's and teacher's columns that the sorted L1 compares."""
    shards = task.student.shard, task.teacher.shard
    student, teacher = (
        Candidates.of(
            task.options.top_u,
            shard.width,
            excluded,
            group=shard.group,
            by_loops=task.student.by_loops,
        )
        for shard, excluded in zip(shards, task.matching.excluded(*shards), strict=True)
    )
    return student, teacher


def _widest(task: MatchedTask, candidates: tuple[Candidates, Candidates]) -> int:
    """Columns of the largest temporary of a chunk, the same on every rank."""
    student, teacher = (model.shard.width for model in (task.student, task.teacher))
    ranks = group_size(task.student.shard.group)
    compared = sum(side.kept for side in candidates) + 2
    return max(student * ranks, compared * ranks, teacher)


def _uncommon(
    task: MatchedTask,
    q: torch.Tensor,
    p: torch.Tensor,
    candidates: tuple[Candidates, Candidates],
) -> tuple[Largest, Compared]:
    """The student's candidates of the sorted L1, and the comparison."""
    student, teacher = (
        select_largest(side, of_side) for side, of_side in zip((q, p), candidates, strict=True)
    )
    group, by_loops = task.student.shard.group, task.student.by_loops
    return student, compare_sorted(student, teacher, task.options.top_u, group, by_loops=by_loops)


def _onto_student(p: torch.Tensor, matching: Matching, shard: VocabShard) -> torch.Tensor:
    """``p`` [C', Vpt] moved to this rank's student columns [C', Vps], 0 without a match."""
    if matching.pairs_cross and shard.group is not None:
        return onto_student_columns(p, matching.student_column, shard.width, shard.group)
    column = matching.teacher_columns(shard)
    return p[:, column.clamp(min=0)].masked_fill_(column < 0, 0.0)


def matched_divergence_reference(
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    common_student: torch.Tensor,
    common_teacher: torch.Tensor,
    direction: str = "forward",
    mixture: float = 0.5,
) -> torch.Tensor:
    """The divergence [C] of ``student`` [C, Vs] from ``teacher`` [C, Vt] (README, 1 to 4).

    Args:
        common_student: int64 [N]
        common_teacher: int64 [N], the matching teacher columns.
    """
    with_rest = len(common_student) < min(student.shape[1], teacher.shape[1])
    q = _folded(student, common_student, with_rest)
    p = _folded(teacher, common_teacher, with_rest)
    return divergence_reference(p, q, direction=direction, mixture=mixture)


def _folded(probs: torch.Tensor, common: torch.Tensor, with_rest: bool) -> torch.Tensor:
    """One distribution of the matched columns, and with ``with_rest`` the mass of the others."""
    matched = probs[:, common]
    if with_rest:
        rest = probs.sum(dim=-1, keepdim=True) - matched.sum(dim=-1, keepdim=True)
        matched = torch.cat([matched, rest], dim=-1)
    return matched / matched.sum(dim=-1, keepdim=True)
