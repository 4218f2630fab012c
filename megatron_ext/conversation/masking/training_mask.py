"""Which tokens are trained, from the characters that are.

Shape letters: T tokens, R ranges, N bytes of the text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_ext.conversation.masking.answers import Range
from megatron_ext.conversation.protocol import ByteEnds
from megatron_ext.conversation.rendering.provenance import Rendered


def trained_tokens(
    rendered: Rendered, ranges: Sequence[Range], byte_ends: ByteEnds
) -> NDArray[np.bool_]:
    """Tokens that lie in the trained characters [T].

    A token is trained when all of its bytes are: one that an answer shares with other text is not,
    because the prompt would end within it. The exceptions are tokens that only the model can write:
    white space of the template with an answer's first word (``" Hello"``), and the end of an answer
    with white space of the template. A token without bytes goes with the character after it.

    Args:
        rendered: The conversation, of N bytes.
        ranges: Trained characters, in order and apart [R].
        byte_ends: Where each token ends [T].
    """
    trained = np.zeros(len(byte_ends), np.bool_)
    if not ranges or not len(byte_ends):
        return trained
    offsets = rendered.byte_offsets
    bounds = offsets[np.array(ranges, np.int64)]
    starts, stops = bounds[:, 0], bounds[:, 1]
    begins = np.concatenate(([0], byte_ends[:-1]))
    # The last range that begins before the token ends; an empty token counts as one byte. Both are
    # in order, and ranges are few: these are looked up, and counted along the tokens.
    first_behind = np.searchsorted(np.maximum(byte_ends, begins + 1), starts, side="right")
    nearest = np.bincount(first_behind, minlength=len(begins))[: len(begins)].cumsum() - 1
    is_near = nearest >= 0
    nearest = np.maximum(nearest, 0)
    trained[:] = is_near & (begins >= starts[nearest]) & (byte_ends <= stops[nearest])
    trained &= (byte_ends > begins) | (begins < stops[nearest])
    overhangs = (
        (begins >= starts[nearest]) & (begins < stops[nearest]) & (byte_ends > stops[nearest])
    )
    for token in np.flatnonzero(is_near & overhangs).tolist():
        stop, end = np.searchsorted(offsets, (stops[nearest[token]], byte_ends[token]))
        trained[token] = _is_own_space(rendered, int(stop), int(end))
    straddles = is_near & (begins < starts[nearest]) & (byte_ends <= stops[nearest])
    for token in np.flatnonzero(straddles).tolist():
        begin, start, end = np.searchsorted(
            offsets, (begins[token], starts[nearest[token]], byte_ends[token]), side="right"
        )
        trained[token] = _is_first_word(rendered, int(begin) - 1, int(start) - 1, int(end) - 1)
    return trained


def _is_own_space(rendered: Rendered, begin: int, end: int) -> bool:
    """Whether there is nothing in ``[begin, end)`` but white space of the template."""
    first = bisect_left(rendered.spans, (begin + 1,)) - 1
    last = bisect_left(rendered.spans, (end,))
    spans = rendered.spans[first:last]
    return rendered.text[begin:end].isspace() and all(span.is_template for span in spans)


def _is_first_word(rendered: Rendered, begin: int, start: int, end: int) -> bool:
    """Whether template white space in ``[begin, start)`` is followed by something visible."""
    text = rendered.text
    if not text[begin:start].isspace() or not text[start:end].strip():
        return False
    before = rendered.spans[bisect_left(rendered.spans, start, key=lambda span: span.end)]
    return before.is_template and before.start <= begin
