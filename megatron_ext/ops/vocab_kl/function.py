"""Divergence of two models over one sharded vocabulary. T rows, Vp local columns.

Equations and memory are in the README; ``reference.py`` says the same in dense torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.row_slices import row_slices
from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    local_argmax,
    local_log_sum_exp,
    merge_argmax,
    merge_log_sum_exp,
    scaled_logits,
)
from megatron_ext.ops.divergence import Divergence, divergence_terms


class VocabKL(NamedTuple):
    """What is known of each row [T], replicated over the group; ``row_loss`` has a graph."""

    row_loss: torch.Tensor
    """tau^2 D."""

    teacher_entropy: torch.Tensor
    """Entropy of the teacher in nats, at tau."""

    top1_agreement: torch.Tensor
    """bool: both have the same largest logit."""


def vocab_kl(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
    temperature: float = 1.0,
    direction: Divergence = "forward",
    mixture: float = 0.5,
) -> VocabKL:
    """``tau^2 * D(softmax(y / tau) || softmax(z / tau))`` of each row; D as in ``ops/divergence``.

    Args:
        student_logits: [T, Vp] z, any float dtype; the only argument with a gradient.
        teacher_logits: [T, Vpt] y, any float dtype.
        student_shard: This rank's columns.
        teacher_shard: The same real columns; padding can differ.

    A row whose ``row_loss`` gets no gradient gives none, whatever it holds. Everything is
    accumulated in fp32 (fp64 for fp64 logits of the student). Collectives: forward four all-reduces
    of [2, T] and one of [3, T], backward none. Keeps both models' logits and five vectors [T].
    """
    outputs = _VocabKL.apply(
        student_logits,
        teacher_logits.detach(),
        student_shard,
        teacher_shard,
        (temperature, direction, mixture),
    )
    return VocabKL(*outputs)


class _VocabKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_logits: torch.Tensor,
        teacher_logits: torch.Tensor,
        student_shard: VocabShard,
        teacher_shard: VocabShard,
        options: tuple[float, Divergence, float],
    ) -> tuple[torch.Tensor, ...]:
        sides = _Sides((student_logits, teacher_logits), (student_shard, teacher_shard), options[0])
        lse = sides.log_sum_exp()
        sums = lse[0].peak.new_empty(3, student_logits.shape[0])
        for rows in row_slices(*student_logits.shape, device=student_logits.device):
            log_q, log_p = sides.log_probs(lse, rows)
            value, slope = _terms(log_p, log_q, *options[1:])
            sums[0, rows], sums[1, rows] = value.sum(dim=-1), slope.sum(dim=-1)
            p = log_p.exp()
            sums[2, rows] = -(p * log_p.masked_fill_(p == 0, 0.0)).sum(dim=-1)
        value, centre, entropy = all_reduce_sum(sums, student_shard.group)
        local = [local_argmax(z, s) for z, s in zip(sides.logits, sides.shards, strict=True)]
        best, column = (torch.stack(part) for part in zip(*local, strict=True))
        student_top, teacher_top = merge_argmax(best, column, student_shard.group)

        ctx.save_for_backward(student_logits, teacher_logits, *lse[0], *lse[1], centre)
        ctx.shards, ctx.options = sides.shards, options
        outputs = (options[0] ** 2 * value, entropy, student_top == teacher_top)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        student, teacher, *vectors, centre = ctx.saved_tensors
        lse = (LogSumExp(*vectors[:2]), LogSumExp(*vectors[2:]))
        temperature, *divergence = ctx.options
        sides = _Sides((student, teacher), ctx.shards, temperature)
        # tau^2 of the loss over the tau that divides the logits.
        scale = (grad * temperature)[:, None]
        out = torch.empty_like(student)
        for rows in row_slices(*student.shape, device=student.device):
            log_q, log_p = sides.log_probs(lse, rows)
            slope = _terms(log_p, log_q, *divergence)[1]
            part = slope.sub_(log_q.exp_().mul_(centre[rows, None])).mul_(scale[rows])
            out[rows] = part.masked_fill_(scale[rows] == 0, 0.0)
        return out, None, None, None, None


class _Sides(NamedTuple):
    """Student and teacher, in this order."""

    logits: tuple[torch.Tensor, torch.Tensor]
    shards: tuple[VocabShard, VocabShard]
    temperature: float

    def log_sum_exp(self) -> tuple[LogSumExp, LogSumExp]:
        """Of both over all shards; two all-reduces of [2, T]."""
        local = [
            local_log_sum_exp(logits, self.temperature, shard.excluded_columns(logits.device))
            for logits, shard in zip(self.logits, self.shards, strict=True)
        ]
        peaks, totals = (torch.stack(parts) for parts in zip(*local, strict=True))
        peak, log_sum = merge_log_sum_exp(peaks, totals, self.shards[0].group)
        return LogSumExp(peak[0], log_sum[0]), LogSumExp(peak[1], log_sum[1])

    def log_probs(self, lse: tuple[LogSumExp, LogSumExp], rows: slice) -> list[torch.Tensor]:
        """Log-probabilities of these rows, both of the student's width and dtype."""
        found = []
        for side, (logits, shard) in enumerate(zip(self.logits, self.shards, strict=True)):
            excluded = shard.excluded_columns(logits.device)
            scaled = scaled_logits(logits[rows], self.temperature, excluded).to(lse[0].peak.dtype)
            fitted = _of_width(scaled, self.shards[0].width)
            found.append(lse[side].normalise_(fitted, rows))
        return found


def _terms(
    log_p: torch.Tensor, log_q: torch.Tensor, direction: Divergence, mixture: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Terms of the value and of the slope, up to a multiple of Q, which (3) takes out again."""
    value, slope = divergence_terms(log_p, log_q, direction, mixture)
    # What is left out is Q itself: its cancelling would cost digits.
    return value, value.clone() if direction == "reverse" else slope


def _of_width(scaled: torch.Tensor, width: int) -> torch.Tensor:
    """``scaled`` with more or fewer columns of padding, which are -inf."""
    missing = width - scaled.shape[-1]
    return torch.nn.functional.pad(scaled, (0, missing), value=-torch.inf) if missing else scaled
