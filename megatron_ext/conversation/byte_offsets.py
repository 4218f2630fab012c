"""Where each character of a text begins in its UTF-8."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def byte_offsets(text: str) -> NDArray[np.int64]:
    """Byte at which each character of ``text`` begins and, last, its number of bytes.

    Returns:
        [characters + 1], ascending.
    """
    if text.isascii():
        return np.arange(len(text) + 1)
    is_start = (np.frombuffer(text.encode(), np.uint8) & 0xC0) != 0x80
    return np.append(np.flatnonzero(is_start), len(is_start))
