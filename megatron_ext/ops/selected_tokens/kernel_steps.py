"""Launches of the kernels of selected tokens, at temperature 1.

T rows, K tokens, K' with a label apart, Vp local columns.
"""

from __future__ import annotations

import torch

from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard
from megatron_ext.ops.launch import power_of_two
from megatron_ext.ops.partition_kl.chain_chunks import ColumnValues, write_split_rows_
from megatron_ext.ops.partition_kl.split_statistics import statistics_of_sets
from megatron_ext.ops.selected_tokens.operands import (
    AskedTokens,
    LocalTokens,
    SelectedTokens,
    Upstream,
)


def read_by_kernel(
    logits: torch.Tensor,
    token_id: torch.Tensor,
    labels: torch.Tensor | None,
    shard: VocabShard,
    with_top_column: bool,
) -> tuple[AskedTokens, LocalTokens]:
    from megatron_ext.ops.selected_tokens.triton_kernels import ask_tokens_kernel

    (rows, count), has_labels = token_id.shape, labels is not None
    entries, words = count + has_labels, -(-shard.width // 32)
    asked, column = token_id.new_empty(2, rows, entries)
    place = token_id.new_empty(rows) if has_labels else None
    picked = logits.new_empty(rows, entries, dtype=torch.float32)
    of_row = token_id.new_empty(rows, dtype=torch.int32)
    bits = token_id.new_zeros(1 + rows, words, dtype=torch.int32)
    if rows:
        token_id = token_id.contiguous()
        ask_tokens_kernel[(rows,)](
            logits,
            token_id,
            labels,
            logits.stride(0),
            token_id.stride(0),
            shard.start,
            shard.valid_width,
            shard.vocab_size,
            words,
            count,
            asked,
            column,
            place,
            picked,
            of_row,
            bits,
            HAS_LABELS=has_labels,
            BLOCK=power_of_two(entries),
        )
    found = statistics_of_sets(logits, of_row, bits, shard, for_labels=with_top_column)
    local = LocalTokens(picked, *found.others, found.top_column)
    return AskedTokens(asked, column, place), local


def log_probs_by_kernel(
    picked: torch.Tensor,
    rest: LogSumExp,
    asked: AskedTokens,
    labels: torch.Tensor | None,
    vocab_size: int,
) -> tuple[torch.Tensor, LogSumExp, torch.Tensor | None]:
    from megatron_ext.ops.selected_tokens.triton_kernels import token_log_probs_kernel

    rows, entries = picked.shape
    log_prob, whole = picked.new_empty(rows, entries + 1), picked.new_empty(2, rows)
    loss = None if labels is None else picked.new_empty(rows)
    if rows:
        token_log_probs_kernel[(rows,)](
            picked,
            *rest,
            asked.token_id,
            labels,
            asked.place,
            vocab_size,
            rows,
            entries,
            log_prob,
            whole,
            loss,
            HAS_LABELS=labels is not None,
            BLOCK=power_of_two(entries),
        )
    return log_prob, LogSumExp(whole[0], whole[1]), loss


def write_by_kernel(
    logits: torch.Tensor,
    found: SelectedTokens,
    upstream: Upstream,
    shard: VocabShard,
    gradient: torch.Tensor,
) -> None:
    from megatron_ext.ops.selected_tokens.triton_kernels import token_gradients_kernel

    (rows, entries), scale = found.column.shape, upstream.label_scale
    if not rows:
        return
    row = found.column.new_empty(rows * entries)
    of_row = found.column.new_empty(rows, dtype=torch.int32)
    value = found.rest.peak.new_empty(rows * entries)
    rests = found.rest.peak.new_empty(3, rows)
    token_gradients_kernel[(rows,)](
        found.log_prob,
        upstream.on_log_prob.float().contiguous(),
        *found.rest,
        upstream.labels,
        found.place,
        scale.float() if isinstance(scale, torch.Tensor) else None,
        0.0 if isinstance(scale, torch.Tensor) else scale,
        rows,
        entries,
        row,
        value,
        rests,
        of_row,
        HAS_LABELS=upstream.labels is not None,
        BLOCK=power_of_two(entries + 1),
    )
    chosen = ColumnValues(row, found.column.flatten(), value)
    write_split_rows_(gradient, logits, of_row, rests, chosen, shard)
