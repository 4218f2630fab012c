"""A text as a row of symbols: characters, and control tokens between. M symbols, R runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.bridging.symbol_match import MAX_CODE_POINT, Run, Symbols
from megatron_ext.alignment.byte_alignment import ByteEnds
from megatron_ext.alignment.control_pairs import NO_CLASS
from megatron_ext.alignment.tokens import Tokens

Ranges = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SymbolRow:
    """Characters of a text and, where they were put in, control tokens."""

    values: Symbols
    """[M] code points; a byte that is no part of a character is a lone surrogate, and a control
    token the number of its class past the last code point."""

    widths: NDArray[np.int64]
    """[M] bytes of each; a control token has none."""

    @classmethod
    def of(cls, text: bytes) -> SymbolRow:
        """The characters of a text."""
        decoded = text.decode(errors="surrogateescape")
        values = np.frombuffer(decoded.encode("utf-32-le", "surrogatepass"), np.uint32)
        widths = 1 + (values >= 0x80) + (values >= 0x800).astype(np.int64) + (values >= 0x10000)
        widths[(values >= 0xDC80) & (values <= 0xDCFF)] = 1
        return cls(values, widths)

    @property
    def byte_count(self) -> int:
        """Bytes of the text."""
        return int(self.widths.sum())

    def with_control(
        self, tokens: Tokens, classes: NDArray[np.int32]
    ) -> tuple[SymbolRow, ByteEnds]:
        """The row with the control tokens that have a class, and the tokens' ends with it.

        Such a token covers one byte then, so that it is told from its neighbours. One that stands
        within a character is left out.

        Args:
            tokens: T tokens that decode to the text.
            classes: [V] class of each id.
        """
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.widths)])
        begins = np.concatenate([np.zeros(1, np.int64), tokens.ends[:-1]])[: len(tokens.ends)]
        kind = classes[tokens.ids]
        is_written = (tokens.ends == begins) & (kind != NO_CLASS)
        places = starts.searchsorted(tokens.ends[is_written])
        stands_between = starts[places] == tokens.ends[is_written]
        is_written[np.flatnonzero(is_written)[~stands_between]] = False
        symbols = (kind[is_written].astype(np.int64) + MAX_CODE_POINT + 1).astype(np.uint32)
        places = places[stands_between]
        row = SymbolRow(np.insert(self.values, places, symbols), np.insert(self.widths, places, 0))
        return row, tokens.ends + np.cumsum(is_written)

    def ranges(self, runs: Sequence[Run], side: int, *, control_width: int = 0) -> Ranges:
        """[R, 2] bytes of each run; ``side`` 0 is the run's first row, 1 its second."""
        widths = np.where(self.values > MAX_CODE_POINT, control_width, self.widths)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)])
        table = np.array(runs, dtype=np.int64).reshape(-1, 3)
        return np.stack([offsets[table[:, side]], offsets[table[:, side] + table[:, 2]]], axis=1)
