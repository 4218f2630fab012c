"""The text of a batch as characters, found by bytes. M characters, C chunks, D documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class BatchText:
    """The characters of a batch, and which of them bytes belong to.

    Args:
        raws: UTF-8 of its documents.

    Attributes:
        code_points: The characters, one after another [M].
        documents: First character of each document [D].
    """

    def __init__(self, raws: Sequence[bytes]) -> None:
        raw = b"".join(raws)
        self.code_points = np.frombuffer(raw.decode().encode("utf-32-le"), np.uint32)
        self._is_ascii = len(self.code_points) == len(raw)
        if not self._is_ascii:
            is_start = (np.frombuffer(raw, np.uint8) & 0xC0) != 0x80
            self._character_at = np.cumsum(is_start) - 1
        begins = np.cumsum([0, *map(len, raws)], dtype=np.int64)[:-1]
        self.documents = self._of_bytes(begins)

    def characters(self, bounds: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
        """First character and one past the last of byte ranges that are not empty [C, 2]."""
        return self._of_bytes(bounds[:, 0]), self._of_bytes(bounds[:, 1] - 1) + 1

    def _of_bytes(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        return at if self._is_ascii else self._character_at[at]
