"""Softmax, argmax and row exchange over a vocabulary sharded across a tensor-parallel group.

T rows, V columns over all shards, Vp this rank's columns. Gradients follow the convention of
``shard_collectives``. Temporaries as wide as a vocabulary are made a slice of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from megatron_ext.distributed.shard_collectives import (
    all_reduce_max,
    all_reduce_min,
    all_reduce_sum,
    group_size,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SLICE_ELEMENTS: Final = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Elements of one temporary, by device type.

128 MiB in fp32 on a GPU, far above what launching a kernel costs. 4 MiB on a CPU: it stays in the
cache, and the allocator reuses its pages (twice as fast on the losses as 128 MiB).
"""


def row_slices(rows: int, columns: int, *, device: torch.device) -> Iterator[slice]:
    """Cut ``rows`` rows so that each slice holds at most ``SLICE_ELEMENTS`` elements.

    Collectives run once a slice, so ``columns`` must be a width that is equal on every rank:
    ``VocabShard.width``, never ``valid_width``.
    """
    step = max(1, SLICE_ELEMENTS[device.type] // max(columns, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """Columns ``[start, stop)`` of a vocabulary, held by this rank.

    The group's ranks hold equally many columns each, in rank order (megatron-core's layout).
    Columns at or beyond ``vocab_size`` are padding and take no probability mass.
    """

    start: int
    stop: int
    vocab_size: int
    """Number of real tokens, over all shards."""

    group: ProcessGroup | None = None
    """None: one rank holds every column."""

    @property
    def width(self) -> int:
        """Vp, padding included."""
        return self.stop - self.start

    @property
    def valid_width(self) -> int:
        """Columns of this shard that are real tokens."""
        return min(max(self.vocab_size - self.start, 0), self.width)

    def excluded_columns(
        self, device: torch.device, valid: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """bool [Vp]: padding and columns outside ``valid``; None when every column counts."""
        if valid is None and self.valid_width == self.width:
            return None
        excluded = torch.arange(self.width, device=device) >= self.valid_width
        return excluded if valid is None else excluded | ~valid


def leading_columns(mask: torch.Tensor) -> int:
    """Columns before the first that is not in ``mask``, bool [Vp]; waits for the device."""
    outside = (~mask).nonzero()[:, 0]
    return int(outside[0]) if len(outside) else len(mask)


def columns_until_last(mask: torch.Tensor) -> int:
    """Columns up to the last that is in ``mask``, bool [Vp]; waits for the device."""
    inside = mask.nonzero()[:, 0]
    return int(inside[-1]) + 1 if len(inside) else 0


Made = TypeVar("Made")


class MadeOnce(Generic[Made]):
    """What is made of pairs of tokens for two shards, kept as long as the student's tokens live."""

    def __init__(self) -> None:
        self._by_student = WeakIdKeyDictionary()

    def __call__(
        self,
        student: torch.Tensor,
        teacher: torch.Tensor,
        shards: tuple[VocabShard, VocabShard],
        make: Callable[[torch.Tensor, torch.Tensor, VocabShard, VocabShard], Made],
    ) -> Made:
        """``make(student, teacher, *shards)``, or what it made of these tensors before."""
        known = self._by_student.setdefault(student, {})
        key = (id(teacher), *shards)
        if key not in known:
            # Keeps the teacher's tokens alive, so that no other tensor can have their id.
            known[key] = (teacher, make(student, teacher, *shards))
        made: Made = known[key][1]
        return made


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype that logits of ``dtype`` are summed in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scaled_logits(
    logits: torch.Tensor, temperature: float, excluded: torch.Tensor | None
) -> torch.Tensor:
    """New tensor ``logits / temperature`` in the accumulation dtype, -inf where ``excluded``."""
    scaled = logits.detach().to(accumulation_dtype(logits.dtype), copy=True)
    if temperature != 1.0:
        scaled.div_(temperature)
    return scaled if excluded is None else scaled.masked_fill_(excluded, -torch.inf)


