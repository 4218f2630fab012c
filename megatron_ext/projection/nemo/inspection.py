"""Inspection of a file's entries: numbers, defects, and the projection if they are sound.

Vs rows, Vt columns. Entries are sound if no mass has to move for them to be a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from megatron_ext.errors import ProjectionError
from megatron_ext.projection.builder import identity
from megatron_ext.projection.compressed_rows import check_built_for
from megatron_ext.projection.nemo.diagnosis import ROWS_SHOWN, Defect, diagnose
from megatron_ext.projection.nemo.legacy_file import read_legacy_file
from megatron_ext.projection.nemo.loose_entries import LooseEntries
from megatron_ext.projection.nemo.tokenizer_pair import TokenizerPair
from megatron_ext.projection.projection_matrix import ProjectionMatrix
from megatron_ext.tokenizers.base import ByteTokenizer

Tell = Callable[[str], None]
"""Callback for a warning, one line, that a user should read."""

_HARMLESS: Final = ("no_strict_rows", "lost_exact_rows", "off_support", "lost_rows")
"""Kinds of defect that may be intended, or do not exist in our own file format."""


def load_legacy_matrix(
    path: Path, student: ByteTokenizer | None, teacher: ByteTokenizer | None, tell: Tell
) -> ProjectionMatrix:
    """Load a ``.pt`` file for ``SparseProjection.load``.

    A file that does not name its vocabularies is checked by the tokenizers, with a warning of what
    cannot be checked.

    Raises:
        ProjectionError: No such file, one for another pair, or one with mass in wrong places.
        MissingDependencyError: torch is not installed.
    """
    entries = read_legacy_entries(path, student, teacher)
    pair = None
    given = {"student": student, "teacher": teacher}
    unnamed = [
        role
        for role, tokenizer in given.items()
        if tokenizer is not None and f"{role}_fingerprint" not in entries.metadata
    ]
    if unnamed and student is not None and teacher is not None:
        pair = TokenizerPair(student, teacher)
    if unnamed:
        checked = "by sizes and the bytes of tokens alone" if pair is not None else "by nothing"
        whose = " and of the ".join(unnamed)
        tell(
            f"{path}: no fingerprint of the {whose}: that it is for this pair is checked {checked}"
        )
    return sound_projection(entries, pair, where=path, tell=lambda text: tell(f"{path}: {text}"))


def read_legacy_entries(
    path: Path, student: ByteTokenizer | None, teacher: ByteTokenizer | None
) -> LooseEntries:
    """Read the entries of a ``.pt`` file, checked to be for these tokenizers if it names any.

    Raises:
        ProjectionError: It is no such file, or it names another vocabulary.
    """
    entries = read_legacy_file(path)
    for role, tokenizer in (("student", student), ("teacher", teacher)):
        # Files of the original tools name no vocabulary.
        if tokenizer is not None and f"{role}_fingerprint" in entries.metadata:
            check_built_for(path, entries.metadata, role, tokenizer)
    return entries


def sound_projection(
    entries: LooseEntries,
    pair: TokenizerPair | None,
    *,
    where: Path,
    tell: Tell,
    metadata: Mapping[str, str] | None = None,
) -> ProjectionMatrix:
    """Convert entries to a projection, of ``pair`` where it is given.

    Args:
        entries: Entries of the file.
        pair: Tokenizers that it is for.
        where: The file, for errors.
        tell: Called for defects that are left as they are.
        metadata: Metadata of the projection; by default that of the entries.

    Raises:
        ProjectionError: Mass in wrong places.
    """
    if pair is not None and entries.width is None and not entries.slot_count:
        # A mapping of pairs does not contain the sizes of the vocabularies.
        entries = replace(entries, height=max(entries.height, pair.shape[0]))
    for defect in diagnose(entries, pair):
        if defect.kind not in _HARMLESS:
            raise ProjectionError(
                "the file holds no sound projection",
                where=where,
                got=defect,
                fix="build one from the two tokenizers: megatron-ext projection build",
            )
        if defect.kind != "no_strict_rows":
            tell(str(defect))
    metadata = dict(entries.metadata if metadata is None else metadata)
    metadata.pop("enable_scale_trick", None)
    exact = entries.row_sizes == 1 if entries.is_exact_row is None else entries.is_exact_row
    if pair is None:
        return entries.projection(
            (entries.height, entries.least_width),
            vocab_sizes=entries.vocab_sizes,
            is_exact_row=exact,
            metadata=metadata,
        )
    same = np.zeros(entries.height, dtype=np.bool_)
    same[entries.rows[pair.is_same_token(entries)]] = True
    same[: pair.shape[0]] &= pair.retokenized.is_exact_row
    return entries.projection(
        (entries.height, max(entries.width or 0, pair.shape[1])),
        vocab_sizes=pair.shape,
        is_exact_row=exact & same,
        metadata={**metadata, **identity(pair.student, pair.teacher)},
    )


RELAXED_SHARE: Final = 0.6
"""Least share for which the original loss's relaxed rule counts two tokens as one."""


@dataclass(kw_only=True, frozen=True, slots=True, eq=False)
class Inspection:
    """Numbers of a file."""

    shape: tuple[int, int]
    entry_count: int
    slot_count: int
    """Slots of a table; 0 where the file is no table."""
    row_sizes: Mapping[int, int]
    """Number of rows by their number of different columns."""
    exact_rows: int
    """Number of rows whose token is exactly one teacher token."""
    strict_common: int
    """Number of common tokens by exact rows; several rows with one column count once."""
    relaxed_common: int
    """Number of common tokens by a share of 0.6 or more."""
    reachable_columns: int
    empty_rows: Sequence[int]
    """Student ids that map to no teacher token, without known padding, ascending."""
    metadata: Mapping[str, str]
    defects: list[Defect]
    knows_tokenizers: bool

    @classmethod
    def of(cls, entries: LooseEntries, pair: TokenizerPair | None = None) -> Inspection:
        """Numbers of ``entries``, by the tokenizers where they are given."""
        shape = (entries.height, entries.least_width)
        one_hot = entries.row_sizes == 1
        exact = one_hot if entries.is_exact_row is None else one_hot & entries.is_exact_row
        if entries.strict_rows is not None:
            exact = exact & entries.strict_rows
        projection = entries.projection(shape, is_exact_row=exact)
        vocab_sizes = entries.vocab_sizes if pair is None else pair.shape
        tokens = entries.height if vocab_sizes is None else vocab_sizes[0]
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
        """Dictionary for JSON."""
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
