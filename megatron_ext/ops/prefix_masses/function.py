"""Teacher's masses of the student's next tokens, from rows of the teacher's logits.

T rows, Vps Vpt local columns, S starts, M middles, E events of middles, N sums, X slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
import torch.distributed as dist

from megatron_ext.distributed.shard_collectives import all_reduce_sum, group_size
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    scaled_logits,
)
from megatron_ext.ops.chunk_rows import index_sum, local_column
from megatron_ext.ops.launch import Implementation, uses_compiled, uses_triton
from megatron_ext.ops.partition_kl import ColumnSet, RowMasses, SharedColumns
from megatron_ext.ops.partition_kl.chain_masses import IMPOSSIBLE
from megatron_ext.ops.prefix_masses.operands import (
    PrefixColumns,
    PrefixSums,
    StartColumns,
    TargetRows,
)
from megatron_ext.ops.softmax_statistics import row_log_sum_exp

_PAIRS_AT_ONCE: Final = 1 << 22
"""Pairs of a prefix and a token whose masses are in memory at a time."""


def start_columns(
    starts: torch.Tensor,
    is_event: torch.Tensor,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
) -> StartColumns:
    """Cut the map of teacher to student tokens to this rank's columns. No collectives.

    Args:
        starts: int64 [Vt] student column over all shards of each teacher column, -1 for none.
        is_event: bool [Vs]
    """
    ranks, width = group_size(student_shard.group), student_shard.width
    rank = student_shard.start // width
    column = torch.arange(len(starts), device=starts.device)
    owner = torch.where(starts < 0, rank, starts // width)
    holder = column // teacher_shard.width
    # Slots of every pair of ranks, each once: holder, owner and student column as one number.
    total = width * ranks
    crossing = (holder != owner) & (starts >= 0)
    keys = torch.unique((holder * ranks + owner)[crossing] * total + starts[crossing])
    pairs = torch.bincount(keys // total, minlength=ranks**2).view(ranks, ranks)
    leaving = keys[(keys // total) // ranks == rank]
    arriving = keys[(keys // total) % ranks == rank]
    own = slice(teacher_shard.start, teacher_shard.start + teacher_shard.valid_width)
    local = starts[own] - student_shard.start
    target = torch.where(starts[own] < 0, width, local)
    sent = (rank * ranks + owner[own]) * total + starts[own]
    slot = torch.searchsorted(leaving, sent)
    target = torch.where(crossing[own], width + 1 + slot, target)
    sizes = torch.bincount(target, minlength=width + 1 + len(leaving))
    counts = pairs.tolist()
    anything = len(keys) > 0
    return StartColumns(
        target=target,
        column=target.argsort(stable=True).int(),
        pointers=torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int(),
        by_size=sizes.argsort(descending=True, stable=True).int(),
        arriving=arriving % total - student_shard.start,
        sent_counts=tuple(counts[rank]) if anything else (),
        received_counts=tuple(row[rank] for row in counts) if anything else (),
        shared=_one_to_one(is_event, student_shard),
        shard=VocabShard(
            start=rank * (width + 1),
            stop=(rank + 1) * (width + 1),
            vocab_size=ranks * (width + 1),
            group=student_shard.group,
        ),
        event_count=int(is_event.sum()),
        has_rest=bool((~is_event[: student_shard.vocab_size]).any()),
    )


def _one_to_one(is_event: torch.Tensor, shard: VocabShard) -> SharedColumns:
    """Events as shared columns of the student and of masses with one column more."""
    width, ranks = shard.width, group_size(shard.group)
    padded = torch.nn.functional.pad(is_event, (0, width * ranks - len(is_event)))
    own = padded[shard.start : shard.stop]
    column = torch.arange(width, dtype=torch.int32, device=own.device)
    number = torch.arange(width * ranks, device=own.device)
    token = torch.where(padded, number, -1).view(ranks, width)
    return SharedColumns(
        student=ColumnSet.of(own),
        teacher=ColumnSet.of(torch.nn.functional.pad(own, (0, 1))),
        partner=torch.where(own, column, -1),
        sent=number[:0],
        sent_counts=(),
        received_counts=(),
        crossing=0,
        student_token=torch.nn.functional.pad(token, (0, 1), value=-1).flatten(),
    )


class PrefixTargets:
    """Teacher's masses of the student's next tokens in one microbatch. Without a graph.

    Args:
        logits: [T, Vpt] the teacher's, any float dtype.
        smoothing: Share of every row's mass that is spread evenly over its events.
        implementation: What adds up the starts' masses, see ``ops.launch``.

    Collectives: two all-reduces of [T], and one of [E + M + N + K].
    """

    @torch.no_grad()
    def __init__(
        self,
        logits: torch.Tensor,
        rows: TargetRows,
        columns: PrefixColumns,
        *,
        shards: tuple[VocabShard, VocabShard],
        smoothing: float = 0.0,
        implementation: Implementation = "auto",
    ) -> None:
        self._by: Implementation = "torch"
        if uses_triton(implementation, logits):
            self._by = "triton"
        elif uses_compiled(implementation, logits):
            self._by = "cpu"
        self._logits, self._rows, self._columns = logits, rows, columns.starts
        self._shards, self._smoothing = shards, smoothing
        shard, spans = shards[1], rows.spans
        self._whole = row_log_sum_exp(logits, shard, implementation=implementation)
        own = _Pairs(logits, self._whole, columns)
        events, middles = rows.pointers[-1], len(rows.middle)
        first = rows.event_counts.cumsum(0) - rows.event_counts
        slots = rows.prefixes.slot_counts

        def place(number: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
            """Index of a slot's event, or of the rest of its row behind all events."""
            return torch.where(slot < slots[number], first[number] + slot, events + number)

        parts = [
            own.sums(rows.middle, rows.prefixes, place, events + middles),
            own.sums(spans.end_row, spans.ends, lambda number, _: number, len(spans.row)),
            own.log_probs(spans.step_row, spans.step_label, shard),
        ]
        merged = all_reduce_sum(torch.cat(parts), shard.group)
        masses, ends, steps = merged.split([len(part) for part in parts])
        self._moved = ends * index_sum(steps, spans.step_span, len(spans.row)).exp()
        self._middle = spans.row - len(rows.start)
        self._masses = self._with_spans(masses)

    def is_bad(self) -> torch.Tensor:
        """bool [T]: rows with NaN or +inf in a column of any rank, which make their sums NaN."""
        return self._whole.log_sum.isnan()

    def middles(self) -> RowMasses:
        """Log-masses of the events of middles [E] and of their rests [M], given the prefix.

        The same on every rank; without steps. No collectives.
        """
        rows, given = self._rows, self._masses
        events, count = rows.pointers[-1], len(rows.middle)
        sizes = rows.event_counts
        number = torch.arange(count, device=given.device)
        row = torch.cat([number.repeat_interleave(sizes, output_size=events), number])
        total = index_sum(given, row, count)[row]
        share = given / total
        if self._smoothing:
            share = share.mul_(1 - self._smoothing).add_(self._smoothing / (sizes + 1)[row])
        # A prefix to which the teacher gives no mass has no events.
        log_mass = torch.where(total == 0, IMPOSSIBLE, share.log()).clamp_(min=IMPOSSIBLE)
        return RowMasses(log_mass[:0], log_mass[:0], log_mass[:events], log_mass[events:])

    @torch.no_grad()
    def starts(self, part: slice) -> torch.Tensor:
        """Log-masses [S', Vps + 1] of some starts, in the accumulation dtype.

        Of this rank's student columns, and behind them, on the first rank, of all that no student
        column has. Collectives: an all-reduce of [S'], and an all-to-all where a teacher column and
        its student column lie on different ranks.
        """
        columns, shard = self._columns, self._shards[0]
        masses = self._by_column(self._rows.start[part])
        rest = all_reduce_sum(masses[:, -1].contiguous(), shard.group)
        spans, count = self._rows.spans, len(masses)
        row = spans.row - part.start
        inside = (self._middle < 0) & (row >= 0) & (row < count)
        for event, amount in ((spans.loses, -self._moved), (spans.gains, self._moved)):
            column = torch.where(inside, local_column(event, shard), -1)
            of_rest = inside & (event < 0)
            _add_(masses, row, column, amount)
            _add_(rest[:, None], row, torch.where(of_rest, 0, -1), amount)
        # Where every student token is an event, the rest has no counterpart.
        masses[:, -1] = rest if columns.has_rest and shard.start == 0 else 0.0
        masses.clamp_(min=0.0)
        if self._smoothing:
            even = self._smoothing / columns.event_count
            masses.mul_(1 - self._smoothing)[:, :-1].add_(columns.shared.student.mask * even)
        if self._by != "cpu":
            return masses.log_()
        from megatron_ext.ops.prefix_masses import compiled_loops as loops
        from megatron_ext.ops.row_loops import in_threads

        in_threads(lambda a, b: loops.log_masses(a, b, masses.numpy()), len(masses))
        return masses

    def _with_spans(self, masses: torch.Tensor) -> torch.Tensor:
        """Masses of the middles' events and rests with those of spans moved."""
        spans, middle, count = self._rows.spans, self._middle, len(masses)
        events = self._rows.pointers[-1]
        loses = torch.where(spans.loses < 0, events + middle, spans.loses)
        # One more place, for what belongs to starts.
        masses = torch.nn.functional.pad(masses, (0, 1))
        for event, amount in ((loses, -self._moved), (spans.gains, self._moved)):
            masses.index_put_((torch.where(middle < 0, count, event),), amount, accumulate=True)
        return masses[:count].clamp_(min=0.0)

    def _by_column(self, rows: torch.Tensor) -> torch.Tensor:
        """Masses [S', Vps + 1] of own student columns, and of own columns that have none."""
        columns, width = self._columns, self._shards[0].width
        buffer = self._by_target(rows, width + 1 + sum(columns.sent_counts))
        masses = buffer[:, : width + 1]
        if columns.sent_counts:
            arrived = buffer.new_empty(len(columns.arriving), len(rows))
            dist.all_to_all_single(
                arrived,
                buffer[:, width + 1 :].t().contiguous(),
                list(columns.received_counts),
                list(columns.sent_counts),
                group=self._shards[0].group,
            )
            masses.index_add_(1, columns.arriving, arrived.t())
        return masses

    def _by_target(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Probabilities [S', count] of own columns, added up by target."""
        columns, whole = self._columns, self._whole
        valid = len(columns.target)
        if self._by == "triton" and valid and len(rows):
            return _by_kernel(self._logits, rows, whole, columns, count)
        sums = torch.zeros(len(rows), count, dtype=whole.peak.dtype, device=rows.device)
        if self._by == "cpu":
            from megatron_ext.ops.prefix_masses import compiled_loops as loops
            from megatron_ext.ops.row_loops import flat_rows, in_threads, normaliser

            flat, out = flat_rows(self._logits, valid), sums.numpy()
            work = flat, rows.numpy(), normaliser(whole), columns.target.numpy(), out
            in_threads(lambda first, stop: loops.column_masses(first, stop, *work), len(rows))
            return sums
        scaled = scaled_logits(self._logits[rows, :valid], 1.0, None)
        own = LogSumExp(whole.peak[rows], whole.log_sum[rows])
        return sums.index_add_(1, columns.target, own.normalise_(scaled, slice(None)).exp_())


def _by_kernel(
    logits: torch.Tensor,
    rows: torch.Tensor,
    whole: LogSumExp,
    columns: StartColumns,
    count: int,
) -> torch.Tensor:
    from megatron_ext.ops.prefix_masses.triton_kernels import column_masses_kernel

    sums = torch.empty(len(rows), count, dtype=torch.float32, device=rows.device)
    column_masses_kernel[(len(rows), -(-count // _SLOTS))](
        logits,
        rows.contiguous(),
        whole.peak.float(),
        whole.log_sum.float(),
        columns.column,
        columns.pointers,
        columns.by_size,
        sums,
        logits.stride(0),
        sums.stride(0),
        count,
        BLOCK=_SLOTS,
        num_warps=4,
    )
    return sums


_SLOTS: Final = 512
"""Targets that a program adds up."""


def _add_(values: torch.Tensor, row: torch.Tensor, column: torch.Tensor, x: torch.Tensor) -> None:
    """Add ``x`` [N] to ``values`` [S, V] at its row and column, nothing where a column is
    negative."""
    if len(values):
        at = torch.where(column < 0, 0, row), column.clamp(min=0)
        values.index_put_(at, x.masked_fill(column < 0, 0.0), accumulate=True)


class _Pairs:
    """Sums over teacher tokens that begin with a prefix; of this rank's columns."""

    def __init__(self, logits: torch.Tensor, whole: LogSumExp, columns: PrefixColumns) -> None:
        self._logits, self._whole, self._columns = logits, whole, columns

    def sums(
        self, rows: torch.Tensor, prefixes: PrefixSums, place: _Place, count: int
    ) -> torch.Tensor:
        """Masses [count] of the pairs of each prefix at its row, added up by ``place``."""
        total = self._whole.peak.new_zeros(count)
        first = self._columns.pointers[prefixes.number]
        lengths = self._columns.pointers[prefixes.number + 1] - first
        for part in _pair_slices(prefixes.pair_counts):
            counts = prefixes.pair_counts[part]
            size = sum(counts)
            length = lengths[part]
            number = torch.arange(len(counts), device=rows.device)
            number = number.repeat_interleave(length, output_size=size)
            begin = length.cumsum(0) - length
            pair = torch.arange(size, device=rows.device) - begin[number]
            pair = pair + first[part][number]
            number = number + part.start
            column = self._columns.column[pair].long()
            log_prob = self._log_probs(rows[number], column.clamp(min=0))
            mass = torch.where(column < 0, 0.0, log_prob.exp())
            total += index_sum(mass, place(number, self._columns.slot[pair].long()), count)
        return total

    def log_probs(
        self, rows: torch.Tensor, labels: torch.Tensor, shard: VocabShard
    ) -> torch.Tensor:
        """Log-probability of each label at its row, 0 where another rank has its column."""
        column = local_column(labels, shard)
        return torch.where(column < 0, 0.0, self._log_probs(rows, column.clamp(min=0)))

    def _log_probs(self, rows: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        logits = self._logits[rows, column].to(self._whole.peak.dtype)
        return (logits - self._whole.peak[rows]) - self._whole.log_sum[rows]


_Place = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _pair_slices(counts: tuple[int, ...]) -> Iterator[slice]:
    """Slices of sums with at most ``_PAIRS_AT_ONCE`` pairs, or one sum."""
    start = size = 0
    for index, count in enumerate(counts):
        if size and size + count > _PAIRS_AT_ONCE:
            yield slice(start, index)
            start, size = index, 0
        size += count
    if size:
        yield slice(start, len(counts))
