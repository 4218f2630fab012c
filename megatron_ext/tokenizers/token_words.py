"""Whether tokens spell a text, eight bytes at a time. V vocabulary, T tokens, N bytes.

A word is eight bytes as one number. Nearly all tokens are no longer than a word, so comparing them
with a text takes one comparison for each instead of one for each of their bytes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.tokenizers.token_ids import IdArray

Words = NDArray[np.uint64]

_WORD: Final = 8
_MASKS: Final[Words] = np.array([(1 << 8 * count) - 1 for count in range(_WORD + 1)], np.uint64)
"""What keeps the first 0 to 8 bytes of a word."""


class TokenWords:
    """The bytes of every id, to be compared with texts.

    Args:
        buffer: [N] the bytes of all ids, one after another.
        starts: [V] where the bytes of each id begin.
        lengths: [V] number of bytes of each id.
    """

    def __init__(
        self,
        buffer: NDArray[np.uint8],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> None:
        self._words = _words_of(buffer.tobytes())
        self._starts = starts
        self._lengths = lengths
        self._first_masks = _MASKS[np.minimum(lengths, _WORD)]
        self._first_words = self._words[starts] & self._first_masks

    def differ(self, ids: IdArray, begins: NDArray[np.int64], text: bytes) -> NDArray[np.bool_]:
        """Which tokens are not what ``text`` has where they begin.

        Args:
            ids: [T]
            begins: [T] byte of the text where each begins, at most N.
            text: N bytes.
        """
        words = _words_of(text)
        differing = words[begins]
        differing ^= self._first_words.take(ids)
        differing &= self._first_masks.take(ids)
        differ: NDArray[np.bool_] = differing != 0
        longer = np.flatnonzero(self._lengths.take(ids) > _WORD)
        done = _WORD
        while len(longer):
            left = self._lengths[ids[longer]] - done
            there = words[np.minimum(begins[longer] + done, len(text))]
            here = self._words[self._starts[ids[longer]] + done]
            differ[longer] |= ((there ^ here) & _MASKS[np.minimum(left, _WORD)]) != 0
            done += _WORD
            longer = longer[left > _WORD]
        return differ


def _words_of(content: bytes) -> Words:
    """The word that begins at each of N bytes, and behind the last [N + 1]; zeros follow them."""
    padded = content + bytes(_WORD)
    words: Words = np.ndarray((len(content) + 1,), "<u8", padded, strides=(1,))
    return words
