"""Log-probabilities of several tokens of a row and of all others together, and their gradient.

T rows, K tokens, K' with a label apart, Vp local columns. Equations are in the README.
"""

from __future__ import annotations

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    merge_log_sum_exp,
    row_slices,
    scaled_logits,
)
from megatron_ext.ops.chunk_rows import ExpSums, merge_top_columns
from megatron_ext.ops.launch import Implementation, uses_compiled, uses_triton
from megatron_ext.ops.selected_tokens.kernel_steps import (
    log_probs_by_kernel,
    read_by_kernel,
    write_by_kernel,
)
from megatron_ext.ops.selected_tokens.operands import (
    AskedTokens,
    LocalTokens,
    SelectedTokens,
    Upstream,
)


@torch.no_grad()
def evaluate_selected_tokens(
    logits: torch.Tensor,
    token_id: torch.Tensor,
    shard: VocabShard,
    *,
    labels: torch.Tensor | None = None,
    temperature: float = 1.0,
    with_top_column: bool = False,
    implementation: Implementation = "auto",
) -> SelectedTokens:
    """``log_softmax(logits / temperature)`` at ``token_id``, and the logarithm of the rest's mass.

    In fp32, fp64 for fp64 logits. Two all-reduces of [T] and one of [T, K'], with the top column
    one more of [T]. By kernel five launches.

    Args:
        logits: [T, Vp], any float dtype; not copied whole.
        token_id: int64 [T, K], global and each once in a row; a negative id is no token. The same
            on every rank.
        labels: int64 [T], negative for none: their cross-entropy is evaluated, too, at this
            temperature.
        with_top_column: Compute ``SelectedTokens.top_column``.
        implementation: See ``ops.launch``; kernels at temperature 1, else torch.
    """
    if labels is not None:
        labels = labels.contiguous()
    # A rank of padding alone has nothing to read, and the same numbers as the others.
    by_kernel = temperature == 1.0 and uses_triton(implementation, logits)
    if by_kernel and shard.valid_width:
        asked, local = read_by_kernel(logits.detach(), token_id, labels, shard, with_top_column)
    else:
        asked = AskedTokens.of(token_id, labels, shard)
        read = _local_by_loops if uses_compiled(implementation, logits) else _local
        local = read(logits.detach(), asked.column, shard, temperature, with_top_column)
    rest = merge_log_sum_exp(local.peak, local.total, shard.group)
    picked = all_reduce_sum(local.picked, shard.group)
    top_column = local.top_column
    if top_column is not None and shard.group is not None:
        own, its = local.picked.masked_fill(asked.column < 0, -torch.inf), local.total > 0
        here = ExpSums(_largest(own, local.peak, its), torch.ones_like(local.total))
        everywhere = picked.masked_fill(asked.token_id < 0, -torch.inf)
        has_others = rest.log_sum != -torch.inf
        whole = LogSumExp(_largest(everywhere, rest.peak, has_others), rest.log_sum)
        (top_column,) = merge_top_columns([top_column], [here], [whole], [shard])
    numbers = log_probs_by_kernel if by_kernel else _log_probs
    log_prob, whole, loss = numbers(picked, rest, asked, labels, shard.vocab_size)
    return SelectedTokens(log_prob, asked.column, whole, rest, asked.place, loss, top_column)


def _log_probs(
    picked: torch.Tensor,
    rest: LogSumExp,
    asked: AskedTokens,
    labels: torch.Tensor | None,
    vocab_size: int,
) -> tuple[torch.Tensor, LogSumExp, torch.Tensor | None]:
    """``log_prob``, ``whole`` and ``token_loss`` of merged logits [T, K'] and the rest's sum."""
    picked = picked.masked_fill(asked.token_id < 0, -torch.inf)
    entries = torch.cat([picked, (rest.peak + rest.log_sum)[:, None]], dim=-1)
    top = entries.amax(dim=-1)
    top = top.masked_fill(top == -torch.inf, 0.0)
    # Peaks first: the difference of two large numbers is exact, their sums are not.
    of_rest = (rest.peak - top) + rest.log_sum
    entries = torch.cat([picked - top[:, None], of_rest[:, None]], dim=-1)
    log_total = entries.exp().sum(dim=-1).log()
    log_prob, whole = entries - log_total[:, None], LogSumExp(top, log_total)
    if labels is None or asked.place is None:
        return log_prob, whole, None
    loss = -log_prob.gather(1, asked.place[:, None])[:, 0]
    loss = loss.masked_fill(labels < 0, 0.0).masked_fill(labels >= vocab_size, torch.nan)
    return log_prob, whole, loss


def _largest(picked: torch.Tensor, peak: torch.Tensor, has_others: torch.Tensor) -> torch.Tensor:
    """The largest [T] of selected logits [T, K'], -inf for none, and of the peaks of others."""
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
    labels: torch.Tensor | None = None,
    label_scale: torch.Tensor | float = 1.0,
    temperature: float = 1.0,
    implementation: Implementation = "auto",
) -> None:
    """Write d(on_log_prob . log_prob + label_scale * sum token_loss)/d logits into ``gradient``.

    A row that gets no gradient gives exactly 0, whatever it holds. No collectives. By kernel three
    launches.

    Args:
        found: Of these logits and labels.
        on_log_prob: [T, K' + 1], ignored where a token has no mass.
        gradient: [T, Vp], which may be the logits.
        label_scale: Upstream gradient of each cross-entropy: a number or a scalar.
    """
    if labels is not None:
        labels = labels.contiguous()
    upstream = Upstream(on_log_prob, labels, label_scale)
    if _uses_kernels(implementation, shard, temperature, logits, gradient):
        write_by_kernel(logits.detach(), found, upstream, shard, gradient)
        return
    log_sum = found.rest.log_sum
    # An empty rest has no columns with mass: any finite number will do.
    rest = LogSumExp(found.rest.peak, log_sum.masked_fill(log_sum == -torch.inf, 0.0))
    on_tokens = upstream.with_labels(found).div(temperature)
    write = _write_by_loops if uses_compiled(implementation, logits, gradient) else _write_by_torch
    write(logits.detach(), found._replace(rest=rest), on_tokens, shard, gradient, temperature)


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


def _local_by_loops(
    logits: torch.Tensor,
    column: torch.Tensor,
    shard: VocabShard,
    temperature: float,
    with_top_column: bool,
) -> LocalTokens:
    from megatron_ext.ops import selection_loops as loops
    from megatron_ext.ops.row_loops import flat_rows, in_threads

    picked = torch.empty(column.shape, dtype=torch.float32)
    peak, total = torch.empty(2, len(logits), dtype=torch.float32)
    top_column = torch.empty(len(logits) if with_top_column else 0, dtype=torch.int64)
    rows = flat_rows(logits, shard.valid_width, temperature)
    written = (part.numpy() for part in (picked, peak, total, top_column))
    arguments = rows, column.numpy(), *written
    in_threads(lambda a, b: loops.selected_logits(a, b, *arguments), len(logits))
    return LocalTokens(picked, peak, total, top_column if with_top_column else None)


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
) -> LocalTokens:
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
        return LocalTokens(empty.new_zeros(column.shape), empty, empty.clone(), top)
    picked, peak, total, *columns = (torch.cat(parts) for parts in zip(*slices, strict=True))
    return LocalTokens(picked, peak, total, columns[0] if columns else None)


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
