"""Log-probabilities of several tokens of a row and of all others together, and their gradient.

T rows, K tokens, Vp local columns, W words of 32 columns. Equations are in ``ops/README.md``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    merge_log_sum_exp,
    row_slices,
    scaled_logits,
)
from megatron_ext.ops.chunk_rows import ExpSums, local_column, merge_top_columns
from megatron_ext.ops.launch import Implementation, uses_compiled, uses_triton
from megatron_ext.ops.partition_kl.chain_chunks import ColumnValues, write_split_rows_
from megatron_ext.ops.partition_kl.split_statistics import member_bits, statistics_of_sets


class SelectedTokens(NamedTuple):
    """Log-probabilities of several tokens of each row, replicated over the group. No graph."""

    log_prob: torch.Tensor
    """[T, K + 1] of the tokens, -inf for none, and of all others together. These are summed from
    their own columns, so that they are exact where the selected ones hold nearly all."""

    column: torch.Tensor
    """int64 [T, K]: this rank's column of each token, -1 where it has none."""

    whole: LogSumExp
    """[T] of ``logits / temperature`` over all columns; the logarithm is NaN where the row has NaN
    or +inf."""

    rest: LogSumExp
    """[T] over the columns that are not selected."""

    top_column: torch.Tensor | None = None
    """int64 [T]: global column of the largest logit, the first of equals, if that is asked for."""


class _LocalTokens(NamedTuple):
    """What this rank has of each row."""

    picked: torch.Tensor
    """[T, K] selected logits over the temperature, 0 for those that it does not have."""

    peak: torch.Tensor
    """[T] of its other columns, 0 where there is none."""

    total: torch.Tensor
    """[T]: sum of ``exp(logit / tau - peak)`` over them."""

    top_column: torch.Tensor | None
    """int64 [T]: this rank's column of the largest logit."""


@torch.no_grad()
def evaluate_selected_tokens(
    logits: torch.Tensor,
    token_id: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    with_top_column: bool = False,
    implementation: Implementation = "auto",
) -> SelectedTokens:
    """``log_softmax(logits / temperature)`` at ``token_id``, and the logarithm of the rest's mass.

    In fp32, fp64 for fp64 logits. Two all-reduces of [T] and one of [T, K], with the top column one
    more of [T].

    Args:
        logits: [T, Vp], any float dtype; not copied whole.
        token_id: int64 [T, K], global and each once in a row; a negative id is no token. The same
            on every rank.
        with_top_column: Compute ``SelectedTokens.top_column``.
        implementation: See ``ops.launch``; kernels at temperature 1, else torch.
    """
    read = _local
    if _uses_kernels(implementation, shard, temperature, logits):
        read = _local_by_kernel
    elif uses_compiled(implementation, logits):
        read = _local_by_loops
    column = local_column(token_id, shard).contiguous()
    local = read(logits.detach(), column, shard, temperature, with_top_column)
    rest = merge_log_sum_exp(local.peak, local.total, shard.group)
    picked = all_reduce_sum(local.picked, shard.group).masked_fill(token_id < 0, -torch.inf)
    top_column = local.top_column
    if top_column is not None and shard.group is not None:
        own, its = local.picked.masked_fill(column < 0, -torch.inf), local.total > 0
        here = ExpSums(_largest(own, local.peak, its), torch.ones_like(local.total))
        whole = LogSumExp(_largest(picked, rest.peak, rest.log_sum != -torch.inf), rest.log_sum)
        (top_column,) = merge_top_columns([top_column], [here], [whole], [shard])

    entries = torch.cat([picked, (rest.peak + rest.log_sum)[:, None]], dim=-1)
    top = entries.amax(dim=-1)
    top = top.masked_fill(top == -torch.inf, 0.0)
    # Peaks first: the difference of two large numbers is exact, their sums are not.
    of_rest = (rest.peak - top) + rest.log_sum
    entries = torch.cat([picked - top[:, None], of_rest[:, None]], dim=-1)
    log_total = entries.exp().sum(dim=-1).log()
    return SelectedTokens(
        entries - log_total[:, None],
        column,
        LogSumExp(top, log_total),
        LogSumExp(*rest),
        top_column,
    )


