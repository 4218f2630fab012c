"""Numbers of rows, of single chunks and of chains that kernels make.

T rows, C chunks of one token a side, N chosen columns, R rows of chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard
from megatron_ext.ops.chunk_rows import ExpSums
from megatron_ext.ops.labels import LabelTerm
from megatron_ext.ops.launch import Implementation, small_block, uses_triton
from megatron_ext.ops.partition_kl.chain_masses import ChosenColumns
from megatron_ext.ops.partition_kl.operands import (
    ChainRows,
    Chains,
    EventComparison,
    PartitionPlan,
)
from megatron_ext.ops.partition_kl.shared_columns import ColumnSet
from megatron_ext.ops.partition_kl.split_statistics import RowSplit

_BLOCK: Final = 256
_EVENTS: Final = 128
"""Chosen columns of a row that a program holds at once."""


class SideSums(NamedTuple):
    """Merged sums of one model's rows, and this rank's column of each row's largest member."""

    members: LogSumExp
    """[T] at the temperature."""

    others: LogSumExp
    """[T] at temperature 1."""

    column: torch.Tensor
    """int64 [T]"""


class SingleNorms(NamedTuple):
    """Numbers of chunks of one token a side."""

    numbers: torch.Tensor
    """fp32 [14, C]: the student's peak and log-sum-exp over its events, the teacher's; peak and sum
    of the student's rest, its probability and its logarithm, and the logarithm of the most probable
    shared token; then these five of the teacher."""

    columns: torch.Tensor
    """int64 [2, C]: this rank's largest shared column of both rows."""

    def cut(self, part: slice) -> torch.Tensor:
        """The numbers of some chunks, contiguous."""
        return self.numbers[:, part].contiguous()


