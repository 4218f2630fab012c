"""Log-probabilities of given tokens and of the rest, and cross-entropy with its gradient.

T rows, K tokens, Vp local columns. Equations are in ``ops/README.md``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    accumulation_dtype,
    merge_log_sum_exp,
    row_slices,
    scaled_logits,
)
from megatron_ext.ops.chunk_rows import ExpSums, local_column, merge_top_columns
from megatron_ext.ops.labels import label_losses, label_rows
from megatron_ext.ops.launch import Implementation, check_implementation, uses_compiled
from megatron_ext.ops.softmax_statistics import row_statistics
from megatron_ext.ops.token_likelihood import RowGradient, write_token_gradient
from megatron_ext.ops.unit_gradient import kept_gradient


class CrossEntropy(NamedTuple):
    """Cross-entropy of each row [T], replicated over the group."""

    row_loss: torch.Tensor
    """-log p(label) in nats, fp32 (fp64 for fp64 logits); 0 where there is no label or the row has
    the scale 0, NaN for a label beyond the vocabulary."""

    top_column: torch.Tensor
    """int64: global column of the largest logit, the first of equals."""

    log_sum: torch.Tensor
    """Logarithm of the row's sum, NaN where a row that is read has NaN or +inf."""


def evaluate_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    grad_scale: torch.Tensor | float = 1.0,
    gradient: torch.Tensor | None = None,
    implementation: Implementation = "auto",
) -> CrossEntropy:
    """Compute the cross-entropy of each row, and write its gradient into the caller's memory.

    Args:
        logits: [T, Vp], any float dtype, contiguous in its columns.
        labels: int64 [T]; a negative one is none.
        grad_scale: [T], the gradient that each ``row_loss`` will get, or that of all. Rows without
            a label or at 0 are not read.
        gradient: [T, Vp] of the logits' dtype, or the logits themselves; d(grad_scale . row_loss) /
            d logits is written to it, with exactly 0 in rows that are not read and in padding.

    Collectives: two all-reduces of [2 T] and one of [T], 24 T bytes in fp32 and int64. Bytes of a
    row of Vp logits of b bytes by kernel: b Vp, with a gradient 3 b Vp.
    """
    by, rows = implementation, len(logits)
    peak, total = logits.new_empty(2, 2 * rows, dtype=accumulation_dtype(logits.dtype))
    local, token_sums = ExpSums(peak[:rows], total[:rows]), ExpSums(peak[rows:], total[rows:])
    # The gradient of a log-probability is that of its loss, negated.
    own = label_rows(
        logits, labels, shard, -grad_scale, token_sums, temperature=temperature, implementation=by
    )
    statistics = row_statistics(
        logits, shard, temperature=temperature, read=own.read, into=local, implementation=by
    )
    merged = merge_log_sum_exp(peak, total, shard.group)
    whole, token = (
        LogSumExp(*(part[place] for part in merged))
        for place in (slice(0, rows), slice(rows, None))
    )
    (top_column,) = merge_top_columns([statistics.column], [local], [whole], [shard])
    row_loss = label_losses(token, whole, labels, own.read, shard, implementation=by)
    if gradient is not None:
        arrives = RowGradient(own.column, own.weight, whole)
        write_token_gradient(
            logits.detach(),
            None,
            arrives,
            shard,
            gradient,
            temperature=temperature,
            implementation=implementation,
        )
    return CrossEntropy(row_loss, top_column, whole.log_sum)


class TokenPrediction(NamedTuple):
    """Log-probability of each row's token [T], replicated over the group."""

    log_prob: torch.Tensor
    """log p of the row's token, with a graph."""

    top_column: torch.Tensor
    """int64: global column of the largest logit, the first of equals; arbitrary for a row
    without a token."""