def _largest(picked: torch.Tensor, peak: torch.Tensor, has_others: torch.Tensor) -> torch.Tensor:
    """The largest [T] of selected logits [T, K], -inf for none, and of the peaks of others."""
    others = peak.masked_fill(~has_others, -torch.inf)
    return torch.cat([picked, others[:, None]], dim=1).amax(dim=1)


@torch.no_grad()
def write_selected_gradient(
    logits: torch.Tensor,
    found: SelectedTokens,
    on_log_prob: torch.Tensor,
    shard: VocabShard,
    gradient: torch.Tensor,
    *,
    temperature: float = 1.0,
    implementation: Implementation = "auto",
) -> None:
    """Write d(on_log_prob . log_prob)/d logits into ``gradient`` [T, Vp], which may be the logits.

    A row that gets no gradient gives exactly 0, whatever it holds. No collectives.

    Args:
        found: Of these logits.
        on_log_prob: [T, K + 1], ignored where a token has no mass.
    """
    log_sum = found.rest.log_sum
    # An empty rest has no columns with mass: any finite number will do.
    rest = LogSumExp(found.rest.peak, log_sum.masked_fill(log_sum == -torch.inf, 0.0))
    found = found._replace(rest=rest)
    on_log_prob = on_log_prob.masked_fill(found.log_prob == -torch.inf, 0.0).div(temperature)
    write = _write_by_torch
    if _uses_kernels(implementation, shard, temperature, logits, gradient):
        write = _write_by_kernel
    elif uses_compiled(implementation, logits, gradient):
        write = _write_by_loops
    write(logits.detach(), found, on_log_prob, shard, gradient, temperature)


def _uses_kernels(
    implementation: Implementation, shard: VocabShard, temperature: float, *tensors: torch.Tensor
) -> bool:
    """Whether kernels, which read logits at temperature 1, read and write these."""
    fits = temperature == 1.0 and shard.valid_width > 0
    return fits and uses_triton(implementation, *tensors)


def _write_by_torch(
    logits: torch.Tensor,
    found: SelectedTokens,
    grad: torch.Tensor,
    shard: VocabShard,
    gradient: torch.Tensor,
    temperature: float,
) -> None:
    total, of_rest = grad.sum(dim=-1, keepdim=True), grad[:, -1:]
    unused = (grad == 0).all(dim=-1, keepdim=True)
    excluded = shard.excluded_columns(logits.device)
    for rows in row_slices(*logits.shape, device=logits.device):
        scaled = scaled_logits(logits[rows], temperature, excluded)
        column, here, selected = _selected(found.column[rows], scaled)
        shares = found.rest.normalise_(scaled.masked_fill(selected, -torch.inf), rows).exp_()
        part = found.whole.normalise_(scaled, rows).exp_().mul_(-total[rows])
        part.add_(shares.mul_(of_rest[rows]))
        part.scatter_add_(-1, column, torch.where(here, grad[rows, :-1], 0.0))
        gradient[rows] = part.masked_fill_(unused[rows], 0.0)


def _write_by_kernel(
    logits: torch.Tensor,
    found: SelectedTokens,
    grad: torch.Tensor,
    shard: VocabShard,
    gradient: torch.Tensor,
    temperature: float,
) -> None:
    rows, count = found.column.shape
    # Of a selected logit, and of the log-sum-exp of the rest.
    of_logits = grad - found.log_prob.exp() * grad.sum(dim=-1, keepdim=True)
    of_logits.masked_fill_((grad == 0).all(dim=-1, keepdim=True), 0.0)
    row = torch.arange(rows, device=logits.device)
    # Of K = 1 flattening alone makes a view with gaps.
    value = of_logits[:, :-1].contiguous().flatten()
    chosen = ColumnValues(row.repeat_interleave(count), found.column.flatten(), value)
    rests = torch.stack([*found.rest, of_logits[:, -1]])
    write_split_rows_(gradient, logits, (row + 1).int(), rests, chosen, shard)


