"""Launches of the kernels for chunks of one token a side. C chunks, T rows, X columns of others."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import LogSumExp
from megatron_ext.ops.launch import (
    ROW_CONFIGS,
    LaunchConfig,
    chosen_config,
    fitting_config,
    small_block,
)
from megatron_ext.ops.partition_kl.plan import TokenTerm
from megatron_ext.ops.partition_kl.single_chunks import SingleChunks, rest_terms

_TIMED_ROWS: Final = 256
"""Rows that block sizes are timed on: more than a GPU runs at once, and a small copy."""


def single_divergences_by_kernel(
    chunks: SingleChunks, grad_scale: torch.Tensor | None, gradient: torch.Tensor | None
) -> torch.Tensor:
    """``single_divergences`` by kernels.

    Forward, the sum of slopes is -1 but for what the student rules out, so that one pass does with
    both; its all-reduces are one of [C'] for that and one of [2, C'] a slice. The others pass over
    the rows for the sums, reduce them, and once more for the gradient.
    """
    plan = chunks.plan
    group = plan.student_shard.group
    values = torch.empty_like(chunks.student.log_rest)
    for part in chunks.slices():
        evaluation = _SingleEvaluation(chunks, part)
        if plan.options.direction == "forward" and gradient is not None:
            lost = all_reduce_sum(evaluation.lost_mass(), group)
            shared_mass = -torch.expm1(chunks.teacher.log_rest[part]) - lost
            rest_value, factors = rest_terms(chunks, part, -shared_mass, grad_scale)
            sums = all_reduce_sum(evaluation(factors=factors, gradient=gradient, sums=True), group)
        else:
            sums = all_reduce_sum(evaluation(sums=True), group)
            rest_value, factors = rest_terms(chunks, part, sums[1], grad_scale)
            if gradient is not None:
                evaluation(factors=factors, gradient=gradient)
        values[part] = sums[0] + rest_value
    return values


class _SingleEvaluation:
    """The arguments that the passes over a slice of chunks share."""

    def __init__(self, chunks: SingleChunks, part: slice) -> None:
        plan = chunks.plan
        self._chunks = chunks
        self._arrived = chunks.arrived(part)
        self._student_row = plan.singles.student[part].contiguous()
        self._teacher_row = plan.singles.teacher[part].contiguous()
        student, teacher = chunks.student, chunks.teacher
        parts = (*student.events, *teacher.events, *student.rest, student.log_rest.exp())
        self._norms = torch.stack([values[part] for values in parts]).float()
        self._tokens = None if chunks.tokens is None else token_numbers(chunks.tokens)

    def lost_mass(self) -> torch.Tensor:
        """[C'] the teacher's mass on this rank's shared tokens that the student rules out."""
        from megatron_ext.ops.partition_kl.triton_kernels import masked_mass_kernel

        chunks, plan = self._chunks, self._chunks.plan
        count, width = len(self._student_row), plan.student_shard.valid_width
        lost = torch.empty(count, dtype=torch.float32, device=self._norms.device)
        masked_mass_kernel[(count,)](
            chunks.student_logits,
            chunks.teacher_logits,
            self._arrived,
            plan.shared.partner,
            self._student_row,
            self._teacher_row,
            self._norms,
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
            BLOCK=small_block(width, ROW_CONFIGS[0].block),
            num_warps=ROW_CONFIGS[0].num_warps,
        )
        return lost

    def __call__(
        self,
        *,
        factors: torch.Tensor | None = None,
        gradient: torch.Tensor | None = None,
        sums: bool = False,
    ) -> torch.Tensor:
        """Sums [2, C'] of value and slope over this rank's shared columns, if asked for.

        Args:
            factors: [3, C'] of ``rest_terms``, for the gradient.
        """
        out = torch.empty(2, len(self._student_row), dtype=torch.float32, device=self._norms.device)
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
        first = torch.arange(rows, device=self._student_row.device)

        @cache
        def scratch() -> torch.Tensor | None:
            # A gradient of its own: what is written over may be the logits.
            return None if gradient is None else gradient.new_empty(rows, gradient.shape[1])

        return chosen_config(
            key,
            ROW_CONFIGS,
            lambda config: self._launch(config, first, factors, scratch(), out),
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
            self._norms,
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


def token_numbers(tokens: TokenTerm) -> torch.Tensor:
    """fp32 [3, T]: peak and logarithm of the sum of each row, and the weight of its label."""
    whole: LogSumExp = tokens.whole
    return torch.stack([*whole, tokens.weight.to(whole.peak.dtype)]).float()
