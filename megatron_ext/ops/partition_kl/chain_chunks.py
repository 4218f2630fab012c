"""Chunks of several tokens on a side: their comparison, and gradients of all rows but singles'.

T rows, Vp local columns, H chains, S steps, E completions; N chosen columns and R rows of one
model.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard, scaled_logits
from megatron_ext.ops.labels import LabelTerm
from megatron_ext.ops.launch import ROW_CONFIGS, fitting_config
from megatron_ext.ops.partition_kl.chain_masses import (
    IMPOSSIBLE,
    ChosenColumns,
    RowMasses,
    chain_masses,
    event_chains,
    event_divergence,
    row_masses,
    segment_top,
)
from megatron_ext.ops.partition_kl.kernel_numbers import chain_gradients
from megatron_ext.ops.partition_kl.operands import (
    ChainRows,
    EventComparison,
    PartitionPlan,
)
from megatron_ext.ops.partition_kl.single_chunks import token_numbers
from megatron_ext.ops.partition_kl.split_statistics import RowGroup, RowSplit

_EVENTS: Final = 128
"""Completions that a program holds at once."""


class ChosenLogits(NamedTuple):
    """Logits at the rows of chains, relative to the row; ``IMPOSSIBLE`` where there is no mass."""

    chosen: torch.Tensor
    """[N]"""

    rest: torch.Tensor
    """[R] log-sum-exp of the columns that are not chosen."""

    @classmethod
    def of(cls, picked: LogSumExp, others: LogSumExp, columns: ChosenColumns) -> ChosenLogits:
        """Build from merged logits [N] and statistics [R]; relative, as fp32 near 1e4 has 1e-3
        only."""
        logits = picked.peak + picked.log_sum
        top = others.peak.masked_fill(others.log_sum == -torch.inf, -torch.inf)
        top = top.scatter_reduce(0, columns.place, logits, "amax")
        top = top.masked_fill(top == -torch.inf, 0.0)
        return cls(
            (logits - top[columns.place]).clamp(min=IMPOSSIBLE),
            (others.peak - top).add_(others.log_sum).clamp(min=IMPOSSIBLE),
        )


def compare_chains(
    student: ChosenLogits,
    teacher: ChosenLogits | RowMasses,
    plan: PartitionPlan,
    grad_scale: torch.Tensor | None,
    *,
    with_gradient: bool,
) -> tuple[EventComparison, ChosenLogits]:
    """Comparison of the H chains without a graph, and the gradients of the student's logits.

    Args:
        grad_scale: [H] upstream gradient of each divergence; a chain at 0 gets none. None: 1.
        with_gradient: Whether to compute gradients; otherwise they are zeros.
    """
    counted = plan.counted
    chosen, rest = (part.detach().requires_grad_(with_gradient) for part in student)
    with torch.set_grad_enabled(with_gradient):
        masses = _masses(ChosenLogits(chosen, rest), plan.chains.student, plan)
        if isinstance(teacher, ChosenLogits):
            teacher = _masses(teacher, plan.chains.teacher, plan)
        compared = _compare(masses, teacher, plan)
    if not with_gradient or not len(counted):
        none = ChosenLogits(torch.zeros_like(chosen), torch.zeros_like(rest))
        return compared._replace(divergence=compared.divergence.detach()), none
    weight = torch.ones_like(compared.divergence)
    if grad_scale is not None:
        weight = grad_scale.to(weight.dtype)
    grads = torch.autograd.grad(compared.divergence, (chosen, rest), weight)
    unused = (weight == 0) | ~counted
    of_step = unused[plan.chains.student.step_chain]
    grad_chosen = grads[0].masked_fill(chosen <= IMPOSSIBLE, 0.0)
    of_chosen = torch.cat([of_step, unused[plan.chains.completion_chain]])
    return compared._replace(divergence=compared.divergence.detach()), ChosenLogits(
        grad_chosen.masked_fill_(of_chosen, 0.0),
        grads[1].masked_fill(torch.cat([of_step, unused]), 0.0),
    )


def compare_chains_by_kernel(
    student: ChosenLogits,
    teacher: ChosenLogits | RowMasses,
    plan: PartitionPlan,
    grad_scale: torch.Tensor | None,
    *,
    with_gradient: bool,
) -> tuple[EventComparison, ChosenLogits]:
    """``compare_chains`` by a kernel, which has a program for each chain."""
    from megatron_ext.ops.partition_kl.chain_kernels import compare_chains_kernel

    chains, count = plan.chains, plan.chains.chain_count
    chosen, rest = (part.float().contiguous() for part in student)
    # Each by itself: a kernel is compiled anew for a pointer that is no multiple of 16 bytes.
    divergence, student_rest, teacher_rest = (rest.new_empty(count) for _ in range(3))
    agreement, gradients = plan.counted.new_empty(count), (chosen, rest)
    if with_gradient:
        gradients = torch.empty_like(chosen), torch.empty_like(rest)
    if isinstance(teacher, RowMasses):
        its = torch.cat(teacher[::2]), torch.cat(teacher[1::2])
    else:
        its = teacher.chosen, teacher.rest
    edges = chains.found_edges()
    if grad_scale is None:
        grad_scale = rest.new_ones(count)
    if count:
        compare_chains_kernel[(count,)](
            chosen,
            rest,
            edges.student_steps,
            len(chains.student.step_chain),
            *(part.float().contiguous() for part in its),
            edges.teacher_steps,
            len(chains.teacher.step_chain),
            edges.completions,
            plan.counted,
            grad_scale.float().contiguous(),
            plan.options.temperature,
            plan.options.mixture,
            divergence,
            student_rest,
            teacher_rest,
            agreement,
            *gradients,
            DIRECTION=plan.options.direction,
            HAS_MASSES=isinstance(teacher, RowMasses),
            HAS_GRADIENT=with_gradient,
            BLOCK=_EVENTS,
            num_warps=1,
        )
    if not with_gradient:
        gradients = torch.zeros_like(chosen), torch.zeros_like(rest)
    compared = EventComparison(divergence, student_rest, teacher_rest, agreement)
    return compared, ChosenLogits(*gradients)


def _masses(logits: ChosenLogits, rows: ChainRows, plan: PartitionPlan) -> RowMasses:
    """Log-probabilities at the rows of the counted chains; finite but arbitrary at the others."""
    of_step = plan.counted[rows.step_chain]
    of_chosen = torch.cat([of_step, plan.counted[plan.chains.completion_chain]])
    return row_masses(
        torch.where(of_chosen, logits.chosen, 0.0),
        torch.where(torch.cat([of_step, plan.counted]), logits.rest, 0.0),
        plan.chains,
        len(of_step),
    )


def _compare(student: RowMasses, teacher: RowMasses, plan: PartitionPlan) -> EventComparison:
    chains = plan.chains
    sides = [
        torch.cat(chain_masses(masses, rows, chains))
        for masses, rows in ((student, chains.student), (teacher, chains.teacher))
    ]
    segment, count = event_chains(chains), chains.chain_count
    divergence, log_q, log_p = event_divergence(sides[0], sides[1], segment, count, plan.options)
    completions = len(chains.completion_chain)
    return EventComparison(
        torch.where(plan.counted, divergence, 0.0),
        log_q[completions:].exp(),
        log_p[completions:].exp(),
        segment_top(log_q, segment, count) == segment_top(log_p, segment, count),
    )


class ChainGradient(NamedTuple):
    """Gradients of the student's rows of chains and of no chunk."""

    split: RowSplit
    rest: LogSumExp
    """[R] log-sum-exp of the columns that are not chosen, over all shards."""

    grads: ChosenLogits
    """Gradients of the chosen logits [N] and of ``rest`` [R]."""

    picked: LogSumExp
    """[N] the chosen logits, over all shards."""

    tokens: LabelTerm | None

    rests: torch.Tensor | None = None
    """``ChainLogits.rests`` of the student, where a kernel made them."""

    def finite_rest(self) -> LogSumExp:
        """``rest`` with 0 where no column has mass, since -inf - -inf is NaN."""
        gone = self.rest.log_sum == -torch.inf
        return LogSumExp(self.rest.peak, self.rest.log_sum.masked_fill(gone, 0.0))

    def chosen(self) -> torch.Tensor:
        """[N] gradients of the chosen logits, those of their labels' cross-entropy included."""
        if self.tokens is None:
            return self.grads.chosen
        row = self.split.chosen.at_rows()
        whole, weight = self.tokens.whole, self.tokens.weight[row]
        log_prob = (self.picked.peak - whole.peak[row]) + self.picked.log_sum - whole.log_sum[row]
        hit = self.split.chosen.column == self.tokens.label[row]
        grad = (log_prob.exp() - hit.to(log_prob.dtype)) * weight
        return self.grads.chosen + grad.masked_fill_(weight == 0, 0.0)