def _local_by_kernel(
    logits: torch.Tensor,
    column: torch.Tensor,
    shard: VocabShard,
    temperature: float,
    with_top_column: bool,
) -> _LocalTokens:
    rows, count = column.shape
    row = torch.arange(rows, device=logits.device)
    place = row.repeat_interleave(count)
    bits = member_bits(place, column.flatten(), rows, -(-shard.width // 32))
    found = statistics_of_sets(logits, (row + 1).int(), bits, shard, for_labels=with_top_column)
    picked = logits.gather(-1, column.clamp(min=0)).float().masked_fill_(column < 0, 0.0)
    return _LocalTokens(picked, *found.others, found.top_column)


def _local_by_loops(
    logits: torch.Tensor,
    column: torch.Tensor,
    shard: VocabShard,
    temperature: float,
    with_top_column: bool,
) -> _LocalTokens:
    from megatron_ext.ops import selection_loops as loops
    from megatron_ext.ops.row_loops import flat_rows, in_threads

    picked = torch.empty(column.shape)
    peak, total = torch.empty(2, len(logits))
    top_column = torch.empty(len(logits) if with_top_column else 0, dtype=torch.int64)
    rows = flat_rows(logits, shard.valid_width, temperature)
    written = (part.numpy() for part in (picked, peak, total, top_column))
    arguments = rows, column.numpy(), *written
    in_threads(lambda a, b: loops.selected_logits(a, b, *arguments), len(logits))
    return _LocalTokens(picked, peak, total, top_column if with_top_column else None)


def _write_by_loops(
    logits: torch.Tensor,
    found: SelectedTokens,
    grad: torch.Tensor,
    shard: VocabShard,
    gradient: torch.Tensor,
    temperature: float,
) -> None:
    from megatron_ext.ops import selection_loops as loops
    from megatron_ext.ops.row_loops import flat_rows, in_threads, normaliser

    arguments = (
        flat_rows(logits, shard.valid_width, temperature),
        found.column.numpy(),
        normaliser(found.whole),
        normaliser(found.rest),
        grad.float().contiguous().numpy(),
        flat_rows(gradient),
    )
    in_threads(lambda a, b: loops.selected_gradient(a, b, *arguments), len(logits))


def _local(
    logits: torch.Tensor,
    column: torch.Tensor,
    shard: VocabShard,
    temperature: float,
    with_top_column: bool,
) -> _LocalTokens:
    excluded = shard.excluded_columns(logits.device)
    slices: list[tuple[torch.Tensor, ...]] = []
    for rows in row_slices(*logits.shape, device=logits.device):
        scaled = scaled_logits(logits[rows], temperature, excluded)
        place, here, selected = _selected(column[rows], scaled)
        picked = torch.where(here, scaled.gather(-1, place), 0.0)
        top_column = [scaled.argmax(dim=-1)] if with_top_column else []
        scaled.masked_fill_(selected, -torch.inf)
        peak = scaled.amax(dim=-1)
        peak = peak.masked_fill(peak == -torch.inf, 0.0)
        total = scaled.sub_(peak[:, None]).exp_().sum(dim=-1)
        slices.append((picked, peak, total, *top_column))
    if not slices:
        empty = scaled_logits(logits[:, 0], temperature, None)
        top = empty.long() if with_top_column else None
        return _LocalTokens(empty.new_zeros(column.shape), empty, empty.clone(), top)
    picked, peak, total, *columns = (torch.cat(parts) for parts in zip(*slices, strict=True))
    return _LocalTokens(picked, peak, total, columns[0] if columns else None)


def _selected(
    column: torch.Tensor, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Columns [T', K] with 0 for none, a mask of the others, and the columns [T', Vp] of these."""
    here = column >= 0
    place = column.clamp(min=0)
    hits = torch.zeros_like(like, dtype=torch.int32)
    return place, here, hits.scatter_add_(-1, place, here.to(torch.int32)) > 0


def selected_log_prob_reference(
    logits: torch.Tensor, token_id: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """Dense reference [T, K + 1] of logits [T, V] and ids [T, K], negative for no token."""
    probs = torch.softmax(logits / temperature, dim=-1)
    is_selected = torch.zeros_like(probs, dtype=torch.bool)
    for row, ids in enumerate(token_id):
        is_selected[row, ids[ids >= 0]] = True
    picked = probs.gather(-1, token_id.clamp(min=0))
    rest = torch.where(is_selected, 0.0, probs).sum(dim=-1, keepdim=True)
    return torch.cat([torch.where(token_id >= 0, picked, 0.0), rest], dim=-1).log()
