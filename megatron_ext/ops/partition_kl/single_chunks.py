"""Chunks of one token a side, over the shared vocabulary and a rest: value and gradient at once.

T rows, Vps Vpt local columns, C chunks, X columns of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import LogSumExp, row_slices, scaled_logits
from megatron_ext.ops.divergence import divergence_terms
from megatron_ext.ops.labels import LabelTerm
from megatron_ext.ops.launch import (
    LANE_CONFIGS,
    LaunchConfig,
    chosen_config,
    fitting_config,
    small_block,
)
from megatron_ext.ops.partition_kl.kernel_numbers import SingleNorms, rest_terms_by_kernel
from megatron_ext.ops.partition_kl.operands import PartitionPlan
from megatron_ext.ops.partition_kl.shared_columns import crossing_logits

if TYPE_CHECKING:
    from megatron_ext.ops.partition_kl.compiled_loops import SingleWork
    from megatron_ext.ops.row_loops import Normaliser


class PartitionNorm(NamedTuple):
    """Normalisers of a row's logits to log-probabilities of its events at the temperature."""

    events: LogSumExp
    """[C] log-sum-exp of the shared tokens' logits and the rest's, each over tau."""

    rest: LogSumExp
    """[C] log-sum-exp of the logits that are not shared, at temperature 1; its ``log_sum`` is 0
    where there is none, so that their difference to it is 0 as well."""

    log_rest: torch.Tensor
    """[C] log-probability of the rest."""

    best: torch.Tensor
    """[C] log-probability of the most probable shared token."""


def partition_norm(shared: LogSumExp, others: LogSumExp, temperature: float) -> PartitionNorm:
    """Build from merged statistics [C]: of the shared tokens at tau and of the others at 1."""
    # A set without a column has no peak of its own.
    first = shared.peak.masked_fill(shared.log_sum == -torch.inf, -torch.inf)
    second = others.peak.masked_fill(others.log_sum == -torch.inf, -torch.inf) / temperature
    top = torch.maximum(first, second)
    top = top.masked_fill(top == -torch.inf, 0.0)
    rest = (second - top) + others.log_sum / temperature
    log_total = torch.logaddexp((first - top) + shared.log_sum, rest)
    return PartitionNorm(
        LogSumExp(top, log_total),
        LogSumExp(others.peak, others.log_sum.masked_fill(others.log_sum == -torch.inf, 0.0)),
        rest - log_total,
        (first - top) - log_total,
    )


class SingleChunks(NamedTuple):
    """Both models' logits at the chunks of one token a side."""

    student_logits: torch.Tensor
    teacher_logits: torch.Tensor
    plan: PartitionPlan
    student: PartitionNorm
    teacher: PartitionNorm
    is_masked: torch.Tensor
    """bool [Ts]: rows in which the student masks a shared token of this rank."""

    tokens: LabelTerm | None

    norms: SingleNorms | None = None
    """The two normalisers where a kernel made them."""

    def slices(self, width: int = 0) -> Iterator[slice]:
        """Slices of chunks by the larger of ``width`` and the crossing columns; equal on every
        rank."""
        widest = max(width, self.plan.shared.crossing)
        device = self.student_logits.device
        return row_slices(len(self.plan.singles.student), widest, device=device)

    def arrived(self, part: slice) -> torch.Tensor:
        """Teacher's logits from other ranks, [C', X]; one all-to-all where pairs cross."""
        plan = self.plan
        row = plan.singles.teacher[part]
        return crossing_logits(self.teacher_logits, row, plan.shared, plan.teacher_shard)


def single_divergences(
    chunks: SingleChunks, grad_scale: torch.Tensor | None, gradient: torch.Tensor | None
) -> torch.Tensor:
    """Compute D [C], and write the student's gradient in the rows of these chunks. No graph.

    A slice of chunks costs an all-to-all of the shared tokens that cross ranks, if any, and an
    all-reduce of [2, C'].

    Args:
        grad_scale: [C] upstream gradient of each D; a chunk at 0 gets none. None: 1.
        gradient: [Ts, Vps], or None for the value alone.
    """
    values = torch.empty_like(chunks.student.log_rest)
    for part in chunks.slices(chunks.plan.student_shard.width):
        log_q, log_p = _log_probs(chunks, part)
        plan = chunks.plan
        terms = divergence_terms(log_p, log_q, plan.options.direction, plan.options.mixture)
        sums = torch.stack([terms.value.sum(dim=-1), terms.slope.sum(dim=-1)])
        sums = all_reduce_sum(sums, plan.student_shard.group)
        rest_value, factors = rest_terms(chunks, part, sums[1], grad_scale)
        values[part] = sums[0] + rest_value
        if gradient is not None:
            grad = _gradient(chunks, part, terms.slope, log_q.exp_(), factors)
            gradient[plan.singles.student[part]] = grad.to(gradient.dtype)
    return values