class LogSumExp(NamedTuple):
    """``peak + log_sum`` in two tensors of one shape, at least [T].

    Separate since a log-probability of fp32 logits near 1e4 would lose 1e-3 to the sum of the two.
    """

    peak: torch.Tensor
    """Largest logit; 0 in a row that has none."""

    log_sum: torch.Tensor
    """Logarithm of the sum of ``exp(logit - peak)``."""

    def normalise_(self, scaled: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
        """Turn ``scaled`` [T', Vp], logits of these rows, into log-probabilities in place."""
        return scaled.sub_(self.peak[rows, None]).sub_(self.log_sum[rows, None])


def local_log_sum_exp(
    logits: torch.Tensor, temperature: float, excluded: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Peak and sum of ``exp(logit - peak)``, [T] each, of this rank's columns. No collectives."""
    rows, dtype = logits.shape[0], accumulation_dtype(logits.dtype)
    peak, total = torch.empty(2, rows, dtype=dtype, device=logits.device)
    for part in row_slices(*logits.shape, device=logits.device):
        scaled = scaled_logits(logits[part], temperature, excluded)
        peak[part] = finite_peak(scaled.amax(dim=-1))
        total[part] = scaled.sub_(peak[part, None]).exp_().sum(dim=-1)
    return peak, total


def merge_log_sum_exp(
    peak: torch.Tensor, total: torch.Tensor, group: ProcessGroup | None
) -> LogSumExp:
    """Log-sum-exp over all shards from each shard's own, any shape. Two all-reduces."""
    if group is None:
        return LogSumExp(peak, total.log())
    # A shard of padding alone has total 0; its peak must not win over negative logits.
    peak = peak.masked_fill(total == 0, -torch.inf)
    top = finite_peak(all_reduce_max(peak, group))
    return LogSumExp(top, all_reduce_sum(total * torch.exp(peak - top), group).log_())


def finite_peak(peak: torch.Tensor) -> torch.Tensor:
    """``peak`` with 0 where no column is left: -inf - -inf would be NaN."""
    return peak.masked_fill(peak == -torch.inf, 0.0)


def local_argmax(values: torch.Tensor, shard: VocabShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Maximum [T] of this rank's real columns and its global column [T] int64. No collectives.

    A rank of padding alone returns -inf and a column beyond every vocabulary.
    """
    if shard.valid_width:
        best, column = values.detach()[:, : shard.valid_width].max(dim=-1)
        return best, column + shard.start
    best = values.new_full(values.shape[:1], -torch.inf)
    return best, torch.full_like(best, torch.iinfo(torch.int64).max, dtype=torch.int64)


def merge_argmax(
    best: torch.Tensor, column: torch.Tensor, group: ProcessGroup | None
) -> torch.Tensor:
    """Global column of the maximum over shards, the first on a tie. Two all-reduces."""
    if group is None:
        return column
    beaten = best != all_reduce_max(best, group)
    return all_reduce_min(column.masked_fill(beaten, torch.iinfo(torch.int64).max), group)


def vocab_argmax(values: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """Global column [T] int64 of each row's maximum in ``values`` [T, Vp]. Two all-reduces."""
    return merge_argmax(*local_argmax(values, shard), shard.group)


def log_softmax(
    logits: torch.Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's columns of ``torch.log_softmax(logits / temperature, -1)`` over all shards.

    Padding, and columns outside ``valid``, take no mass: they are -inf, and whatever gradient
    arrives for them is dropped, NaN included. ``exp`` of the result is safe everywhere; a product
    with it is not (``0 * -inf``), so weight with ``torch.where`` or ``torch.xlogy``.

    Args:
        logits: [..., Vp], any float dtype.
        valid: bool [Vp], the columns to normalise over; None: all real ones.

    Returns:
        [..., Vp] fp32 (fp64 for fp64 logits), the only tensor kept for backward.
        Forward: two all-reduces of [...]. Backward: one.
    """
    out: torch.Tensor = _LogSoftmax.apply(logits, shard, temperature, valid)
    return out


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        shard: VocabShard,
        temperature: float,
        valid: torch.Tensor | None,
    ) -> torch.Tensor:
        excluded = shard.excluded_columns(logits.device, valid)
        scaled = scaled_logits(logits, temperature, excluded)
        peak = finite_peak(scaled.amax(dim=-1, keepdim=True))
        total = torch.exp(scaled - peak).sum(dim=-1, keepdim=True)
        lse = merge_log_sum_exp(peak, total, shard.group)
        log_probs = scaled.sub_(lse.peak).sub_(lse.log_sum)
        ctx.save_for_backward(log_probs)
        ctx.excluded, ctx.group, ctx.temperature = excluded, shard.group, temperature
        ctx.dtype = logits.dtype
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (log_probs,) = ctx.saved_tensors
        if ctx.excluded is not None:
            grad = grad.masked_fill(ctx.excluded, 0.0)
        total = all_reduce_sum(grad.sum(dim=-1, keepdim=True), ctx.group)
        out = torch.exp(log_probs).mul_(total).neg_().add_(grad).div_(ctx.temperature)
        return out.to(ctx.dtype), None, None, None


def reordered_rows(
    rows: torch.Tensor, sources: NDArray[np.int64], group: ProcessGroup | None
) -> torch.Tensor:
    """This rank's rows of ``whole[sources]``, where ``whole`` [V, ...] is all ranks' rows joined.

    One all-to-all: a rank receives the rows that it lacks, at most ``Vp`` of them, and sends as
    many. Memory beside the result: one copy of the sent rows and one of the received.

    Args:
        rows: [Vp, ...] this rank's, of one shape and dtype on every rank.
        sources: [V] source row of each place, the same on every rank.
        group: The ranks, in the order of their rows; None: one rank has them all.

    Returns:
        [Vp, ...], without a graph.
    """
    detached = rows.detach()
    ranks = group_size(group)
    if ranks == 1:
        return detached.index_select(0, _index(sources, rows.device))
    this_rank, width = dist.get_rank(group), len(rows)
    needed = sources.reshape(ranks, width)
    owner = needed // width
    sent = [needed[rank][owner[rank] == this_rank] - this_rank * width for rank in range(ranks)]
    received_counts = np.bincount(owner[this_rank], minlength=ranks).tolist()
    arrived = detached.new_empty(rows.shape)
    dist.all_to_all_single(
        arrived,
        detached.index_select(0, _index(np.concatenate(sent), rows.device)),
        received_counts,
        [len(rows_of_rank) for rows_of_rank in sent],
        group=group,
    )
    # Rows arrive ordered by owner, and within an owner by place.
    arrival = np.argsort(owner[this_rank], kind="stable")
    return torch.empty_like(arrived).index_copy_(0, _index(arrival, rows.device), arrived)


def _index(rows: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.array(rows, dtype=np.int64)).to(device)
