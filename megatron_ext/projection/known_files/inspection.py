"""What a projection file holds: its size, its rows, and what is wrong. Vs rows, Vt columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from megatron_ext.projection.known_files.defect import ROWS_SHOWN, Defect
from megatron_ext.projection.known_files.diagnosis import diagnose
from megatron_ext.projection.known_files.loose_entries import LooseEntries
from megatron_ext.projection.known_files.operations import width_of
from megatron_ext.projection.known_files.tokenizer_pair import TokenizerPair

RELAXED_SHARE: Final = 0.6
"""From which share on the relaxed rule of the original loss takes two tokens for one."""


@dataclass(kw_only=True, frozen=True, slots=True, eq=False)
class Inspection:
    """The numbers of a file."""

    shape: tuple[int, int]
    entry_count: int
    slot_count: int
    """Slots of a table; 0 where the file is none."""
    row_sizes: Mapping[int, int]
    """Rows with so many different columns, by number of columns."""
    exact_rows: int
    """Rows that say their token is one token of the teacher, alone."""
    strict_common: int
    """Pairs of tokens that are one by an exact row; of rows with one column only the first."""
    relaxed_common: int
    """The same by a share of 0.6 or more."""
    reachable_columns: int
    empty_rows: Sequence[int]
    """Student ids that nothing stands for, padding aside where it is known, ascending."""
    metadata: Mapping[str, str]
    defects: list[Defect]
    knows_tokenizers: bool

    @classmethod
    def of(cls, entries: LooseEntries, pair: TokenizerPair | None = None) -> Inspection:
        """The numbers of ``entries``, judged by the tokenizers where they are given."""
        shape = (entries.height, width_of(entries))
        one_hot = entries.row_sizes == 1
        exact = one_hot if entries.is_exact_row is None else one_hot & entries.is_exact_row
        if entries.strict_rows is not None:
            exact = exact & entries.strict_rows
        projection = entries.projection(shape, is_exact_row=exact)
        known = entries.vocab_sizes if pair is None else pair.shape
        tokens = entries.height if known is None else known[0]
        sizes, counts = np.unique(np.diff(projection.indptr), return_counts=True)
        return cls(
            shape=shape,
            entry_count=entries.entry_count,
            slot_count=entries.slot_count,
            row_sizes=dict(zip(sizes.tolist(), counts.tolist(), strict=True)),
            exact_rows=int(exact.sum()),
            strict_common=len(projection.partition().common_student),
            relaxed_common=len(projection.partition(RELAXED_SHARE).common_student),
            reachable_columns=int(projection.reachable_columns.sum()),
            empty_rows=projection.empty_rows[projection.empty_rows < tokens].tolist(),
            metadata=entries.metadata,
            defects=diagnose(entries, pair),
            knows_tokenizers=pair is not None,
        )

    def as_row(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "shape": list(self.shape),
            "entries": self.entry_count,
            "slots": self.slot_count,
            "row_sizes": {str(size): count for size, count in self.row_sizes.items()},
            "exact_rows": self.exact_rows,
            "strict_common": self.strict_common,
            "strict_uncommon_student": self.shape[0] - self.strict_common,
            "relaxed_common": self.relaxed_common,
            "empty_rows": self.row_sizes.get(0, 0),
            "first_empty_rows": list(self.empty_rows[:ROWS_SHOWN]),
            "reachable_columns": self.reachable_columns,
            "metadata": dict(self.metadata),
            "judged_by_tokenizers": self.knows_tokenizers,
            "defects": [defect.as_row() for defect in self.defects],
        }