def single_norms(student: SideSums, teacher: SideSums, plan: PartitionPlan) -> SingleNorms:
    """Normalisers of the chunks' rows; one launch."""
    from megatron_ext.ops.partition_kl.number_kernels import single_norms_kernel

    count = len(plan.singles.student)
    numbers = student.members.peak.new_empty(14, count)
    columns = student.column.new_empty(2, count)
    if count:
        block = small_block(count, _BLOCK)
        single_norms_kernel[(-(-count // block),)](
            *student.members,
            *student.others,
            *teacher.members,
            *teacher.others,
            *plan.singles,
            student.column,
            teacher.column,
            count,
            plan.options.temperature,
            numbers,
            columns,
            BLOCK=block,
        )
    return SingleNorms(numbers, columns)


def single_agreement(
    norms: SingleNorms, student: torch.Tensor, teacher: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """bool [C]: chunks with the same most probable event in both models; one launch.

    Args:
        student: int64 [C]: global column of the largest shared token.
        teacher: int64 [C]: likewise.
        tokens: int64 [Vt]: the student's token of each of the teacher's, negative for none.
    """
    from megatron_ext.ops.partition_kl.number_kernels import single_agreement_kernel

    count = len(student)
    agreement = torch.empty_like(student, dtype=torch.bool)
    if count:
        block = small_block(count, _BLOCK)
        single_agreement_kernel[(-(-count // block),)](
            norms.numbers, student, teacher, tokens, len(tokens), count, agreement, BLOCK=block
        )
    return agreement


def rest_terms_by_kernel(
    norms: torch.Tensor,
    summed: torch.Tensor,
    grad_scale: torch.Tensor | None,
    plan: PartitionPlan,
    *,
    is_lost: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rest_terms`` of some chunks from their ``SingleNorms.cut``; one launch.

    Args:
        summed: [C'] sum of the slopes of the shared tokens, or the teacher's mass on those that the
            student masks, if it ``is_lost``.
    """
    from megatron_ext.ops.partition_kl.number_kernels import rest_terms_kernel

    count = norms.shape[1]
    value, factors = norms.new_empty(count), norms.new_empty(3, count)
    if count:
        block = small_block(count, _BLOCK)
        rest_terms_kernel[(-(-count // block),)](
            norms,
            summed.contiguous(),
            None if grad_scale is None else grad_scale.float().contiguous(),
            count,
            plan.options.temperature,
            plan.options.mixture,
            value,
            factors,
            DIRECTION=plan.options.direction,
            IS_LOST=is_lost,
            BLOCK=block,
        )
    return value, factors


def whole_rows(members: LogSumExp, others: LogSumExp, weight: torch.Tensor) -> torch.Tensor:
    """fp32 [3, T]: log-sum-exp of rows over members and others, both at temperature 1, and the
    weights of their labels; one launch."""
    from megatron_ext.ops.partition_kl.number_kernels import whole_rows_kernel

    rows = len(weight)
    numbers = members.peak.new_empty(3, rows)
    if rows:
        block = small_block(rows, _BLOCK)
        whole_rows_kernel[(-(-rows // block),)](
            *members, *others, weight, rows, numbers, BLOCK=block
        )
    return numbers


def values_by_chunk(
    parts: Sequence[EventComparison],
    counted: torch.Tensor,
    place: torch.Tensor,
    factor: torch.Tensor | float,
    *,
    implementation: Implementation = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of chunks from those of singles and chains; by kernel one launch. No graph.

    Args:
        parts: Of C singles and of H chains.
        counted: bool [H]: chains that are compared.
        place: int32 [N]: place of each chunk among the singles and then the chains, -1 for none.
        factor: [N] of the divergences, or that of all.

    Returns:
        [4, N]: divergences by their factors, rests of student and teacher, agreement; 0 of a chunk
        without a place. And bool [N]: chunks that are compared.
    """
    if parts[0].divergence.dtype != torch.float32 or not uses_triton(implementation, *parts[0][:1]):
        joined = [torch.cat(pair) for pair in zip(*parts, strict=True)]
        # What has the place -1 takes what is behind the last.
        events = torch.nn.functional.pad(torch.stack([x.to(joined[0]) for x in joined]), (0, 1))
        compared = torch.cat([torch.ones_like(parts[0].agreement), counted, counted.new_zeros(1)])
        values = events[:, place.long()]
        values[0] *= factor
        return values, compared[place.long()]
    from megatron_ext.ops.partition_kl.number_kernels import values_by_chunk_kernel

    singles, chunks = len(parts[0].divergence), len(place)
    values = parts[0].divergence.new_empty(4, chunks)
    usable = torch.empty(chunks, dtype=torch.bool, device=place.device)
    is_own = isinstance(factor, torch.Tensor)
    if chunks:
        block = small_block(chunks, _BLOCK)
        values_by_chunk_kernel[(-(-chunks // block),)](
            *(column.contiguous() for part in parts for column in part),
            counted,
            place,
            factor if is_own else None,
            1.0 if is_own else factor,
            singles,
            chunks,
            values,
            usable,
            BLOCK=block,
        )
    return values, usable


class SplitRows(NamedTuple):
    """One model's rows of a comparison."""

    single_row: torch.Tensor
    """int64 [C]"""

    rows: ChainRows

    chains: Chains

    has_chains: bool
    """False where this model's masses are given."""

    shared: ColumnSet
    shard: VocabShard


def split_by_kernel(
    logits: torch.Tensor, part: SplitRows, read: torch.Tensor | bool
) -> tuple[RowSplit, ExpSums]:
    """``RowSplit.of`` and the logits of the chosen columns as sums [N], in three launches."""
    from megatron_ext.ops.partition_kl.split_kernels import (
        split_begin_kernel,
        split_entries_kernel,
    )

    rows, chains = part.rows, part.chains
    steps, ends, completions = len(rows.step_row), len(rows.last_row), len(rows.completion)
    if not part.has_chains:
        steps = ends = completions = 0
    count, words, singles = len(logits), len(part.shared.words), len(part.single_row)
    new = rows.step_row.new_empty
    of_row = new(count, dtype=torch.int32)
    bits = new(1 + steps + ends, words, dtype=torch.int32).zero_()
    has_mask = isinstance(read, torch.Tensor)
    most = max(count, words)
    if most:
        block = small_block(most, _BLOCK)
        split_begin_kernel[(-(-most // block),)](
            read if has_mask else None,
            0 if has_mask else int(read) - 2,
            part.shared.words,
            count,
            words,
            of_row,
            bits,
            BLOCK=block,
        )
    row = new(steps + ends)
    column, local, place, at_row = (new(steps + completions) for _ in range(4))
    picked = ExpSums(*(logits.new_empty(steps + completions, dtype=torch.float32) for _ in "pt"))
    most = max(steps + ends, steps + completions, singles)
    if most:
        block = small_block(most, _BLOCK)
        split_entries_kernel[(-(-most // block),)](
            logits,
            logits.stride(0),
            rows.step_row,
            rows.last_row,
            rows.step_label,
            rows.completion,
            chains.completion_chain,
            part.single_row,
            part.shard.start,
            part.shard.valid_width,
            steps,
            ends,
            completions,
            singles,
            words,
            of_row,
            bits,
            row,
            column,
            local,
            place,
            at_row,
            *picked,
            BLOCK=block,
        )
    chosen = ChosenColumns(row, column, local, place, (), at_row)
    split = RowSplit(part.single_row, part.shared, chosen, of_row, read is not False, bits)
    return split, picked


class ChainLogits(NamedTuple):
    """One model's logits at the rows of chains, relative to the row."""

    chosen: torch.Tensor
    """[N]"""

    rest: torch.Tensor
    """[R]"""

    rests: torch.Tensor | None
    """fp32 [3, T]: peak and sum of the rest of rows of chains; 0 elsewhere and in the last plane,
    which takes the gradient of ``rest``. None where no gradient is asked for."""


def chain_logits(
    picked: LogSumExp,
    others: LogSumExp,
    columns: ChosenColumns,
    edges: torch.Tensor,
    *,
    with_rests: bool,
) -> ChainLogits:
    """``ChosenLogits.of`` merged logits [N] and sums [T], in one launch, or two ``with_rests``.

    Args:
        edges: int32 [H + 1]: where each chain's completions begin.
    """
    from megatron_ext.ops.partition_kl.split_kernels import chosen_logits_kernel

    count, rows = len(columns.row), len(others.peak)
    new = others.peak.new_empty
    rests = others.peak.new_zeros(3, rows) if with_rests else None
    out = ChainLogits(new(len(columns.column)), new(count), rests)
    if count:
        chosen_logits_kernel[(count,)](
            *picked,
            *others,
            columns.row,
            edges,
            count - (len(edges) - 1),
            rows,
            *out,
            BLOCK=_EVENTS,
            num_warps=1,
        )
    return out


def chain_gradients(
    grads: tuple[torch.Tensor, torch.Tensor],
    picked: LogSumExp,
    columns: ChosenColumns,
    tokens: LabelTerm | None,
    rests: torch.Tensor,
) -> torch.Tensor:
    """Gradients [N] of the chosen logits, those of their labels' cross-entropy included, and those
    of the rests in ``rests``; one launch.

    Args:
        grads: [N] and [R] from the comparison of chains.
        rests: ``ChainLogits.rests`` of the student.
    """
    from megatron_ext.ops.partition_kl.split_kernels import chain_gradients_kernel

    entries, ends, rows = len(columns.column), len(columns.row), rests.shape[1]
    value, most = rests.new_empty(entries), max(entries, ends)
    if most:
        block = small_block(most, _BLOCK)
        chain_gradients_kernel[(-(-most // block),)](
            *grads,
            *picked,
            columns.row,
            columns.at_rows(),
            columns.column,
            None if tokens is None else tokens.label,
            None if tokens is None else tokens.numbers,
            entries,
            ends,
            rows,
            rests,
            value,
            BLOCK=block,
        )
    return value
