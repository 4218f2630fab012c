"""Tiles of two sequences in which each chunk stays whole. T rows, C chunks, Ns Nt used rows.

Numpy on the host, where the data loader has the chunk ids: a cut must not wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.errors import LossError

Ids = NDArray[np.int64]


class Tile(NamedTuple):
    """Rows of both models with whole chunks; ranges in a plan's order."""

    student: slice
    """Range of ``TilePlan.student_rows``."""

    teacher: slice
    """Range of ``TilePlan.teacher_rows``."""

    chunks: slice
    """Range of ``TilePlan.chunks``."""

    shares_last: bool = False
    """Whether the last student row is the first of the next tile, read behind a chunk. The last
    teacher row can be too."""

    @property
    def student_count(self) -> int:
        """Number of student rows."""
        return int(self.student.stop - self.student.start)

    @property
    def teacher_count(self) -> int:
        """Number of teacher rows."""
        return int(self.teacher.stop - self.teacher.start)

    @property
    def chunk_count(self) -> int:
        """Number of chunks."""
        return int(self.chunks.stop - self.chunks.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePlan:
    """Tiles of whole chunks, from the first used row to the last; equal on ranks of equal data.

    There is at least one tile. Unused rows (padding, prompts) are in no tile: they cost neither
    memory nor FLOPs.
    """

    tiles: tuple[Tile, ...]

    student_rows: torch.Tensor
    """int64 [Ns]: used rows of the flattened student batch, ascending."""

    teacher_rows: torch.Tensor
    """int64 [Nt]"""

    student_chunk_id: torch.Tensor
    """int64 [Ns]: place of each used row's chunk in ``chunks``, negative for rows of no chunk."""

    teacher_chunk_id: torch.Tensor
    """int64 [Nt]"""

    chunks: torch.Tensor
    """int64 [C]: chunks by their first student row."""

    student_total: int
    """Ts: rows of the flattened batch, used or not."""

    teacher_total: int
    """Tt"""

    @classmethod
    def of(
        cls,
        student_chunk_id: torch.Tensor,
        teacher_chunk_id: torch.Tensor,
        chunk_count: int,
        *,
        rows: int,
        student_used: torch.Tensor | None = None,
        behind: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> TilePlan:
        """Cut into as few tiles of at most ``rows`` rows a side as possible. Linear in the rows.

        A longer chunk makes its tile longer. So do chunks that interleave on one side, or come in
        another order on the two: no cut can separate them.

        Args:
            student_chunk_id: int64 [...] on the CPU, negative for rows of no chunk; batch rows and
                packed samples are flattened.
            teacher_chunk_id: The same of the teacher.
            chunk_count: C; every chunk has a row on each side.
            student_used: bool, of the shape of ``student_chunk_id``: rows used besides those of
                chunks, as those with a label. None: all rows.
            behind: bool masks of both sides: rows that are read behind a chunk, each of them next
                to a chunk's last row. A tile that ends with a chunk has its row too. None: no rows.

        Raises:
            LossError: ``rows`` below 1; ids on another device, out of range or missing on a side.
        """
        if rows < 1:
            raise LossError("tiles hold no row", got=rows, expected="at least 1 row a tile")
        student, teacher = (
            _flat(ids, chunk_count, side)
            for ids, side in ((student_chunk_id, "student"), (teacher_chunk_id, "teacher"))
        )
        is_used: NDArray[np.bool_] = np.ones(len(student), dtype=np.bool_)
        if student_used is not None:
            is_used = student_used.cpu().numpy().reshape(-1) | (student >= 0)
        its_used = teacher >= 0
        read = (np.zeros(0, np.bool_),) * 2
        if behind is not None:
            read = behind[0].numpy().reshape(-1), behind[1].numpy().reshape(-1)
            is_used, its_used = is_used | read[0], its_used | read[1]
        student_rows, teacher_rows = np.flatnonzero(is_used), np.flatnonzero(its_used)
        student_ids, teacher_ids = student[student_rows], teacher[teacher_rows]
        begins = np.zeros(len(student_ids), dtype=np.bool_)
        begins[_first_places(student_ids, chunk_count)] = True
        chunks = student_ids[begins]
        place = np.empty(chunk_count, dtype=np.int64)
        place[chunks] = np.arange(chunk_count)
        student_ids = np.where(student_ids < 0, -1, place[student_ids] if chunk_count else -1)
        teacher_ids = np.where(teacher_ids < 0, -1, place[teacher_ids] if chunk_count else -1)
        tiles = _tiles(_cuts(student_ids, teacher_ids, chunk_count), rows)
        if behind is not None:
            is_read = read[0][student_rows], read[1][teacher_rows]
            tiles = [_with_row_behind(tile, *is_read) for tile in tiles]
        return cls(
            tiles=tuple(tiles),
            student_rows=torch.from_numpy(student_rows.astype(np.int64)),
            teacher_rows=torch.from_numpy(teacher_rows.astype(np.int64)),
            student_chunk_id=torch.from_numpy(student_ids),
            teacher_chunk_id=torch.from_numpy(teacher_ids),
            chunks=torch.from_numpy(chunks),
            student_total=len(student),
            teacher_total=len(teacher),
        )

    @classmethod
    def paired(cls, used: torch.Tensor, *, rows: int) -> TilePlan:
        """Plan two models that read the same tokens: row by row, without chunks.

        Args:
            used: bool [...] on the CPU: used rows.
        """
        nowhere = torch.full(used.shape, -1)
        plan = cls.of(nowhere, nowhere[:0], 0, rows=rows, student_used=used)
        return replace(
            plan,
            tiles=tuple(tile._replace(teacher=tile.student) for tile in plan.tiles),
            teacher_rows=plan.student_rows,
            teacher_chunk_id=plan.student_chunk_id,
            teacher_total=plan.student_total,
        )

    def to(self, device: torch.device | str) -> TilePlan:
        """Copy the plan's tensors to ``device``; the cuts stay on the host."""
        names = ("student_rows", "teacher_rows", "student_chunk_id", "teacher_chunk_id", "chunks")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return replace(self, **moved)

    @property
    def largest(self) -> tuple[int, int]:
        """Most student rows and most teacher rows of any tile."""
        student = max((tile.student_count for tile in self.tiles), default=0)
        return student, max((tile.teacher_count for tile in self.tiles), default=0)

    def student_index(self, tile: Tile) -> slice | torch.Tensor:
        """Index of a tile's rows in the flattened batch; a slice, a view, where all rows are
        used."""
        all_used = len(self.student_rows) == self.student_total
        return tile.student if all_used else self.student_rows[tile.student]

    def teacher_index(self, tile: Tile) -> slice | torch.Tensor:
        """Index of a tile's teacher rows in the flattened batch."""
        all_used = len(self.teacher_rows) == self.teacher_total
        return tile.teacher if all_used else self.teacher_rows[tile.teacher]


class _Cuts(NamedTuple):
    """Possible borders of tiles: ascending in all three, including the first and the last."""

    student: Ids
    teacher: Ids
    chunks: Ids


def _cuts(student: Ids, teacher: Ids, chunk_count: int) -> _Cuts:
    """Every row at which all chunks before it are whole, on both sides.

    Args:
        student: [Ns] chunks in the order of their first rows, -1 for none.
        teacher: [Nt] the same chunks.
    """
    position = np.arange(len(student) + 1)
    # [Ns + 1]: chunks that begin before a row, and whether they end before it.
    begun = np.concatenate([[0], np.maximum.accumulate(student) + 1])
    student_end = _ends(student, chunk_count)
    teacher_end = _ends(teacher, chunk_count)
    # [C + 1]: for c, the first teacher row of any chunk from c on.
    following: NDArray[np.int64] = np.full(chunk_count + 1, len(teacher))
    following[:chunk_count] = _first_places(teacher, chunk_count)
    following = np.minimum.accumulate(following[::-1])[::-1]
    is_whole = (student_end[begun] <= position) & (teacher_end[begun] <= following[begun])
    chunks = begun[is_whole]
    return _Cuts(position[is_whole], following[chunks], chunks)


def _tiles(cuts: _Cuts, rows: int) -> list[Tile]:
    """Tiles of as many rows as fit, or up to the next cut; at least one tile.

    An empty tile makes the same collectives and names the same metrics as any other.
    """
    if len(cuts.student) == 1:
        return [Tile(slice(0, 0), slice(0, 0), slice(0, 0))]
    tiles, begin = [], 0
    while begin < len(cuts.student) - 1:
        end = len(cuts.student)
        for side in (cuts.student, cuts.teacher):
            end = min(end, int(np.searchsorted(side, side[begin] + rows, side="right")))
        end = max(end - 1, begin + 1)
        student, teacher, chunks = (slice(int(side[begin]), int(side[end])) for side in cuts)
        tiles.append(Tile(student, teacher, chunks))
        begin = end
    return tiles


def _with_row_behind(tile: Tile, student: NDArray[np.bool_], teacher: NDArray[np.bool_]) -> Tile:
    """The tile, with the next used row of each side where that is read behind a chunk.

    The chunk is this tile's: its last row is the used row before.
    """
    own, its = (
        stop < len(side) and bool(side[stop])
        for stop, side in ((tile.student.stop, student), (tile.teacher.stop, teacher))
    )
    return tile._replace(
        student=slice(tile.student.start, tile.student.stop + own),
        teacher=slice(tile.teacher.start, tile.teacher.stop + its),
        shares_last=own,
    )


def _first_places(chunk_id: Ids, chunk_count: int) -> Ids:
    """First row of each chunk, [C]."""
    first = np.empty(chunk_count, dtype=np.int64)
    rows = np.flatnonzero(chunk_id >= 0)[::-1]
    # Of several values assigned to one place the last one stays.
    first[chunk_id[rows]] = rows
    return first


def _ends(chunk_id: Ids, chunk_count: int) -> Ids:
    """Row after the first c chunks, [C + 1]."""
    end = np.zeros(chunk_count + 1, dtype=np.int64)
    rows = np.flatnonzero(chunk_id >= 0)
    end[chunk_id[rows] + 1] = rows + 1
    return np.maximum.accumulate(end)


def _flat(chunk_id: torch.Tensor, chunk_count: int, side: str) -> Ids:
    if chunk_id.device.type != "cpu":
        raise LossError(
            "tiles are cut on the host",
            got=f"the {side}'s chunk ids on {chunk_id.device}",
            expected="the data loader's, on the CPU",
        )
    ids: Ids = chunk_id.numpy().reshape(-1).astype(np.int64, copy=False)
    if len(ids) and int(ids.max()) >= chunk_count:
        raise LossError(
            f"the {side} has a chunk that is not counted",
            got=int(ids.max()),
            expected=f"below {chunk_count}",
        )
    rows = np.bincount(ids[ids >= 0], minlength=chunk_count)
    if chunk_count and not rows.all():
        raise LossError(
            f"a chunk has no row of the {side}",
            got=f"chunk {int(rows.argmin())}",
            expected=f"every chunk below {chunk_count} on both sides",
        )
    return ids
