"""A tokenizer of bytes that knows all markers of a template as control tokens."""

import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from megatron_ext.conversation.message import ByteEnds, IdArray
from tests.conversation.byte_tokenizer import ByteTokenizer

_MARKER = re.compile(
    "|".join(
        (
            r"<\|[^|<> {}]+\|>",
            r"<｜[^｜<> {}]+｜>",
            r"</?[\w:]+>",
            r"\[/?[A-Z_]{3,}\]",
            r"\]~!?b[\]\[]",
            r"\[e~\[",
        )
    )
)
"""What looks like a marker in the source of a template."""

_ROLES = ("<s>", "</s>", "<unk>", "<pad>")


class MarkerTokenizer(ByteTokenizer):
    """``ByteTokenizer`` for long texts: markers are found at once, and bytes are read as they are.

    Args:
        source: A template, which becomes the tokenizer's own.
        markers: More names of control tokens, which the template puts together.
    """

    def __init__(self, source: str, markers: Sequence[str] = ()) -> None:
        names = sorted({*_MARKER.findall(source), *markers, *_ROLES})
        super().__init__(source, control_tokens=names)

    @cached_property
    def _names(self) -> re.Pattern[str]:
        longest_first = sorted(self._control, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    def encode_with_control_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[IdArray, ByteEnds]:
        ids: list[np.ndarray] = []
        lengths: list[np.ndarray] = []
        done = 0

        def add_bytes(until: int) -> None:
            raw = np.frombuffer(text[done:until].encode(), np.uint8)
            ids.append(raw.astype(np.int32))
            lengths.append(np.ones(len(raw), np.int64))

        for start, stop in spans:
            for match in self._names.finditer(text, start, stop):
                add_bytes(match.start())
                ids.append(np.array([self._control[match[0]]], np.int32))
                lengths.append(np.array([len(match[0].encode())], np.int64))
                done = match.end()
        add_bytes(len(text))
        return np.concatenate(ids), np.cumsum(np.concatenate(lengths))
