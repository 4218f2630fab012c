"""Address traces of projected KL with cross-entropy, launch by launch, in the schedules it has had.

Forward KL, one rank, heads in the co-sharded order, bf16 logits, fp32 scratch; g chunks of a group.
A block of 1,024 columns is a granule of a row of logits. Tables of the projection and numbers of
rows, which a cache always has, are left out, as are the rows' offsets within a granule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.ops.projected_kl import ColumnPlan
from megatron_ext.ops.projected_kl.column_plan import pair_parts
from megatron_ext.ops.projected_kl.kernel_evaluation import CHUNKS, WIDE

from .cache import GRANULE, SECTOR, Ints, Masks, Trace

MULTIPROCESSORS: Final = 132
WARPS: Final = 64
"""Of a multiprocessor."""

_COLUMNS: Final = GRANULE // 2
"""bf16 columns of a granule."""

_WHOLE: Final = np.uint64(2**64 - 1)
_SLOT: Final = np.uint64(0xFF)
"""64 fp32 numbers, one of each chunk of a group: 8 sectors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """What a trace is made of: sizes, the projection's plan, and the rows of every chunk."""

    widths: tuple[int, int]
    """Columns of both models' logits, padding included."""

    plan: ColumnPlan

    rows: tuple[list[Ints], list[Ints]]
    """Student and teacher rows of each chunk."""

    counts: tuple[int, int]
    """Ts and Tt."""

    @property
    def pairs(self) -> int:
        """Leading columns of both models that are direct pairs."""
        assert self.plan.aligned is not None, "the heads are not in the co-sharded order"
        return self.plan.aligned

    @property
    def floor(self) -> int:
        """Bytes of every logit once and of the student's gradient."""
        student, teacher = (2 * n * w for n, w in zip(self.counts, self.widths, strict=True))
        return 2 * student + teacher


class Kernel(NamedTuple):
    """A name, and how many of its programs run at once."""

    name: str
    residents: int

    @classmethod
    def of(cls, name: str, occupancy: float, num_warps: int) -> Kernel:
        """By the share of a multiprocessor's warps that the compiled code leaves room for."""
        return cls(name, MULTIPROCESSORS * int(WARPS * occupancy / num_warps))


