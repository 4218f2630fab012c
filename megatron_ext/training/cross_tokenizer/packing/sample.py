"""What fills one row of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.training.cross_tokenizer.aligning.aligned_text import AlignedText


@dataclass(frozen=True, slots=True)
class PackedSample:
    """Texts, or pieces of texts, one behind the other in a row and apart in attention."""

    pieces: tuple[AlignedText, ...]

    @property
    def byte_count(self) -> int:
        """Bytes of all texts."""
        return sum(piece.byte_count for piece in self.pieces)
