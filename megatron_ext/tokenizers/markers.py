"""Tokens of the vocabulary itself that look like control tokens, and may be used as such.

Some vocabularies hold tokens that every text spells and that a template may write as marks all the
same: ``<unused0>`` in Gemma's, ``[REF]`` in Mistral's. They are ordinary vocabulary, as ``<table>``
beside them is, until a template writes one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from megatron_ext.tokenizers.control_tokens import ControlMatch, ControlToken
from megatron_ext.tokenizers.token_bytes import character_starts
from megatron_ext.tokenizers.token_ids import ByteEnds, IdArray

_MARKER = re.compile(r"[^\w\s▁]\S*\w\S*[^\w\s▁]")


def markers(tokens: Iterable[ControlToken]) -> list[ControlToken]:
    """Those of ``tokens`` that are a word in brackets of some kind.

    White space, words, digits and punctuation are written by templates without meaning a mark, and
    no content could do without them.
    """
    return [token for token in tokens if _MARKER.fullmatch(token.name)]


def are_forged(text: str, written: Sequence[ControlMatch], ids: IdArray, ends: ByteEnds) -> bool:
    """Whether text elsewhere has made a token that a template has written.

    Args:
        text: The whole text.
        written: Markers in the places where control tokens are read.
        ids: Ids of the text [T].
        ends: Byte ends of the text [T].
    """
    starts = character_starts(text.encode())
    places = starts[[match.end for match in written]]
    marks = np.isin(ids, [match.token_id for match in written])
    return not np.isin(ends[marks], places).all()