def token_log_prob(
    logits: torch.Tensor,
    token_id: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    grad_scale: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """``log_softmax(logits / temperature)[t, token_id[t]]``, replicated over the group.

    As ``token_prediction``, of which it is the first field: [T] fp32 (fp64 for fp64 logits).
    """
    return token_prediction(
        logits,
        token_id,
        shard,
        temperature=temperature,
        grad_scale=grad_scale,
        in_place=in_place,
        implementation=implementation,
    ).log_prob


def token_prediction(
    logits: torch.Tensor,
    token_id: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    grad_scale: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> TokenPrediction:
    """Log-probabilities of tokens, and the most probable token of each row.

    Args:
        logits: [T, Vp], any float dtype.
        token_id: int64 [T]. A negative id gives 0 without a gradient; an id at or beyond the
            vocabulary gives NaN, since raising an error would have to wait for the device. A row
            without an upstream gradient gets none, whatever it holds.
        grad_scale: [T], the gradient that each log-probability will get; None: 1. Another
            upstream gradient costs a pass over the gradient; but a row of scale 0 has the
            log-probability 0 and never a gradient.
        in_place: Overwrite the logits with their gradient, if they need one.

    Collectives: forward two all-reduces of [2 T] and one of [T], backward none. Keeps the gradient,
    in the logits' dtype, and no logits.

    Raises:
        LossError: The implementation is unknown or cannot run here.
    """
    check_implementation("token_log_prob", implementation)

    def evaluate(
        rows: torch.Tensor, gradient: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = evaluate_cross_entropy(
            rows,
            token_id,
            shard,
            temperature=temperature,
            # The loss is the negative log-probability.
            grad_scale=-1.0 if grad_scale is None else -grad_scale,
            gradient=gradient,
            implementation=implementation,
        )
        return -out.row_loss, out.top_column

    values = kept_gradient(
        logits, evaluate, grad_scale=grad_scale, in_place=in_place, implementation=implementation
    )
    return TokenPrediction(*values)


def token_log_prob_reference(
    logits: torch.Tensor, token_id: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """``log_softmax(logits / temperature)[t, token_id[t]]`` [T], 0 where the id is negative."""
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    picked = log_probs.gather(-1, token_id.clamp(min=0)[:, None])[:, 0]
    return torch.where(token_id >= 0, picked, 0.0)


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


@torch.no_grad()
def evaluate_selected_tokens(
    logits: torch.Tensor,
    token_id: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    implementation: Implementation = "auto",
) -> SelectedTokens:
    """``log_softmax(logits / temperature)`` at ``token_id``, and the logarithm of the rest's mass.

    In fp32, fp64 for fp64 logits. Two all-reduces of [T] and one of [T, K].

    Args:
        logits: [T, Vp], any float dtype; not copied whole.
        token_id: int64 [T, K], global and each once in a row; a negative id is no token. The same
            on every rank.
        implementation: Loops or torch; there is no kernel.
    """
    local = _local_by_loops if uses_compiled(implementation, logits) else _local
    column = local_column(token_id, shard).contiguous()
    picked, peak, total = local(logits.detach(), column, shard, temperature)
    rest = merge_log_sum_exp(peak, total, shard.group)
    picked = all_reduce_sum(picked, shard.group).masked_fill(token_id < 0, -torch.inf)

    entries = torch.cat([picked, (rest.peak + rest.log_sum)[:, None]], dim=-1)
    top = entries.amax(dim=-1)
    top = top.masked_fill(top == -torch.inf, 0.0)
    # Peaks first: the difference of two large numbers is exact, their sums are not.
    of_rest = (rest.peak - top) + rest.log_sum
    entries = torch.cat([picked - top[:, None], of_rest[:, None]], dim=-1)
    log_total = entries.exp().sum(dim=-1).log()
    return SelectedTokens(
        entries - log_total[:, None], column, LogSumExp(top, log_total), LogSumExp(*rest)
    )


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
    by_loops = uses_compiled(implementation, logits, gradient)
    write = _write_by_loops if by_loops else _write_by_torch
    write(logits.detach(), found, on_log_prob, shard, gradient, temperature)


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


def _local_by_loops(
    logits: torch.Tensor, column: torch.Tensor, shard: VocabShard, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``_local``."""
    from megatron_ext.ops import selection_loops as loops
    from megatron_ext.ops.row_loops import flat_rows, in_threads

    picked = torch.empty(column.shape)
    peak, total = torch.empty(2, len(logits))
    rows = flat_rows(logits, shard.valid_width, temperature)
    arguments = rows, column.numpy(), picked.numpy(), peak.numpy(), total.numpy()
    in_threads(lambda a, b: loops.selected_logits(a, b, *arguments), len(logits))
    return picked, peak, total


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's selected logits [T, K], 0 for others; peak and sum [T] of its rest."""
    excluded = shard.excluded_columns(logits.device)
    slices: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for rows in row_slices(*logits.shape, device=logits.device):
        scaled = scaled_logits(logits[rows], temperature, excluded)
        place, here, selected = _selected(column[rows], scaled)
        picked = torch.where(here, scaled.gather(-1, place), 0.0)
        scaled.masked_fill_(selected, -torch.inf)
        peak = scaled.amax(dim=-1)
        peak = peak.masked_fill(peak == -torch.inf, 0.0)
        slices.append((picked, peak, scaled.sub_(peak[:, None]).exp_().sum(dim=-1)))
    if not slices:
        empty = scaled_logits(logits[:, 0], temperature, None)
        return empty.new_zeros(column.shape), empty, empty.clone()
    picked, peak, total = (torch.cat(parts) for parts in zip(*slices, strict=True))
    return picked, peak, total


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
