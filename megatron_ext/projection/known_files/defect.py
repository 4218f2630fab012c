"""What can be wrong with the projection in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

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
"""What each kind is, as a clause."""

assert set(WHAT) == set(get_args(DefectKind))

ROWS_SHOWN: Final = 8


@dataclass(kw_only=True, frozen=True, slots=True, eq=False)
class Defect:
    """One kind of fault in a file."""

    kind: DefectKind

    rows: NDArray[np.int64]
    """Student ids concerned, ascending."""

    mass: float = 0.0
    """Mass concerned, in rows: a row that is wrong as a whole has 1."""

    detail: str = ""
    """What else there is to say, as a clause."""

    @property
    def share(self) -> float:
        """Mass concerned as a share of that of the rows concerned."""
        return self.mass / len(self.rows) if len(self.rows) else 0.0

    def as_row(self) -> dict[str, Any]:
        """For JSON."""
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
        rows = "1 row" if len(self.rows) == 1 else f"{len(self.rows):,} rows"
        mass = f", {self.share:.1%} of their mass" if self.mass else ""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{WHAT[self.kind]}: {rows}{mass}{detail}"
