"""Options of building a projection from two tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from megatron_ext.errors import ProjectionError
from megatron_ext.projection.compressed_rows import check_top_k

ProjectionMethod = Literal["exact", "retokenized", "first_piece", "mined"]

_ONE_ENTRY: Final = ("first_piece", "mined")
"""Methods that leave one entry in a row."""

PIECE_DECAY = 0.1
"""What each piece weighs of the one before it: 0.9, 0.09, 0.009, ... before a row is normalised."""


@dataclass(kw_only=True, frozen=True, slots=True)
class ProjectionOptions:
    """Options of ``SparseProjection.from_tokenizers``.

    Raises:
        ProjectionError: A number that means nothing, or options that exclude each other.
    """

    method: ProjectionMethod = "retokenized"
    """What stands for a token that the teacher lacks: ``exact`` nothing; ``retokenized`` the pieces
    that the teacher spells it with, in falling shares; ``first_piece`` the first of them alone;
    ``mined`` the one token that is nearest in spelling (``nearest_tokens``)."""

    top_k: int = 4
    """Most teacher tokens in a row."""

    pieces: int | None = None
    """Most pieces of a spelling that count; ``top_k`` where None."""

    decay: float = PIECE_DECAY
    """What each piece of a spelling weighs of the one before it; 1 weighs all alike."""

    reverse_pass: bool = False
    """Also spell the tokens that the student lacks with the student's, and add these entries.
    Exact rows and control tokens stay as they are."""

    control_similarity: float | None = None
    """Least similarity of names, above 0 and at most 1, at which a control token that has neither
    role nor name at the teacher stands for another; None leaves its row empty."""

    def __post_init__(self) -> None:
        check_top_k(self.top_k)
        if self.pieces is not None and self.pieces < 1:
            raise ProjectionError(
                "no piece of a spelling counts",
                got=self.pieces,
                expected="at least 1, or None",
                where="pieces",
            )
        if not 0 < self.decay <= 1:
            raise ProjectionError(
                "the decay of pieces cannot be used",
                got=self.decay,
                expected="above 0 and at most 1",
                where="decay",
            )
        if self.control_similarity is not None and not 0 < self.control_similarity <= 1:
            raise ProjectionError(
                "the least similarity of control tokens cannot be used",
                got=self.control_similarity,
                expected="above 0 and at most 1, or None",
                where="control_similarity",
            )
        if self.method in _ONE_ENTRY and self.reverse_pass:
            raise ProjectionError(
                f"a reverse pass adds entries to rows that {self.method} keeps at one",
                got=f"method {self.method} with reverse_pass",
                fix="use the method retokenized",
            )

    @property
    def piece_limit(self) -> int:
        """Most pieces of a spelling."""
        return self.top_k if self.pieces is None else self.pieces

    @property
    def row_limit(self) -> int:
        """Most entries of a row."""
        return 1 if self.method in _ONE_ENTRY else self.top_k
