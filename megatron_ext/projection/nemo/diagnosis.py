"""Defects of the projection in a file, with the mass that they concern. Vs rows, n entries.

A row counts as a mass of 1, whatever its weights sum to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import counted
from megatron_ext.projection.nemo.loose_entries import LooseEntries, Mask
from megatron_ext.projection.nemo.tokenizer_pair import Filler, TokenizerPair, find_filler

DefectKind = Literal[
    "padding_rows",
    "missing_rows",
    "padding_columns",
    "filler_column",
    "duplicate_columns",
    "row_sums",
    "lost_exact_rows",
    "off_support",
    "lost_rows",
    "no_strict_rows",
]

WHAT: Final[dict[DefectKind, str]] = {
    "padding_rows": "rows behind the student's vocabulary have entries",
    "missing_rows": "there are fewer rows than the student has tokens",
    "padding_columns": "mass on columns behind the teacher's vocabulary",
    "filler_column": "mass on a filler column that stands for nothing",
    "duplicate_columns": "a column comes several times in a row",
    "row_sums": "rows do not sum to 1",
    "lost_exact_rows": "tokens that both vocabularies have are not mapped to each other alone",
    "off_support": "mass on tokens that neither hold the row's token nor are in it",
    "lost_rows": "empty rows of tokens that the teacher can spell",
    "no_strict_rows": "no row has an empty second slot, so strict rules find no common token",
}
"""Description of each kind, as a clause."""

assert set(WHAT) == set(get_args(DefectKind))

ROWS_SHOWN: Final = 8


@dataclass(kw_only=True, frozen=True, slots=True, eq=False)
class Defect:
    """One kind of defect in a file."""

    kind: DefectKind

    rows: NDArray[np.int64]
    """Student ids concerned, ascending."""

    mass: float = 0.0
    """Mass concerned, in rows: a row that is wrong as a whole counts 1."""

    detail: str = ""
    """Further description, as a clause."""

    @property
    def share(self) -> float:
        """Mass concerned as a share of that of the rows concerned."""
        return self.mass / len(self.rows) if len(self.rows) else 0.0

    def as_row(self) -> dict[str, Any]:
        """Dictionary for JSON."""
        return {
            "kind": self.kind,
            "what": WHAT[self.kind],
            "rows": len(self.rows),
            "first_rows": self.rows[:ROWS_SHOWN].tolist(),
            "mass": self.mass,
            "share": self.share,
            "detail": self.detail,
        }

    def __str__(self) -> str:
        mass = f", {self.share:.1%} of their mass" if self.mass else ""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{WHAT[self.kind]}: {counted(len(self.rows), 'row')}{mass}{detail}"


_COLUMNS_SHOWN = 3
_SUM_SLACK = 1e-5
"""Tolerance of a float32 sum in another order; below any share of a fourth piece."""
_ROUNDINGS = 3
"""Roundings of a stored share: of the weight, of the sum that divides it, and of storing it."""


def diagnose(entries: LooseEntries, pair: TokenizerPair | None = None) -> list[Defect]:
    """Defects of ``entries``, those of its size first.

    Args:
        entries: Entries of the file.
        pair: Tokenizers that it is for. Without them exact tokens and spellings are not checked,
            and padding only by the file's metadata.
    """
    filler = find_filler(entries)
    defects: list[Defect | None] = []
    vocab_sizes = entries.vocab_sizes if pair is None else pair.shape
    if vocab_sizes is not None:
        defects += [
            _padding_rows(entries, vocab_sizes[0]),
            _missing_rows(entries, vocab_sizes[0]),
            _padding_columns(entries, vocab_sizes[1]),
        ]
    defects += [_filler(entries, filler, pair), _duplicates(entries), _row_sums(entries)]
    if pair is not None:
        defects += [
            _lost_exact_rows(entries, pair),
            _off_support(entries, filler, pair),
            _lost_rows(entries, pair),
        ]
    defects.append(_no_strict_rows(entries))
    return [defect for defect in defects if defect is not None]


def _inside(entries: LooseEntries, pair: TokenizerPair) -> Mask:
    """Mask [n] of entries between two tokens that are not padding."""
    height, width = pair.shape
    mask: Mask = (entries.rows < height) & (entries.columns < width)
    return mask


def _of_entries(
    kind: DefectKind, entries: LooseEntries, mask: Mask, detail: str = ""
) -> Defect | None:
    if not mask.any():
        return None
    return Defect(
        kind=kind,
        rows=np.unique(entries.rows[mask]),
        mass=float(entries.shares[mask].sum()),
        detail=detail,
    )


def _padding_rows(entries: LooseEntries, height: int) -> Defect | None:
    detail = f"{entries.height:,} rows, {height:,} student tokens"
    return _of_entries("padding_rows", entries, entries.rows >= height, detail)


def _missing_rows(entries: LooseEntries, height: int) -> Defect | None:
    if entries.height >= height:
        return None
    detail = f"{entries.height:,} rows, {height:,} student tokens"
    return Defect(
        kind="missing_rows", rows=np.arange(entries.height, height, dtype=np.int64), detail=detail
    )


def _padding_columns(entries: LooseEntries, width: int) -> Defect | None:
    detail = f"up to {int(entries.columns.max(initial=0)):,}, {width:,} teacher tokens"
    return _of_entries("padding_columns", entries, entries.columns >= width, detail)


def _filler(
    entries: LooseEntries, filler: Filler | None, pair: TokenizerPair | None
) -> Defect | None:
    if filler is None:
        return None
    shown = filler.columns[:_COLUMNS_SHOWN].tolist()
    named = [
        f"column {column}{_name(column, pair)} in {count:,} rows"
        for column, count in zip(shown, filler.counts.tolist(), strict=False)
    ]
    more = len(filler.columns) - len(shown)
    detail = ", ".join(named) + (f", and {more} columns more" if more else "")
    return _of_entries("filler_column", entries, filler.mask, detail)


def _name(column: int, pair: TokenizerPair | None) -> str:
    if pair is None or column >= pair.shape[1]:
        return ""
    return f" {pair.teacher.id_to_token(column)!r}"


def _duplicates(entries: LooseEntries) -> Defect | None:
    _, place, counts = np.unique(entries.keys, return_inverse=True, return_counts=True)
    return _of_entries("duplicate_columns", entries, counts[place] > 1)


def _row_sums(entries: LooseEntries) -> Defect | None:
    sums = entries.row_sums
    wrong = np.abs(sums - 1) > _ROUNDINGS * entries.rounding + _SUM_SLACK
    rows = np.flatnonzero(wrong & (entries.row_sizes > 0))
    if not len(rows):
        return None
    detail = f"from {sums[rows].min():.4g} to {sums[rows].max():.4g}"
    missing = float(np.minimum(np.abs(sums[rows] - 1), 1).sum())
    return Defect(kind="row_sums", rows=rows, mass=missing, detail=detail)


def _lost_exact_rows(entries: LooseEntries, pair: TokenizerPair) -> Defect | None:
    exact = pair.retokenized.is_exact_row & pair.is_ordinary
    sound = entries.kept(_inside(entries, pair))
    own_share = np.zeros(pair.shape[0])
    same = pair.is_same_token(sound)
    np.add.at(own_share, sound.rows[same], sound.shares[same])
    exact[entries.height :] = False
    missing = np.where(exact, 1 - own_share, 0)
    rows = np.flatnonzero(missing > _ROUNDINGS * entries.rounding + _SUM_SLACK)
    if not len(rows):
        return None
    detail = f"of {int(exact.sum()):,} tokens with equal bytes"
    return Defect(kind="lost_exact_rows", rows=rows, mass=float(missing[rows].sum()), detail=detail)


def _off_support(
    entries: LooseEntries, filler: Filler | None, pair: TokenizerPair
) -> Defect | None:
    inner = _inside(entries, pair)
    if filler is not None:
        inner &= ~filler.mask
    off = np.zeros(entries.entry_count, dtype=np.bool_)
    off[inner] = ~pair.is_on_support(entries.kept(inner))
    return _of_entries("off_support", entries, off)


def _lost_rows(entries: LooseEntries, pair: TokenizerPair) -> Defect | None:
    filled = np.zeros(pair.shape[0], dtype=np.bool_)
    filled[entries.rows[entries.rows < pair.shape[0]]] = True
    # Rows missing from the file are another defect.
    filled[entries.height :] = True
    rows = np.flatnonzero(~filled & pair.is_ordinary & pair.retokenized.reachable_rows)
    return Defect(kind="lost_rows", rows=rows, mass=float(len(rows))) if len(rows) else None


def _no_strict_rows(entries: LooseEntries) -> Defect | None:
    if entries.strict_rows is None or entries.strict_rows.any():
        return None
    rows = np.flatnonzero(np.bincount(entries.rows[entries.weights == 1], minlength=entries.height))
    detail = f"{len(rows):,} rows have a weight of 1"
    return Defect(kind="no_strict_rows", rows=rows, detail=detail) if len(rows) else None