def write_other_rows_(
    gradient: torch.Tensor, logits: torch.Tensor, chains: ChainGradient, shard: VocabShard
) -> None:
    """Write all rows of ``gradient`` [T, Vp] but those of singles; waits for the device."""
    chosen, value = chains.split.chosen, chains.chosen()
    rest = chains.finite_rest()
    group = chains.split.chains()
    for part in group.slices(shard.width):
        others = _scaled(logits, group, part, shard, chosen.mask(part, shard.width))
        weight = chains.grads.rest[part, None]
        grad = rest.normalise_(others, part).exp_().mul_(weight).masked_fill_(weight == 0, 0.0)
        if chains.tokens is not None:
            scaled = _scaled(logits, group, part, shard, None)
            token = chains.tokens.gradient(scaled, group.rows[part])
            grad.add_(token.masked_fill_(chosen.mask(part, shard.width), 0.0))
        entries = chosen.entries(part)
        column = chosen.local[entries]
        here = column >= 0
        place = (chosen.place[entries] - part.start)[here]
        grad[place, column[here]] = value[entries][here].to(grad.dtype)
        gradient[group.rows[part]] = grad.to(gradient.dtype)
    unused = chains.split.unused()
    if chains.tokens is None:
        gradient[unused.rows] = 0.0
        return
    for part in unused.slices(shard.width):
        scaled = _scaled(logits, unused, part, shard, None)
        token = chains.tokens.gradient(scaled, unused.rows[part])
        gradient[unused.rows[part]] = token.to(gradient.dtype)