def rest_terms(
    chunks: SingleChunks, part: slice, slope_sum: torch.Tensor, grad_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rest's part of the value [C'], and the gradient's factors [3, C'].

    These are the sum of all slopes, dD / d of the rest's logit at tau, and ``grad_scale`` over tau.

    Args:
        slope_sum: [C'] sum of the slopes of the shared tokens.
    """
    plan = chunks.plan
    log_q = chunks.student.log_rest[part]
    log_p = chunks.teacher.log_rest[part].to(log_q.dtype)
    rest = divergence_terms(log_p, log_q, plan.options.direction, plan.options.mixture)
    total = slope_sum + rest.slope
    weight = torch.ones_like(total) if grad_scale is None else grad_scale[part].to(total.dtype)
    factors = torch.stack(
        [total, rest.slope - log_q.exp() * total, weight / plan.options.temperature]
    )
    return rest.value, factors


def _log_probs(chunks: SingleChunks, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Log Q and log P [C', Vps] on this rank's shared student columns, -inf on the others."""
    plan = chunks.plan
    partner, tau = plan.shared.partner.long(), plan.options.temperature
    teacher_logits = chunks.teacher_logits[plan.singles.teacher[part]]
    moved = teacher_logits.index_select(1, partner.clamp(min=0))
    arrived = chunks.arrived(part)
    if arrived.shape[1]:
        moved = torch.where(partner <= -2, arrived.index_select(1, (-2 - partner).clamp(0)), moved)
    log_p = chunks.teacher.events.normalise_(scaled_logits(moved, tau, partner == -1), part)
    logits = chunks.student_logits[plan.singles.student[part]]
    log_q = chunks.student.events.normalise_(scaled_logits(logits, tau, partner == -1), part)
    return log_q, log_p.to(log_q.dtype)


def _gradient(
    chunks: SingleChunks, part: slice, slope: torch.Tensor, q: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    """Gradient [C', Vps] in the accumulation dtype; overwrites ``slope`` and ``q``."""
    plan = chunks.plan
    slope_sum, rest_slope, weight = factors[:, :, None]
    rows = plan.singles.student[part]
    logits = chunks.student_logits[rows]
    grad = slope.sub_(q.mul_(slope_sum))
    # The rest's logit over tau has the softmax of its own columns, over tau, as derivative.
    excluded = plan.student_shard.excluded_columns(logits.device, ~plan.shared.student.mask)
    others = chunks.student.rest.normalise_(scaled_logits(logits, 1.0, excluded), part).exp_()
    grad.add_(others.mul_(rest_slope))
    grad.mul_(weight).masked_fill_(weight == 0, 0.0)
    if chunks.tokens is not None:
        padding = plan.student_shard.excluded_columns(logits.device)
        grad.add_(chunks.tokens.gradient(scaled_logits(logits, 1.0, padding), rows))
    return grad


def single_divergences_by_loops(
    chunks: SingleChunks, grad_scale: torch.Tensor | None, gradient: torch.Tensor | None
) -> torch.Tensor:
    """``single_divergences`` by compiled loops on a CPU."""
    from megatron_ext.ops.partition_kl import compiled_loops as loops
    from megatron_ext.ops.row_loops import flat_rows, in_threads

    values, group = torch.empty_like(chunks.student.log_rest), chunks.plan.student_shard.group
    for part in chunks.slices():
        work = _single_work(chunks, part)
        count = part.stop - part.start
        sums = torch.zeros(2, count, dtype=torch.float32)
        in_threads(_of_part(loops.single_sums, work, sums.numpy()), count)
        sums = all_reduce_sum(sums, group)
        rest_value, factors = rest_terms(chunks, part, sums[1], grad_scale)
        values[part] = sums[0] + rest_value
        if gradient is not None:
            written = factors.float().contiguous().numpy(), flat_rows(gradient)
            in_threads(_of_part(loops.single_gradients, work, *written), count)
    return values


def _of_part(loop: Callable[..., None], *arguments: object) -> Callable[[int, int], None]:
    return lambda first, stop: loop(first, stop, *arguments)


def _single_work(chunks: SingleChunks, part: slice) -> SingleWork:
    from megatron_ext.ops.divergence_loops import DIRECTIONS
    from megatron_ext.ops.partition_kl.compiled_loops import SingleWork
    from megatron_ext.ops.row_loops import flat_rows, normaliser

    plan, tokens = chunks.plan, chunks.tokens
    tau, width = plan.options.temperature, plan.student_shard.valid_width
    nothing = chunks.student.log_rest[:0].float()

    def of_part(lse: LogSumExp) -> Normaliser:
        return normaliser(LogSumExp(lse.peak[part], lse.log_sum[part]))

    return SingleWork(
        student=flat_rows(chunks.student_logits, width, tau),
        plain=flat_rows(chunks.student_logits, width),
        teacher=flat_rows(chunks.teacher_logits, plan.teacher_shard.valid_width, tau),
        student_row=plan.singles.student[part].numpy(),
        teacher_row=plan.singles.teacher[part].numpy(),
        own=of_part(chunks.student.events),
        other=of_part(chunks.teacher.events),
        rest=of_part(chunks.student.rest),
        partner=plan.shared.partner.int().numpy(),
        arrived=(chunks.arrived(part).float() / tau).numpy(),
        direction=DIRECTIONS[plan.options.direction],
        mixture=np.float32(plan.options.mixture),
        label=(nothing.long() if tokens is None else tokens.column).numpy(),
        label_weight=(nothing if tokens is None else tokens.weight.float()).numpy(),
        whole=normaliser(LogSumExp(nothing, nothing) if tokens is None else tokens.whole),
    )


SINGLE_CONFIGS: Final = LANE_CONFIGS[:2]
"""With 16 warps, the compiler takes more than 64 registers."""

_TIMED_ROWS: Final = 256
"""Number of rows that block sizes are timed on: more than a GPU runs at once, yet few to copy."""


def single_divergences_by_kernel(
    chunks: SingleChunks, grad_scale: torch.Tensor | None, gradient: torch.Tensor | None
) -> torch.Tensor:
    """``single_divergences`` by kernels.

    In the forward KL the sum of slopes is -1 but for tokens that the student masks, so one pass
    gives value and gradient, with all-reduces of [C'] and of [2, C'] a slice. The other divergences
    pass over the rows for the sums, reduce them, and pass again for the gradient.
    """
    plan = chunks.plan
    group = plan.student_shard.group
    values = torch.empty_like(chunks.student.log_rest)
    for part in chunks.slices():
        evaluation = _SingleEvaluation(chunks, part)
        scale = None if grad_scale is None else grad_scale[part]
        rest_terms = partial(rest_terms_by_kernel, evaluation.norms, grad_scale=scale, plan=plan)
        if plan.options.direction == "forward" and gradient is not None:
            lost = all_reduce_sum(evaluation.lost_mass(), group)
            rest_value, factors = rest_terms(summed=lost, is_lost=True)
            sums = all_reduce_sum(evaluation(factors=factors, gradient=gradient, sums=True), group)
        else:
            sums = all_reduce_sum(evaluation(sums=True), group)
            rest_value, factors = rest_terms(summed=sums[1], is_lost=False)
            if gradient is not None:
                evaluation(factors=factors, gradient=gradient)
        torch.add(sums[0], rest_value, out=values[part])
    return values


class _SingleEvaluation:
    """Passes over a slice of chunks, with the arguments that they share."""

    def __init__(self, chunks: SingleChunks, part: slice) -> None:
        plan = chunks.plan
        self._chunks = chunks
        self._arrived = chunks.arrived(part)
        self._student_row = plan.singles.student[part].contiguous()
        self._teacher_row = plan.singles.teacher[part].contiguous()
        assert chunks.norms is not None
        self.norms = chunks.norms.cut(part)
        self._tokens = None if chunks.tokens is None else token_numbers(chunks.tokens)

    def lost_mass(self) -> torch.Tensor:
        """Teacher's mass [C'] on this rank's shared tokens that the student masks."""
        from megatron_ext.ops.partition_kl.triton_kernels import masked_mass_kernel

        chunks, plan = self._chunks, self._chunks.plan
        count, width = len(self._student_row), plan.student_shard.valid_width
        lost = torch.empty(count, dtype=torch.float32, device=self.norms.device)
        masked_mass_kernel[(count,)](
            chunks.student_logits,
            chunks.teacher_logits,
            self._arrived,
            plan.shared.partner,
            self._student_row,
            self._teacher_row,
            self.norms,
            chunks.is_masked,
            lost,
            chunks.student_logits.stride(0),
            chunks.teacher_logits.stride(0),
            self._arrived.shape[1],
            width,
            count,
            plan.options.temperature,
            HAS_TEMPERATURE=plan.options.temperature != 1.0,
            HAS_ARRIVED=self._arrived.shape[1] > 0,
            BLOCK=small_block(width, LANE_CONFIGS[0].block),
            num_warps=LANE_CONFIGS[0].num_warps,
        )
        return lost

    def __call__(
        self,
        *,
        factors: torch.Tensor | None = None,
        gradient: torch.Tensor | None = None,
        sums: bool = False,
    ) -> torch.Tensor:
        """Sums [2, C'] of value and slope over this rank's shared columns, if requested.

        Args:
            factors: [3, C'] of ``rest_terms``, for the gradient.
        """
        out = torch.empty(2, len(self._student_row), dtype=torch.float32, device=self.norms.device)
        if factors is not None:
            factors = factors.float().contiguous()
        config = self._config(factors, gradient, out if sums else None)
        self._launch(config, self._student_row, factors, gradient, out if sums else None)
        return out

    def _config(
        self,
        factors: torch.Tensor | None,
        gradient: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> LaunchConfig:
        chunks, plan = self._chunks, self._chunks.plan
        key = (
            "single_rows",
            chunks.student_logits.dtype,
            chunks.teacher_logits.dtype,
            plan.student_shard.width,
            plan.options.direction,
            plan.options.temperature != 1.0,
            gradient is not None,
            out is not None,
            self._tokens is not None,
            self._arrived.shape[1] > 0,
        )

        rows = min(len(self._student_row), _TIMED_ROWS)

        @cache
        def first() -> torch.Tensor:
            return torch.arange(rows, device=self._student_row.device)

        @cache
        def scratch() -> torch.Tensor | None:
            # A scratch gradient, since the real one may be the logits.
            return None if gradient is None else gradient.new_empty(rows, gradient.shape[1])

        return chosen_config(
            key,
            SINGLE_CONFIGS,
            lambda config: self._launch(config, first(), factors, scratch(), out),
        )

    def _launch(
        self,
        config: LaunchConfig,
        student_row: torch.Tensor,
        factors: torch.Tensor | None,
        gradient: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> None:
        from megatron_ext.ops.partition_kl.triton_kernels import single_rows_kernel

        chunks, plan, tokens = self._chunks, self._chunks.plan, self._chunks.tokens
        width = plan.student_shard.valid_width
        config = fitting_config(config, plan.student_shard.width)
        single_rows_kernel[(len(student_row),)](
            chunks.student_logits,
            chunks.teacher_logits,
            self._arrived,
            plan.shared.partner,
            student_row,
            self._teacher_row,
            self.norms,
            factors,
            None if tokens is None else tokens.column,
            self._tokens,
            out,
            gradient,
            chunks.student_logits.stride(0),
            chunks.teacher_logits.stride(0),
            self._arrived.shape[1],
            0 if gradient is None else gradient.stride(0),
            width,
            plan.student_shard.width,
            len(self._student_row),
            len(chunks.student_logits),
            plan.options.temperature,
            plan.options.mixture,
            DIRECTION=plan.options.direction,
            STORES_SUMS=out is not None,
            STORES_GRADIENT=gradient is not None,
            HAS_LABELS=tokens is not None and gradient is not None,
            HAS_TEMPERATURE=plan.options.temperature != 1.0,
            HAS_ARRIVED=self._arrived.shape[1] > 0,
            BLOCK=config.block,
            num_warps=config.num_warps,
        )


def token_numbers(tokens: LabelTerm) -> torch.Tensor:
    """fp32 [3, T]: peak and logarithm of the sum of each row, and the weight of its label."""
    if tokens.numbers is not None:
        return tokens.numbers
    whole: LogSumExp = tokens.whole
    return torch.stack([*whole, tokens.weight.to(whole.peak.dtype)]).float()
