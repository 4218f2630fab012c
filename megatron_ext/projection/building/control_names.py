"""How alike the names of two control tokens are: ``<|eot_id|>``, ``<end_of_turn>``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher

CHARACTER_SHARE = 0.6
WORD_SHARE = 0.4
"""What matching characters and common words count for in a similarity, which is at most 1."""

_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"[^\W\d_]{3,}")


def most_similar(
    name: str, candidates: Mapping[int, str], *, min_similarity: float, most: int
) -> dict[int, float]:
    """The candidates whose names are most like ``name``, the most similar first.

    Of names that differ in a number alone (``<unused0>``, ``<unused1>``) only the lowest id counts.

    Args:
        name: A control token of the student.
        candidates: Teacher id -> name.
        min_similarity: Least similarity that counts.
        most: Most candidates to return; of equally similar ones the lowest ids.

    Returns:
        Teacher id -> similarity.
    """
    matcher = SequenceMatcher(autojunk=False)
    matcher.set_seq2(name.casefold())
    words = _words(name)
    found: list[tuple[float, int]] = []
    for teacher_id, candidate in _one_of_each_number(candidates).items():
        matcher.set_seq1(candidate.casefold())
        similarity = CHARACTER_SHARE * matcher.ratio() + WORD_SHARE * _jaccard(
            words, _words(candidate)
        )
        if similarity >= min_similarity:
            found.append((-similarity, teacher_id))
    return {teacher_id: -negative for negative, teacher_id in sorted(found)[:most]}


def _one_of_each_number(names: Mapping[int, str]) -> dict[int, str]:
    first: dict[str, int] = {}
    for token_id in sorted(names):
        first.setdefault(_NUMBER.sub("0", names[token_id]), token_id)
    return {token_id: names[token_id] for token_id in first.values()}


def _words(name: str) -> frozenset[str]:
    return frozenset(_WORD.findall(name.casefold()))


def _jaccard(left: frozenset[str], right: frozenset[str]) -> float:
    return len(left & right) / len(left | right) if left or right else 0.0