class Memory:
    """Tensors one after the other, each row from a granule of its own."""

    def __init__(self, batch: Microbatch) -> None:
        self.granules = 0
        student, teacher = batch.widths
        self.student = self.rows(batch.counts[0], 2 * student)
        self.teacher = self.rows(batch.counts[1], 2 * teacher)
        self.gradient = self.rows(batch.counts[0], 2 * student)

    def rows(self, count: int, size: int) -> Ints:
        """First granule of each of ``count`` rows of ``size`` bytes."""
        step = -(-size // GRANULE)
        first = self.granules + step * np.arange(count + 1)
        self.granules = int(first[-1])
        return first[:-1]


class _Programs:
    """Accesses of programs, collected."""

    def __init__(self) -> None:
        self.lengths: list[Ints] = []
        self.parts: list[tuple[Ints, Masks, NDArray[np.bool_]]] = []
        self.arrivals: list[Ints] = []
        self.waits: list[Ints] = []

    def add(
        self,
        lengths: Ints,
        granule: Ints,
        mask: Masks,
        is_write: NDArray[np.bool_],
        *,
        arrival: int = -1,
        arrives_after: int | None = None,
        wait: tuple[int, int] | None = None,
        waits_after: int = 0,
    ) -> None:
        """Programs that wait for a counter's number, at first, and arrive at another, at last."""
        self.lengths.append(lengths)
        self.parts.append((granule, mask, is_write))
        after = lengths if arrives_after is None else np.full_like(lengths, arrives_after)
        self.arrivals.append(np.stack([after, np.full_like(lengths, arrival)], axis=1))
        if arrival < 0:
            self.arrivals[-1][:, 0] = -1
        row = (-1, -1, -1) if wait is None else (waits_after, *wait)
        self.waits.append(np.tile(np.array(row, dtype=np.int64), (len(lengths), 1)))

    def trace(self, residents: int) -> Trace:
        """The launch of what was collected."""
        lengths = np.concatenate(self.lengths)
        granule, mask, is_write = (np.concatenate(part) for part in zip(*self.parts, strict=True))
        return Trace(
            starts=np.concatenate([[0], np.cumsum(lengths)]),
            granule=granule,
            mask=mask,
            is_write=is_write,
            residents=residents,
            arrivals=np.concatenate(self.arrivals),
            waits=np.concatenate(self.waits),
        )


def blocks_of(width: int) -> Masks:
    """Masks of the granules of a row of bf16 logits."""
    masks = np.full(-(-width // _COLUMNS), _WHOLE)
    left = width % _COLUMNS
    if left:
        masks[-1] = np.uint64(2 ** -(-2 * left // SECTOR) - 1)
    return masks


def _streamed(rows: Ints, width: int) -> _Programs:
    """A program for each row, which reads it."""
    programs, masks = _Programs(), blocks_of(width)
    granule = (rows[:, None] + np.arange(len(masks))).ravel()
    lengths = np.full(len(rows), len(masks))
    mask = np.tile(masks, len(rows))
    programs.add(lengths, granule, mask, np.zeros(len(granule), dtype=np.bool_))
    return programs


class Schedule:
    """Launches of one schedule, with the memory that they touch."""

    def __init__(self, batch: Microbatch, *, chunks: int = 64) -> None:
        self.batch, self.memory, self.chunks = batch, Memory(batch), chunks
        self.count = len(batch.rows[0])
        self.groups = -(-self.count // chunks)
        self.singles = np.array([len(rows) == 1 for rows in batch.rows[0]])
        plan = batch.plan
        self.residual_first, self.home_first = batch.pairs, int(plan.home[0])
        assert bool((plan.home.diff() == 1).all()), "summed columns stand side by side"
        self.slots, self.residual = len(plan.home), plan.residual_rows

    def members(self, side: int, group: int) -> Ints:
        """Rows of a model in a group of chunks."""
        chunks = self.batch.rows[side][group * self.chunks : (group + 1) * self.chunks]
        return np.concatenate(chunks)

    def means(self, programs: _Programs, group: int, out: int, columns: int, **event: Any) -> None:
        """Probabilities of residual columns, ``columns`` at a time, side by side for a group."""
        rows = self.memory.student[self.members(0, group)]
        self._gathered(
            programs, rows, self.residual_first, self.residual, columns, out, reads=False, **event
        )

    def slopes(self, programs: _Programs, group: int, out: int, columns: int, **event: Any) -> None:
        """Slopes of summed columns in place of their sums."""
        rows = self.memory.teacher[self.members(1, group)]
        self._gathered(
            programs, rows, self.home_first, self.slots, columns, out, reads=True, **event
        )

    def _gathered(
        self,
        programs: _Programs,
        rows: Ints,
        first: int,
        count: int,
        columns: int,
        out: int,
        *,
        reads: bool,
        **event: Any,
    ) -> None:
        blocks = -(-count // columns)
        begin = 2 * (first + columns * np.arange(blocks))
        read = rows[None, :] + (begin // GRANULE)[:, None]
        size = max(1, 2 * columns // SECTOR)
        bits = (np.uint64(2**size - 1)) << (begin % GRANULE // SECTOR).astype(np.uint64)
        inner = np.arange(columns * self.slot_sectors // 64)
        place = out + columns * self.slot_sectors // 64 * np.arange(blocks)[:, None] + inner
        parts = [read, *([place] if reads else []), place]
        granule = np.concatenate(parts, axis=1)
        mask = np.full(granule.shape, _WHOLE)
        mask[:, : len(rows)] = bits[:, None]
        is_write = np.zeros(granule.shape, dtype=np.bool_)
        is_write[:, -len(inner) :] = True
        lengths = np.full(blocks, granule.shape[1])
        programs.add(lengths, granule.ravel(), mask.ravel(), is_write.ravel(), **event)

    @property
    def slot_sectors(self) -> int:
        """Sectors of one column of a group: an fp32 number of each of its chunks."""
        return 4 * self.chunks // SECTOR

    def slot_places(self, index: Ints, base: int) -> tuple[Ints, Masks]:
        """Granules and masks of columns of a group, from the first granule of all of them."""
        in_granule = 64 // self.slot_sectors
        bits = np.uint64(2**self.slot_sectors - 1)
        shift = (index % in_granule * self.slot_sectors).astype(np.uint64)
        return base + index // in_granule, bits << shift


def joined(
    batch: Microbatch,
    ring: int = 3,
    scratch: int = 1 << 28,
) -> Iterator[tuple[str, Trace]]:
    """``single_kernel``, then ``summed_kernel`` and both passes of ``sweep_kernel`` a tile.

    Means and slopes of ``ring`` groups of chunks are kept at once.
    """
    parts = pair_parts(*batch.widths)
    chunks = CHUNKS // 2 if batch.plan.scratch_width > WIDE else CHUNKS
    schedule = Schedule(batch, chunks=chunks)
    memory, size = schedule.memory, 4 * chunks
    step = scratch // (size * schedule.residual) * chunks
    means = memory.rows(ring, size * schedule.residual)
    sums = memory.rows(ring, size * schedule.slots)
    residual = memory.rows(step, 4 * schedule.residual)
    yield "statistics and pairs", _statistics_and_pairs(schedule, parts)
    for first in range(0, schedule.count, step):
        stop = min(first + step, schedule.count)
        yield "summed columns", _summed(schedule, first, stop, means, sums, residual)
        if not schedule.singles[first:stop].all():
            yield "second sweep", _others(schedule, first, step, residual)


def _statistics_and_pairs(schedule: Schedule, parts: int) -> Trace:
    """Statistics of a part of a chunk, then pairs and unmapped columns of the one before."""
    batch, memory, programs = schedule.batch, schedule.memory, _Programs()
    pairs, mapped = batch.pairs // _COLUMNS, batch.pairs + schedule.residual
    masks = [blocks_of(width) for width in batch.widths]
    firsts = memory.student, memory.teacher
    for unit in range(schedule.count + 1):
        for part in range(parts):
            granule: list[int] = []
            mask: list[np.uint64] = []
            writes: list[bool] = []
            for side in (0, 1) if unit < schedule.count else ():
                for row in batch.rows[side][unit]:
                    for begin in range(2 * part, len(masks[side]), 2 * parts):
                        for block in range(begin, min(begin + 2, len(masks[side]))):
                            granule.append(int(firsts[side][row]) + block)
                            mask.append(masks[side][block])
                            writes.append(False)
            taken, chunk = len(granule), unit - 1
            if chunk >= 0 and schedule.singles[chunk]:
                row = batch.rows[0][chunk][0]
                teachers = [int(memory.teacher[each]) for each in batch.rows[1][chunk]]
                student, gradient = int(memory.student[row]), int(memory.gradient[row])
                for block in range(part, pairs, parts):
                    granule += [student + block, *(each + block for each in teachers)]
                    granule.append(gradient + block)
                    mask += [_WHOLE] * (len(teachers) + 2)
                    writes += [False] * (len(teachers) + 1) + [True]
                for start in range(mapped + part * _COLUMNS, batch.widths[0], parts * _COLUMNS):
                    stop = min(start + _COLUMNS, batch.widths[0])
                    for first, is_write in ((student, False), (gradient, True)):
                        for block, bits in _span(2 * start, 2 * stop):
                            granule.append(first + block)
                            mask.append(bits)
                            writes.append(is_write)
            programs.add(
                np.array([len(granule)]),
                np.array(granule, dtype=np.int64),
                np.array(mask, dtype=np.uint64),
                np.array(writes, dtype=np.bool_),
                arrival=unit,
                arrives_after=taken,
                wait=(chunk, parts) if chunk >= 0 else None,
                waits_after=taken,
            )
    return programs.trace(Kernel.of("single_kernel", 0.5, 4).residents)


def _span(begin: int, end: int) -> Iterator[tuple[int, np.uint64]]:
    """Granules of a range of bytes, with their masks."""
    for block in range(begin // GRANULE, -(-end // GRANULE)):
        first = max(begin - block * GRANULE, 0) // SECTOR
        last = -(-min(end - block * GRANULE, GRANULE) // SECTOR)
        yield block, np.uint64(2**last - 2**first)


def _summed(
    schedule: Schedule, first: int, stop: int, means: Ints, sums: Ints, residual: Ints
) -> Trace:
    """Turns of means, sums, slopes and gradients, each of the group before the last one's."""
    size, plan = schedule.chunks, schedule.batch.plan
    begin, groups = first // size, -(-(stop - first) // size)
    column_blocks, slot_blocks = len(plan.by_column.blocks), -(-schedule.slots // 64)
    means_blocks = -(-schedule.residual // 128)
    programs, ring = _Programs(), len(means)
    for turn in range(groups + 2):
        if turn < groups:
            waits = (4 * (turn - ring) + 1, column_blocks) if turn >= ring else None
            out = int(means[turn % ring])
            schedule.means(programs, begin + turn, out, 128, arrival=4 * turn, wait=waits)
        group = turn - 2
        if 0 <= group < groups:
            rows = residual[group * size : (group + 1) * size]
            wait = (4 * group + 2, slot_blocks)
            _gradients(
                schedule,
                programs,
                begin + group,
                int(sums[group % ring]),
                rows,
                wait,
                4 * group + 3,
            )
        if turn < groups:
            _entry_sums(
                schedule,
                programs,
                plan.by_column,
                int(means[turn % ring]),
                int(sums[turn % ring]),
                arrival=4 * turn + 1,
                wait=(4 * turn, means_blocks),
            )
        group = turn - 1
        if 0 <= group < groups:
            schedule.slopes(
                programs,
                begin + group,
                int(sums[group % ring]),
                64,
                arrival=4 * group + 2,
                wait=(4 * group + 1, column_blocks),
            )
    return programs.trace(Kernel.of("summed_kernel", 0.25, 4).residents)


def _gradients(
    schedule: Schedule,
    programs: _Programs,
    group: int,
    slopes: int,
    residual: Ints,
    wait: tuple[int, int],
    arrival: int,
) -> None:
    """Gradients of 128 residual columns a program, and ``W f`` of chunks of several rows."""
    memory, batch, size = schedule.memory, schedule.batch, schedule.chunks
    chosen = np.arange(group * size, min((group + 1) * size, schedule.count))
    singles = schedule.singles[chosen]
    rows = np.array([batch.rows[0][chunk][0] for chunk in chosen[singles]], dtype=np.int64)
    others = residual[: len(chosen)][~singles]
    offsets, source = (
        getattr(batch.plan.by_row, name).numpy().astype(np.int64) for name in ("offsets", "source")
    )
    granule, mask, is_write, lengths = [], [], [], []
    for start in range(0, schedule.residual, 128):
        end = min(start + 128, schedule.residual)
        found = schedule.slot_places(source[offsets[start] : offsets[end]], slopes)
        place = 2 * (batch.pairs + start)
        bits = np.uint64(0xFF) << np.uint64(place % GRANULE // SECTOR)
        stored = np.uint64(0xFFFF) << np.uint64(4 * start % GRANULE // SECTOR)
        columns = (
            memory.student[rows] + place // GRANULE,
            memory.gradient[rows] + place // GRANULE,
            others + 4 * start // GRANULE,
        )
        granule += [found[0], *columns]
        mask += [found[1], *(np.full(len(rows), bits) for _ in range(2))]
        mask.append(np.full(len(others), stored))
        is_write += [np.zeros(len(found[0]) + len(rows), np.bool_)]
        is_write.append(np.ones(len(rows) + len(others), np.bool_))
        lengths.append(len(found[0]) + 2 * len(rows) + len(others))
    programs.add(
        np.array(lengths),
        np.concatenate(granule),
        np.concatenate(mask),
        np.concatenate(is_write),
        wait=wait,
        arrival=arrival,
    )


def before(batch: Microbatch, scratch: int = 1 << 28) -> Iterator[tuple[str, Trace]]:
    """Statistics of all rows, then tiles of chunks whose scratch is in memory, then one sweep each.

    The launches of commit dabfcc1: means, sums, slopes, sums and sweep of a tile of chunks.
    """
    schedule = Schedule(batch)
    memory, plan = schedule.memory, batch.plan
    step = scratch // (4 * 64 * 2 * plan.scratch_width) * 64
    means = memory.rows(step // 64, 256 * schedule.residual)
    sums = memory.rows(step // 64, 256 * schedule.slots)
    residual = memory.rows(step, 4 * schedule.residual)
    yield "statistics", _streamed(memory.student, batch.widths[0]).trace(264)
    yield "statistics", _streamed(memory.teacher, batch.widths[1]).trace(264)
    for first in range(0, schedule.count, step):
        groups = range(first // 64, -(-min(first + step, schedule.count) // 64))
        stages = [_Programs() for _ in range(4)]
        for group in groups:
            own = group - groups[0]
            schedule.means(stages[0], group, int(means[own]), 32)
            _entry_sums(schedule, stages[1], plan.by_column, int(means[own]), int(sums[own]))
            schedule.slopes(stages[2], group, int(sums[own]), 16)
            rows = residual[own * 64 : own * 64 + 64]
            _entry_sums(schedule, stages[3], plan.by_row, int(sums[own]), rows)
        for name, stage, residents in zip(
            ("means", "sums", "slopes", "sums"), stages, (396, 1056, 396, 1056), strict=True
        ):
            yield name, stage.trace(residents)
        yield "sweep", _sweep(schedule, first, min(first + step, schedule.count), residual)
        if not schedule.singles[first : first + step].all():
            yield "second sweep", _others(schedule, first, step, residual)


def _entry_sums(
    schedule: Schedule,
    programs: _Programs,
    sums: object,
    values: int,
    out: int | Ints,
    *,
    arrival: int = -1,
    wait: tuple[int, int] | None = None,
) -> None:
    """Sums over entries for a group of chunks: by columns side by side, or by chunks."""
    offsets, target, source, blocks = (
        getattr(sums, name).numpy().astype(np.int64)
        for name in ("offsets", "target", "source", "blocks")
    )
    granule, mask, is_write, lengths = [], [], [], []
    for begin, end in blocks:
        read = schedule.slot_places(source[offsets[begin] : offsets[end]], values)
        if isinstance(out, int):
            write = schedule.slot_places(target[begin:end], out)
        else:
            places = np.unique(target[begin:end] // 8)
            within = np.left_shift(np.uint64(1), (places % 64).astype(np.uint64))
            write = (
                (out[:, None] + places // 64).ravel(),
                np.tile(within, len(out)),
            )
        granule += [read[0], write[0]]
        mask += [read[1], write[1]]
        is_write += [np.zeros(len(read[0]), np.bool_), np.ones(len(write[0]), np.bool_)]
        lengths.append(len(read[0]) + len(write[0]))
    programs.add(
        np.array(lengths),
        np.concatenate(granule),
        np.concatenate(mask),
        np.concatenate(is_write),
        arrival=arrival,
        wait=wait,
    )


def _sweep(schedule: Schedule, first: int, stop: int, residual: Ints) -> Trace:
    """A program for each chunk of one student row: pairs, then the other columns."""
    batch, memory, programs = schedule.batch, schedule.memory, _Programs()
    masks = blocks_of(batch.widths[0])
    pairs = batch.pairs // _COLUMNS
    for chunk in range(first, stop):
        if not schedule.singles[chunk]:
            continue
        row = batch.rows[0][chunk][0]
        student, gradient = memory.student[row], memory.gradient[row]
        teachers = memory.teacher[batch.rows[1][chunk]]
        granule, mask, is_write = [], [], []
        for block in range(len(masks)):
            read = [student + block]
            if block < pairs:
                read += [teacher + block for teacher in teachers]
            elif block * _COLUMNS < batch.pairs + schedule.residual:
                place = residual[chunk - first] + 2 * (block - pairs)
                read += [place, place + 1]
            granule += [*read, gradient + block]
            mask += [masks[block]] * (len(read) + 1)
            is_write += [False] * len(read) + [True]
        programs.add(
            np.array([len(granule)]), np.array(granule), np.array(mask), np.array(is_write)
        )
    return programs.trace(1056)


def _others(schedule: Schedule, first: int, step: int, residual: Ints) -> Trace:
    """Chunks of several student rows: a pass for the sums of their rows, one for the gradient."""
    batch, memory, programs = schedule.batch, schedule.memory, _Programs()
    masks = blocks_of(batch.widths[0])
    pairs, parts = batch.pairs // _COLUMNS, 4
    stop = min(first + step, schedule.count)
    for writes in (False, True):
        for chunk in range(first, stop):
            if schedule.singles[chunk]:
                continue
            rows = batch.rows[0][chunk]
            for part in range(parts):
                granule, mask, is_write = [], [], []
                for block in range(part, len(masks), parts):
                    read = [*(memory.student[rows] + block)]
                    if block < pairs:
                        read += [*(memory.teacher[batch.rows[1][chunk]] + block)]
                    elif block * _COLUMNS < batch.pairs + schedule.residual:
                        place = residual[(chunk - first) % len(residual)] + 2 * (block - pairs)
                        read += [place, place + 1]
                    write = [*(memory.gradient[rows] + block)] if writes else []
                    granule += [*read, *write]
                    mask += [masks[block]] * (len(read) + len(write))
                    is_write += [False] * len(read) + [True] * len(write)
                programs.add(
                    np.array([len(granule)]),
                    np.array(granule),
                    np.array(mask),
                    np.array(is_write, dtype=np.bool_),
                )
    return programs.trace(264)
