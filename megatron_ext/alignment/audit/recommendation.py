"""Which objective suits a pair, from what was counted.

Where most of the text is in 1:1 chunks it is projected KL: of the objectives that were compared
(docs/losses.md, "What came out") it is the one by which a student learned more than without a
teacher in two seeds. Text whose chunks hold several tokens was not compared; there it is ALM, which
scores chunks by their likelihood. The thresholds are our judgement, not measurements: an objective
is chosen well by comparing runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from megatron_ext.alignment.audit.coverage_row import CoverageRow, share_in_words

ObjectiveName = Literal["kl", "projected_kl", "chunk_likelihood"]

LEAST_ONE_TO_ONE_BYTES: Final = 0.5
"""Share of bytes in 1:1 chunks below which chunks are to be compared by likelihood: most of the
text would be compared by averages over several tokens, which are no prediction of anything."""

MOST_MANY_TO_MANY_BYTES: Final = 0.1
"""Share of bytes in n:m chunks above which the same holds: neither side has a single prediction
there, so that no projection from one vocabulary to the other describes the chunk."""

MOST_SPLIT_NUMBERS: Final = 0.05
"""Share of chunks in numbers of several digits that may be other than 1:1. An objective on the
exactly common vocabulary does not see a number that the other side spells otherwise; one in twenty
is what a mathematical text can do without."""

LEAST_NUMBER_CHUNKS: Final = 100
"""Chunks in numbers of several digits below which the text says nothing of numbers: the standard
error of a share of 5 % over 100 chunks is 2 %."""

_LONG_NUMBERS: Final = ("digits-2", "digits-3", "digits-4+")

_MEASURED: Final = (
    "On grade-school mathematics a student learned more by it than without a teacher, in both of "
    "two seeds; by hybrid KL, GOLD and ULD it did not (docs/losses.md)."
)
_NOT_MEASURED: Final = "On such text no objectives have been compared: compare runs."


@dataclass(frozen=True, slots=True)
class Recommendation:
    """An objective, in words."""

    objective: ObjectiveName | None
    """None where nothing aligns."""
    title: str
    """The objective and why, in a sentence."""
    reasons: tuple[str, ...]
    """What it rests on, a sentence each."""

    def as_row(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


def recommend(
    total: CoverageRow, classes: Sequence[CoverageRow], *, same_vocabulary: bool
) -> Recommendation:
    """The objective for a pair.

    Args:
        total: All chunks.
        classes: The chunks by class.
        same_vocabulary: The two vocabularies hold the same bytes under the same ids.
    """
    if not total.counts.chunks:
        return Recommendation(
            None,
            "No objective: no token of the student meets one of the teacher.",
            ("There is no chunk.",),
        )
    one_to_one = (
        f"{share_in_words(total.one_to_one_share)} of the {total.counts.chunks:,} chunks are 1:1, "
        f"and {share_in_words(total.one_to_one_byte_share)} of the bytes lie in them."
    )
    if same_vocabulary and total.counts.one_to_one == total.counts.chunks:
        return Recommendation(
            "kl",
            "KL between the two predictions, token by token: the tokenizers are the same.",
            ("Both vocabularies have the same bytes under every id.", one_to_one),
        )
    many_to_many = (
        f"{share_in_words(total.many_to_many_byte_share)} of the bytes lie in n:m chunks, of "
        "several tokens on both sides."
    )
    if (
        total.one_to_one_byte_share < LEAST_ONE_TO_ONE_BYTES
        or total.many_to_many_byte_share > MOST_MANY_TO_MANY_BYTES
    ):
        return Recommendation(
            "chunk_likelihood",
            "Chunk likelihood (ALM): too much of the text is in chunks of several tokens to "
            "compare predictions token by token.",
            (one_to_one, many_to_many, _NOT_MEASURED),
        )
    return _projected(classes, one_to_one)


def _projected(classes: Sequence[CoverageRow], one_to_one: str) -> Recommendation:
    numbers = [row for row in classes if row.name in _LONG_NUMBERS]
    chunks = sum(row.counts.chunks for row in numbers)
    split = chunks - sum(row.counts.one_to_one for row in numbers)
    title = (
        "Projected KL: most of the text is in 1:1 chunks, where it has beaten training without a "
        "teacher."
    )
    if chunks < LEAST_NUMBER_CHUNKS:
        return Recommendation("projected_kl", title, (one_to_one, _MEASURED))
    if split / chunks > MOST_SPLIT_NUMBERS:
        title = (
            "Projected KL: the tokenizers split numbers differently, and an objective on the "
            "exactly shared vocabulary would not train these tokens."
        )
    numbers_cut = (
        f"{share_in_words(split / chunks)} of the {chunks:,} chunks in numbers of several digits "
        "are not 1:1."
    )
    return Recommendation("projected_kl", title, (numbers_cut, one_to_one, _MEASURED))
