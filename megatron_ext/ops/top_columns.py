"""Largest columns of rows, ties in the order of columns, and the normaliser of the rows.

T rows, Vp local columns, K columns.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch

from megatron_ext.distributed.shard_collectives import gather_columns, group_size
from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard, row_slices
from megatron_ext.errors import LossError
from megatron_ext.ops.chunk_rows import ChunkRows
from megatron_ext.ops.launch import (
    Implementation,
    check_implementation,
    power_of_two,
    uses_compiled,
    uses_triton,
)
from megatron_ext.ops.model_rows import ModelRows
from megatron_ext.ops.softmax_statistics import row_statistics
from megatron_ext.ops.sort_keys import (
    NO_KEY,
    key_columns,
    key_values,
    pack_pair,
    sort_keys,
    unpack_pair,
)

_HALF_BITS: Final = 16
_NO_COARSE_KEY: Final = torch.iinfo(torch.int32).min
_MOST_CANDIDATES: Final = 1 << 22
"""Candidates of rows that are chosen from at once, some 40 bytes each."""


def top_columns(
    logits: torch.Tensor,
    k: int,
    shard: VocabShard,
    excluded: torch.Tensor | None = None,
    *,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """Global columns of the ``k`` largest logits of each row, of equals the lowest columns.

    Equal logits are common in bf16; the choice among them does not depend on the layout.

    Args:
        logits: [T, Vp], any float dtype, compared in fp32.
        excluded: bool [Vp], columns that are not chosen, padding among them, from
            ``VocabShard.excluded_columns``; None: padding alone.
        implementation: See ``ops.launch``.

    Returns:
        int64 [T, k], the largest first, -1 where fewer are allowed. The same on every rank. One
        all-gather of int64 [T, min(k, Vp)].
    """
    if excluded is None:
        excluded = shard.excluded_columns(logits.device)
    keys = _local_keys(logits, k, shard, excluded, implementation)
    if shard.group is not None:
        everywhere = gather_columns(keys, shard.group)
        keys = everywhere.topk(min(k, everywhere.shape[-1]), dim=-1).values
    if uses_triton(implementation, logits) and len(keys):
        return _columns_by_kernel(keys, k)
    columns = torch.where(keys == NO_KEY, -1, key_columns(keys))
    return torch.nn.functional.pad(columns, (0, k - columns.shape[-1]), value=-1)


class TopLogProbs(NamedTuple):
    """Most probable tokens, the same on every rank, without a graph."""

    token_id: torch.Tensor
    """int64 [T, K]: global columns of the largest logits, of equals the lowest column first."""

    logit: torch.Tensor
    """fp32 [T, K], descending."""

    normaliser: LogSumExp
    """fp32 [T]: of all real columns over all shards, at temperature 1."""

    @property
    def log_prob(self) -> torch.Tensor:
        """fp32 [T, K]"""
        return (self.logit - self.normaliser.peak[:, None]) - self.normaliser.log_sum[:, None]


def top_log_probs(
    logits: torch.Tensor,
    k: int,
    shard: VocabShard,
    *,
    implementation: Implementation = "auto",
) -> TopLogProbs:
    """Most probable ``k`` tokens of each row, and the log-sum-exp of all.

    Equal logits are common in bf16; the choice among them does not depend on the layout.

    Args:
        logits: [T, Vp], any float dtype, compared and summed in fp32; contiguous in its columns.
        k: At most the real vocabulary.
        implementation: As of ``top_columns``.

    Collectives: one all-gather of int64 [T, min(k, Vp) + 1].

    Raises:
        LossError: ``k`` is not between 1 and the vocabulary, or the implementation cannot run.
    """
    check_implementation("top_log_probs", implementation)
    if not 1 <= k <= shard.vocab_size:
        raise LossError(
            "no such number of most probable tokens",
            got=k,
            expected=f"1 to {shard.vocab_size}, the vocabulary",
        )
    logits = logits.detach()
    statistics = row_statistics(logits, shard, with_column=False, implementation=implementation)
    width = min(k, shard.width)
    packed = pack_pair(statistics.peak[0].float(), statistics.total[0].float())
    excluded = shard.excluded_columns(logits.device)
    keys = _local_keys(logits, k, shard, excluded, implementation)
    local = torch.cat([keys, packed[:, None]], dim=-1)
    everywhere = gather_columns(local, shard.group)
    everywhere = everywhere.unflatten(-1, (group_size(shard.group), width + 1))
    keys = everywhere[..., :width].flatten(1).topk(k, dim=-1).values
    peak, total = unpack_pair(everywhere[..., width])
    return TopLogProbs(key_columns(keys), key_values(keys), _merged(peak, total))


def _local_keys(
    logits: torch.Tensor,
    k: int,
    shard: VocabShard,
    excluded: torch.Tensor | None,
    implementation: Implementation = "auto",
) -> torch.Tensor:
    """This rank's largest keys, int64 [T, min(k, Vp)], descending, ``NO_KEY`` where it has fewer
    columns."""
    if shard.valid_width and uses_triton(implementation, logits):
        return _keys_by_kernel(logits, min(k, shard.width), shard, excluded)
    if uses_compiled(implementation, logits):
        return _keys_by_loops(logits, min(k, shard.width), shard, excluded)
    ids = torch.arange(shard.start, shard.stop, device=logits.device)
    width = min(k, shard.width)
    local = torch.empty(len(logits), width, dtype=torch.int64, device=logits.device)
    is_coarse = logits.element_size() == 2
    for rows in row_slices(*logits.shape, device=logits.device):
        values, its_ids, left_out = logits[rows], ids, excluded
        if is_coarse:
            columns = _near_largest(values, width, excluded)
            values, its_ids = values.gather(-1, columns), ids[columns]
            left_out = None if excluded is None else excluded[columns]
        keys = sort_keys(values, its_ids)
        if left_out is not None:
            keys.masked_fill_(left_out, NO_KEY)
        local[rows] = keys.topk(width, dim=-1).values
    return local


def _near_largest(values: torch.Tensor, count: int, excluded: torch.Tensor | None) -> torch.Tensor:
    """Columns int64 [T, count + n - 1] in any order, the largest ``count`` of ``sort_keys`` among
    them.

    By keys int32 of a value of 16 bits and a group of n columns: on a GPU torch reads all keys once
    for every few of their bits.

    Args:
        values: [T, V] in a dtype of two bytes; n is V over 2^16, rounded up.
        excluded: bool [V], columns that come last.
    """
    bits = values.detach().contiguous().view(torch.int16)
    # -0.0 is 0.
    bits = bits.masked_fill(bits == torch.iinfo(torch.int16).min, 0)
    ordered = bits.bitwise_xor_((bits >> 15).bitwise_and_(0x7FFF)).to(torch.int32)
    width = values.shape[1]
    neighbours = max(1, -(-width >> _HALF_BITS))
    group = torch.arange(width, dtype=torch.int32, device=values.device) // neighbours
    keys = ordered.bitwise_left_shift_(_HALF_BITS).bitwise_or_((1 << _HALF_BITS) - 1 - group)
    if excluded is not None:
        keys.masked_fill_(excluded, _NO_COARSE_KEY)
    # Of those that share a key with the last one, all are there.
    count = min(count + neighbours - 1, width)
    return keys.topk(count, dim=-1, sorted=False).indices


def _keys_by_loops(
    logits: torch.Tensor, count: int, shard: VocabShard, excluded: torch.Tensor | None
) -> torch.Tensor:
    from megatron_ext.ops import selection_loops as loops
    from megatron_ext.ops.row_loops import flat_rows, in_threads

    keys = torch.full((len(logits), count), NO_KEY)
    chosen = np.arange(shard.width) if excluded is None else np.flatnonzero(~excluded.numpy())
    arguments = flat_rows(logits), chosen.astype(np.int32), shard.start, keys.numpy()
    in_threads(lambda a, b: loops.largest_logits(a, b, *arguments), len(logits))
    return keys


def _keys_by_kernel(
    logits: torch.Tensor, count: int, shard: VocabShard, excluded: torch.Tensor | None
) -> torch.Tensor:
    """``_local_keys`` by the selection of sorted L1, whose candidates alone get keys."""
    from megatron_ext.ops.sorted_l1.kernel_steps import capacity_of, select_by_kernel
    from megatron_ext.ops.sorted_l1.selection_kernel import candidate_keys_kernel

    each = torch.arange(len(logits) + 1, dtype=torch.int32, device=logits.device)
    rows, nothing = ChunkRows(each[:-1], each, each[:-1].long()), logits.new_empty(0)
    no_sums = LogSumExp(nothing, nothing)
    model = ModelRows(logits, rows, shard, 1.0, no_sums, no_sums)
    keys = []
    most = max(1, _MOST_CANDIDATES // capacity_of(count, shard.width))
    for first in range(0, len(logits), most):
        part = slice(first, min(first + most, len(logits)))
        found = select_by_kernel(model, part, count, excluded, by_logit=True)
        own = torch.empty_like(found.columns, dtype=torch.int64)
        candidate_keys_kernel[(len(own),)](
            logits,
            found.values,
            found.columns,
            first,
            logits.stride(0),
            shard.start,
            own.shape[1],
            own,
            BLOCK=power_of_two(own.shape[1]),
        )
        keys.append(own.topk(count, dim=-1).values)
    if not keys:
        return each.new_empty(0, count, dtype=torch.int64)
    return torch.cat(keys) if len(keys) > 1 else keys[0]


def _columns_by_kernel(keys: torch.Tensor, k: int) -> torch.Tensor:
    """Columns int64 [T, k] of keys [T, at most k], -1 for none."""
    from megatron_ext.ops.sorted_l1.selection_kernel import columns_of_keys_kernel

    columns = keys.new_empty(len(keys), k)
    columns_of_keys_kernel[(len(keys),)](
        keys.contiguous(), keys.shape[1], k, columns, BLOCK=power_of_two(k)
    )
    return columns


def _merged(peak: torch.Tensor, total: torch.Tensor) -> LogSumExp:
    """Log-sum-exp [T] from every shard's [T, ranks], the same sums on every rank."""
    # A shard of padding alone has total 0; its peak must not win over negative logits.
    peak = peak.masked_fill(total == 0, -torch.inf)
    top = peak.amax(dim=-1)
    top = top.masked_fill(top == -torch.inf, 0.0)
    return LogSumExp(top, (total * torch.exp(peak - top[:, None])).sum(dim=-1).log_())


def top_log_probs_reference(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns [T, k] of the largest logits, of equals the first, and their log-probabilities."""
    columns = torch.argsort(logits, dim=-1, descending=True, stable=True)[:, :k]
    return columns, torch.log_softmax(logits, dim=-1).gather(-1, columns)
