"""Values and gradients of the matched divergence, and of the sorted L1 over the other columns.

T rows, Vp local columns, C chunks, U compared places. Equations and bytes are in the README.
"""

from __future__ import annotations

import torch

from megatron_ext.distributed.vocab_parallel import merge_argmax
from megatron_ext.ops.chunk_distributions import (
    ModelRows,
    clear_rows_of_no_chunk_,
    pair_of_models,
    row_scale,
)
from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.divergence import divergence_slope
from megatron_ext.ops.implementation import Implementation, check_implementation, uses_triton
from megatron_ext.ops.matched_divergence.by_kernels import evaluate_by_kernels
from megatron_ext.ops.matched_divergence.by_torch import evaluate_by_torch
from megatron_ext.ops.matched_divergence.comparison import MatchedOptions
from megatron_ext.ops.matched_divergence.matching import Matching
from megatron_ext.ops.matched_divergence.values import MatchedDivergence, MatchedTask, RestMasses


@torch.no_grad()
def evaluate_matched_divergence(
    student: ChunkedLogits,
    teacher: ChunkedLogits,
    matching: Matching,
    options: MatchedOptions,
    *,
    grad_scale: torch.Tensor | None = None,
    gradient: torch.Tensor | None = None,
    implementation: Implementation = "auto",
) -> MatchedDivergence:
    """How far the student's chunk distributions are from the teacher's, and what its logits get.

    Args:
        grad_scale: [C], the gradient that each chunk's loss will get; None: 1.
        gradient: [Ts, Vps] in the student's dtype, which receives the gradient of ``sum_c
            grad_scale_c chunk_loss_c``, rounded once; it may be the logits themselves. Rows of
            no chunk and of chunks of scale 0 get exactly 0. None: nothing is computed for it.

    Temporaries over a vocabulary are slices of chunks in torch. By kernel there is one only if
    pairs cross, and [Ts, 5 U / 4] logits where a gradient is asked for. ``top_u=None`` is a sort,
    in torch whatever ``implementation`` says. In torch the host waits for the device once.

    Collectives on the shards' group: two all-reduces of [2 Ts + 2 Tt] and two of [2, C]. A slice of
    C' chunks adds a reduce-scatter of [C', Vs] if pairs cross, an all-gather of
    [C', U_s + U_t + 2] (a quarter more by kernel), and an all-reduce: by kernel of [C' + 2 Ts], in
    torch of [2, C'] and, for the gradient, one of [T'] a slice of its rows.

    Raises:
        LossError: ``triton`` was asked for and cannot run.
    """
    check_implementation("matched_divergence", implementation)
    fits = uses_triton(implementation, student.logits, teacher.logits)
    by_kernel = fits and options.top_u is not None
    own, other = pair_of_models(
        student,
        teacher,
        temperature=options.temperature,
        members=matching.members(),
        implementation="triton" if by_kernel else "torch",
    )
    rest = _rest(own, other, matching, options)
    scale = row_scale(own, grad_scale)
    task = MatchedTask(own, other, matching, options, rest, scale, gradient)
    found = evaluate_by_kernels(task) if by_kernel else evaluate_by_torch(task)
    if gradient is not None:
        clear_rows_of_no_chunk_(gradient, own, by_kernel=by_kernel)
    p_top, q_top = merge_argmax(found.best, found.column, student.shard.group)
    common = found.value + rest.value
    return MatchedDivergence(
        common + options.uncommon_weight * found.uncommon,
        common,
        found.uncommon,
        found.discarded,
        *rest.masses,
        (p_top == q_top).to(common.dtype),
    )


def _rest(
    student: ModelRows, teacher: ModelRows, matching: Matching, options: MatchedOptions
) -> RestMasses:
    models = (student, teacher)
    mass = [model.mean_over_rows(model.member_mass) for model in models]
    if matching.with_rest:
        one = torch.ones_like(mass[0])
        value, slope = divergence_slope(mass[1], mass[0], options)
        return RestMasses((one, one), (mass[0], mass[1]), value, slope)
    outside = [
        ((model.rows.sizes() > 0).to(own.dtype) - own).clamp_(min=0)
        for model, own in zip(models, mass, strict=True)
    ]
    used = [own.clamp(min=1024 * torch.finfo(own.dtype).tiny) for own in mass]
    nothing = torch.zeros_like(mass[0])
    return RestMasses((used[0], used[1]), (outside[0], outside[1]), nothing, nothing)
