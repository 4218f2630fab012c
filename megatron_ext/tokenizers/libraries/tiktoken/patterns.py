"""Regular expressions that cut text before tiktoken merges bytes.

The alternatives of a pattern stand in the order in which they are tried: words, digits, signs,
line ends, white space.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_ext.errors import TokenizerError

_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _cased_words(ending: str) -> str:
    """Words cut where lower case is followed by upper case."""
    return (
        rf"{_BEFORE_WORD}[{_UPPER}]*[{_LOWER}]+{ending}"
        rf"|{_BEFORE_WORD}[{_UPPER}]+[{_LOWER}]*{ending}"
    )


PATTERNS: Mapping[str, str] = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": "|".join(
        (
            _cased_words(""),
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
}
"""Megatron's named patterns."""

R50K = "|".join(
    (
        r"'(?:[sdmt]|ll|ve|re)",
        r" ?\p{L}++",
        r" ?\p{N}++",
        r" ?[^\s\p{L}\p{N}]++",
        r"\s++$|\s+(?!\S)|\s",
    )
)
"""GPT-2's, as r50k_base and p50k_base have it."""

CL100K = "|".join(
    (
        r"'(?i:[sdmt]|ll|ve|re)",
        rf"{_BEFORE_WORD}+\p{{L}}++",
        r"\p{N}{1,3}+",
        r" ?[^\s\p{L}\p{N}]++[\r\n]*+",
        r"\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    )
)
"""GPT-4's."""

O200K = "|".join(
    (
        _cased_words(f"{_CONTRACTION}?"),
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""GPT-4o's."""

LLAMA_3 = "|".join(
    (
        _CONTRACTION,
        rf"{_BEFORE_WORD}\p{{L}}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Llama 3's."""


def pattern_of(name: str) -> str:
    """The pattern that an option names: one of Megatron's, or a regular expression itself.

    Raises:
        TokenizerError: It is a word that names no pattern.
    """
    if re.fullmatch(r"\w+", name) and name not in PATTERNS:
        raise TokenizerError(
            "unknown tiktoken pattern",
            got=repr(name),
            expected="v1, v2 or a regular expression",
            where="pattern",
        )
    return PATTERNS.get(name, name)
