"""Base of adapters that encode the segments of a text between its control tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain, groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.tokenizers.base import MegatronTokenizerTextAbstract
from megatron_ext.tokenizers.engine import FastEncoder
from megatron_ext.tokenizers.special_tokens import ControlMatch
from megatron_ext.tokenizers.token_bytes import TokenBytes, character_starts, utf8
from megatron_ext.tokenizers.token_ids import ByteEnds, IdArray

_TELLING = 16
"""Least number of segments, all normalised, that shows a library to normalise every text."""


class SegmentTokenizer(MegatronTokenizerTextAbstract):
    """Base of an adapter that encodes text without control tokens.

    A text is cut into segments at its control tokens, whose ids and byte ends are concatenated. A
    subclass sets ``_table`` and ``_fast``.
    """

    _table: TokenBytes
    """Bytes of each id."""
    _fast: FastEncoder
    """Encoder of batches."""
    _batches_segments = True
    """Encode segments as a batch; false in a changed copy, for which no engine is proven."""

    @abstractmethod
    def _encode(self, text: str) -> tuple[list[int], Any]:
        """Ids of ``text`` [T] and a result that ``_locate`` can reuse, by the fastest call."""

    @abstractmethod
    def _locate(self, text: str, raw: bytes, encoded: Any) -> tuple[list[int], list[int]]:
        """Ids and byte ends of a ``text`` (its UTF-8 is ``raw``) that the tokens do not spell."""

    @abstractmethod
    def _encode_batch(self, texts: Sequence[str]) -> Iterable[Sequence[int] | IdArray]:
        """Ids of each text, in parallel inside the library where it can."""

    def _continued(self, *, to_the_end: bool) -> SegmentTokenizer:
        """The tokenizer of text after a control token: itself, unless the library differs there.

        Args:
            to_the_end: No other control token follows.
        """
        return self

    def _encoder(self, text: str, begin: int, end: int) -> SegmentTokenizer:
        """The tokenizer of a segment of a text."""
        return self if begin == 0 else self._continued(to_the_end=end == len(text))

    def _encode_around(
        self, text: str, matches: Iterable[ControlMatch]
    ) -> tuple[IdArray, ByteEnds]:
        """Ids and byte ends of a text with control tokens at ``matches`` and nowhere else."""
        raw = utf8(text)
        control = np.fromiter(chain.from_iterable(matches), np.int64).reshape(-1, 3)
        bounds = control[:, :2]
        # A segment, maybe empty, is before each control token and behind the last.
        begins = np.concatenate(([0], bounds[:, 1]))
        ends = np.concatenate((bounds[:, 0], [len(text)]))
        is_text = begins < ends
        begins, ends = begins[is_text], ends[is_text]
        ids, byte_ends, counts = self._encode_segments(text, begins.tolist(), ends.tolist())
        if len(raw) != len(text):
            starts = character_starts(raw)
            bounds, begins = starts[bounds], starts[begins]
        byte_ends = byte_ends + np.repeat(begins, counts)
        if len(control):
            sizes = np.ones(2 * len(control) + 1, np.int64)
            sizes[::2] = 0
            sizes[::2][is_text] = counts
            is_control = np.repeat(np.arange(len(sizes)) % 2 == 1, sizes)
            ids = _merged(ids, control[:, 2].astype(np.int32), is_control)
            byte_ends = _merged(byte_ends, bounds[:, 1], is_control)
        if len(byte_ends):
            # Text that gives no token (white space, to some) belongs to the token before it.
            byte_ends[-1] = len(raw)
        return ids, byte_ends

    def _encode_segments(
        self, text: str, begins: Sequence[int], ends: Sequence[int]
    ) -> tuple[IdArray, ByteEnds, NDArray[np.int64]]:
        """Ids, byte ends counted from the begin of each segment, and number of ids of each."""
        encoded: list[tuple[IdArray, ByteEnds, list[int]]] = []
        bounds = zip(begins, ends, strict=True)
        for encoder, places in groupby(bounds, lambda place: self._encoder(text, *place)):
            texts = [text[begin:end] for begin, end in places]
            if len(texts) > 1 and encoder._batches_segments:
                encoded += encoder._encode_as_batch(texts)
            else:
                encoded += map(encoder._encode_one, texts)
        ids = np.concatenate([np.zeros(0, np.int32), *(ids for ids, _, _ in encoded)])
        byte_ends = np.concatenate([np.zeros(0, np.int64), *(ends for _, ends, _ in encoded)])
        return ids, byte_ends, np.array([n for _, _, counts in encoded for n in counts], np.int64)

    def _encode_as_batch(self, texts: Sequence[str]) -> list[tuple[IdArray, ByteEnds, list[int]]]:
        """Results of ``_encode_one`` for texts, combined into one where possible."""
        raws = [text.encode() for text in texts]
        ids, offsets = self._fast.encode_documents(texts, raws, self._encode_each)
        ends, lossy = self._table.ends_within_each(ids, offsets, raws)
        if not lossy:
            return [(ids, ends, np.diff(offsets).tolist())]
        # A library that normalises every text has to locate the ends itself: skip the batch then.
        if len(texts) >= _TELLING:
            self._batches_segments = len(lossy) < len(texts)
        aside = set(lossy)
        return [
            self._encode_one(text)
            if i in aside
            else (ids[begin:end], ends[begin:end], [end - begin])
            for i, (text, (begin, end)) in enumerate(
                zip(texts, pairwise(offsets.tolist()), strict=True)
            )
        ]

    def _encode_one(self, text: str) -> tuple[IdArray, ByteEnds, list[int]]:
        """Ids, byte ends and number of ids of a text without control tokens."""
        ids, ends = self._encode_segment(text, text.encode())
        return ids, ends, [len(ids)]

    def _segment_ids(self, text: str, begin: int, end: int) -> list[int]:
        """Ids of a segment of a text between control tokens, which may be empty."""
        if begin >= end:
            return []
        return self._encoder(text, begin, end)._encode(text[begin:end])[0]

    def _encode_each(self, texts: Sequence[str]) -> Iterable[Sequence[int] | IdArray]:
        """Ids of each of some short texts."""
        return [self._encode(text)[0] for text in texts]

    def _encode_segment(self, text: str, raw: bytes) -> tuple[IdArray, ByteEnds]:
        """Ids and byte ends of a text without control tokens; its UTF-8 is ``raw``."""
        ids, encoded = self._encode(text)
        array = np.array(ids, np.int32)
        ends = self._table.ends_within(array, raw)
        if ends is not None:
            return array, ends
        ids, located = self._locate(text, raw, encoded)
        return np.array(ids, np.int32), np.array(located, np.int64)


def _merged(rest: NDArray[Any], chosen: NDArray[Any], is_chosen: NDArray[np.bool_]) -> NDArray[Any]:
    """An array of the values ``chosen`` at the mask ``is_chosen``, and ``rest`` elsewhere."""
    merged = np.empty(len(is_chosen), rest.dtype)
    merged[is_chosen] = chosen
    merged[~is_chosen] = rest
    return merged
