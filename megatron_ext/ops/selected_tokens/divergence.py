"""Divergence of two models over a few tokens of their rows, chunk by chunk.

C chunks, each of one row a side; T rows, K tokens. Equations are in the README.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.ops.divergence import DivergenceOptions, divergence
from megatron_ext.ops.launch import Implementation, power_of_two, uses_triton
from megatron_ext.ops.selected_tokens.operands import SelectedTokens


class SelectedDivergence(NamedTuple):
    """[C] each."""

    divergence: torch.Tensor
    """With a graph to the student's log-probabilities: by kernel up to a multiple of their
    probabilities, which reaches no logit."""

    rest_mass: torch.Tensor
    """The teacher's mass outside the tokens."""

    agreement: torch.Tensor
    """bool: both models have the same most probable token."""


class SelectedPair(NamedTuple):
    """Both models' log-probabilities of the same tokens."""

    log_prob: torch.Tensor
    """[Ts, K' + 1] of the student, with a graph."""

    found: SelectedTokens
    """Of the student."""

    teacher: torch.Tensor
    """[Tt, K + 1]"""

    student_spans: torch.Tensor
    """int64 [C, 2], the first of which is the student's row of a chunk, each once."""

    teacher_spans: torch.Tensor
    """int64 [C, 2]"""


def selected_divergence(
    pair: SelectedPair,
    options: DivergenceOptions,
    *,
    renormalises: bool,
    implementation: Implementation = "auto",
) -> SelectedDivergence:
    """Divergence over the tokens and the rest, or over the tokens alone if it ``renormalises``.

    No collectives. By kernel one launch, and two in the backward.
    """
    if pair.log_prob.dtype == torch.float32 and uses_triton(implementation, pair.log_prob):
        return SelectedDivergence(*_ByKernel.apply(pair.log_prob, pair, options, renormalises))
    log_q = pair.found.without_label(pair.log_prob)[pair.student_spans[:, 0]]
    log_p = pair.teacher[pair.teacher_spans[:, 0]].to(log_q.dtype)
    rest_mass, named = log_p[:, -1].exp(), slice(0, log_p.shape[1] - 1)
    if renormalises:
        log_p, log_q = _renormalised(log_p[:, :-1]), _renormalised(log_q[:, :-1])
    value = divergence(
        log_p, log_q, options.direction, options.mixture, implementation=implementation
    )
    agreement = log_p[:, named].argmax(dim=-1) == log_q[:, named].argmax(dim=-1)
    return SelectedDivergence(value, rest_mass, agreement)


def _renormalised(log_prob: torch.Tensor) -> torch.Tensor:
    """Renormalised ``log_prob`` [C, K]; uniform, without a gradient, where it has no mass."""
    is_nothing = (log_prob == -torch.inf).all(dim=-1, keepdim=True)
    return torch.log_softmax(log_prob.masked_fill(is_nothing, 0.0), dim=-1)


class _ByKernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        log_prob: torch.Tensor,
        pair: SelectedPair,
        options: DivergenceOptions,
        renormalises: bool,
    ) -> tuple[torch.Tensor, ...]:
        from megatron_ext.ops.selected_tokens.triton_kernels import compare_selected_kernel

        count, tokens = len(pair.student_spans), pair.teacher.shape[1] - 1
        values = log_prob.new_empty(2, count)
        slope = log_prob.new_empty(count, log_prob.shape[1])
        agrees = torch.empty(count, dtype=torch.bool, device=log_prob.device)
        if count:
            compare_selected_kernel[(count,)](
                log_prob.contiguous(),
                pair.teacher.float().contiguous(),
                pair.student_spans,
                pair.teacher_spans,
                count,
                tokens,
                options.mixture,
                values,
                slope,
                agrees,
                HAS_LABEL=pair.found.place is not None,
                RENORMALISES=renormalises,
                DIRECTION=options.direction,
                BLOCK=power_of_two(tokens + 1),
            )
        ctx.save_for_backward(slope, pair.student_spans)
        ctx.rows = len(log_prob)
        divergences, rest_mass = values.unbind()
        ctx.mark_non_differentiable(rest_mass, agrees)
        ctx.set_materialize_grads(False)
        return divergences, rest_mass, agrees

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return (None,) * 4
        from megatron_ext.ops.selected_tokens.triton_kernels import slopes_of_rows_kernel

        slope, spans = ctx.saved_tensors
        count, entries = slope.shape
        on_log_prob = slope.new_zeros(ctx.rows, entries)
        if count:
            slopes_of_rows_kernel[(count,)](
                slope, grad.contiguous(), spans, entries, on_log_prob, BLOCK=power_of_two(entries)
            )
        return on_log_prob, None, None, None


def tokens_of_chunks(
    token_id: torch.Tensor,
    partner: torch.Tensor | None,
    spans: tuple[torch.Tensor, torch.Tensor],
    rows: int,
    *,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """Tokens int64 [T, K] of chunks' teacher rows at their student rows, -1 elsewhere.

    All rows are read later, since gathering the chunks' would copy the logits. By kernel two
    launches.

    Args:
        token_id: int64 [Tt, K], negative for none.
        partner: int64 [Vt]: the student's token of each of the teacher's, negative for none; None:
            ``token_id`` are the student's.
        spans: int64 [C, 2] of student and teacher, whose first are the rows.
        rows: T
    """
    own, its = spans
    out = token_id.new_full((rows, token_id.shape[1]), -1)
    if not uses_triton(implementation, torch.empty(0, device=out.device)):
        ids = token_id[its[:, 0]]
        if partner is not None:
            ids = torch.where(ids >= 0, partner[ids.clamp(min=0)], -1)
        return out.index_copy_(0, own[:, 0], ids)
    from megatron_ext.ops.selected_tokens.triton_kernels import tokens_of_chunks_kernel

    if len(own):
        tokens_of_chunks_kernel[(len(own),)](
            token_id.contiguous(), partner, own, its, out.shape[1], out,
            BLOCK=power_of_two(out.shape[1]),
        )  # fmt: skip
    return out