def _scaled(
    logits: torch.Tensor,
    group: RowGroup,
    part: slice,
    shard: VocabShard,
    hidden: torch.Tensor | None,
) -> torch.Tensor:
    """Logits [R', Vp] of some rows in the accumulation dtype, -inf in padding and ``hidden``."""
    padding = shard.excluded_columns(logits.device)
    scaled = scaled_logits(logits[group.rows[part]], 1.0, padding)
    return scaled if hidden is None else scaled.masked_fill_(hidden, -torch.inf)


def write_other_rows_by_kernel_(
    gradient: torch.Tensor, logits: torch.Tensor, chains: ChainGradient, shard: VocabShard
) -> None:
    """``write_other_rows_`` by kernels."""
    chosen, tokens, rests = chains.split.chosen, chains.tokens, chains.rests
    assert rests is not None
    if len(logits):
        value = chain_gradients(chains.grads, chains.picked, chosen, tokens, rests)
        entries = ColumnValues(chosen.at_rows(), chosen.local, value)
        of_row = chains.split.of_row
        write_split_rows_(gradient, logits, of_row, rests, entries, shard, tokens=tokens)


class ColumnValues(NamedTuple):
    """Single numbers [N] of a gradient, each at another place; contiguous."""

    row: torch.Tensor
    """int64"""

    column: torch.Tensor
    """int64, this rank's, negative for those of other ranks."""

    value: torch.Tensor
    """fp32"""


def write_split_rows_(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    of_row: torch.Tensor,
    rests: torch.Tensor,
    chosen: ColumnValues,
    shard: VocabShard,
    *,
    tokens: LabelTerm | None = None,
) -> None:
    """Write rows [T, Vp] by kernels: those that are not chosen in one pass, then the chosen ones.

    Args:
        of_row: int32 [T], 0 for rows that are left as they are.
        rests: fp32 [3, T]: peak and logarithm of the sum over the columns that are not chosen, and
            the derivative of their log-sum-exp; rows at 0 are not read.
    """
    from megatron_ext.ops.partition_kl.triton_kernels import (
        other_rows_kernel,
        store_entries_kernel,
    )

    rows, config = len(logits), fitting_config(ROW_CONFIGS[0], shard.width)
    if not rows:
        return
    other_rows_kernel[(rows,)](
        logits,
        of_row,
        rests,
        None if tokens is None else tokens.column,
        None if tokens is None else token_numbers(tokens),
        gradient,
        logits.stride(0),
        gradient.stride(0),
        shard.valid_width,
        shard.width,
        rows,
        HAS_LABELS=tokens is not None,
        BLOCK=config.block,
        num_warps=config.num_warps,
    )
    count, block = len(chosen.value), 256
    if count:
        store_entries_kernel[(-(-count // block),)](
            gradient,
            *chosen,
            gradient.stride(0),
            count,
            BLOCK=block,
        )
