"""What a conversation asks of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

IdArray = NDArray[np.int32]
ByteEnds = NDArray[np.int64]


class ConversationTokenizer(Protocol):
    """A tokenizer of any library."""

    @property
    def chat_template(self) -> str | None:
        """The tokenizer's own template, as Jinja source."""

    @property
    def special_token_names(self) -> Mapping[str, str]:
        """``{"bos_token": "<s>", ...}``: those of bos, eos, pad, unk ... that there are."""

    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def pad_id(self) -> int | None: ...
    @property
    def unk_id(self) -> int | None: ...

    def token_to_id(self, token: str) -> int:
        """Id of a token by its name; KeyError when the vocabulary lacks it."""

    def is_control(self, token_id: int) -> bool:
        """Whether the id is a control token: special, or added to the vocabulary."""

    def encode_with_control_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[IdArray, ByteEnds]:
        """Ids [T] and where each ends in ``text.encode()`` [T].

        Control tokens are recognised only where they lie whole inside one of ``spans``: half-open
        character ranges, in order and apart.
        """
