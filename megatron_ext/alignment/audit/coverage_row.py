"""Chunk counts by script and class, and token counts of one tokenizer. T tokens, C chunks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.alignment import CHUNK_KINDS, ChunkCounts, tokens_per_chunk
from megatron_ext.alignment.text_tokens import TextTokens
from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.base import ByteTokenizer

MEASURES = 4
"""Number of sums that ``CoverageTally`` keeps: chunks, student tokens, teacher tokens, bytes."""


def share_in_words(share: float) -> str:
    """A share in percent; ``0.0%`` and ``100.0%`` only where it is exactly that."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return ">99.9%" if 0.9995 <= share < 1 else f"{share:.1%}"


@dataclass(kw_only=True, frozen=True, slots=True)
class CoverageRow:
    """The chunks of a script, of a class or of the whole text."""

    name: str
    counts: ChunkCounts
    student_tokens: int
    """Student tokens in these chunks."""
    teacher_tokens: int
    byte_count: int
    """Bytes of the text in these chunks."""
    one_to_one_bytes: int
    """Bytes in chunks of one token on both sides."""
    many_to_many_bytes: int
    """Bytes in chunks of several tokens on both sides."""

    @property
    def one_to_one_share(self) -> float:
        """Share of 1:1 among the chunks, of which there is at least one."""
        return self.counts.one_to_one / self.counts.chunks

    @property
    def one_to_one_byte_share(self) -> float:
        """Share of the bytes that lie in 1:1 chunks."""
        return self.one_to_one_bytes / self.byte_count

    @property
    def many_to_many_byte_share(self) -> float:
        """Share of the bytes that lie in n:m chunks."""
        return self.many_to_many_bytes / self.byte_count

    def as_row(self) -> dict[str, Any]:
        """The row as a JSON object; ratios are absent where there is no chunk."""
        chunks = self.counts.chunks
        row: dict[str, Any] = {
            "name": self.name,
            "chunks": chunks,
            "chunk_counts": asdict(self.counts),
            "chunk_shares": self.counts.shares(),
            "student_tokens": self.student_tokens,
            "teacher_tokens": self.teacher_tokens,
            "bytes": self.byte_count,
            "one_to_one_bytes": self.one_to_one_bytes,
            "many_to_many_bytes": self.many_to_many_bytes,
        }
        if chunks:
            row |= {
                "student_tokens_per_chunk": self.student_tokens / chunks,
                "teacher_tokens_per_chunk": self.teacher_tokens / chunks,
                "bytes_per_chunk": self.byte_count / chunks,
                "one_to_one_byte_share": self.one_to_one_byte_share,
            }
        return row


class CoverageTally:
    """Sums over chunks, by script and class.

    Args:
        scripts: Number of scripts.
        classes: Number of classes.
    """

    def __init__(self, scripts: int, classes: int) -> None:
        self._sums = np.zeros((scripts, classes, len(CHUNK_KINDS), MEASURES), np.int64)

    def add(
        self,
        script: NDArray[np.uint8],
        text_class: NDArray[np.uint8],
        student_size: NDArray[np.int64],
        teacher_size: NDArray[np.int64],
        byte_count: NDArray[np.int64],
    ) -> None:
        """Count chunks; every array is [C]."""
        cells = self._sums.shape[:3]
        size = 2 * (student_size > 1) + (teacher_size > 1)
        cell = (script.astype(np.int64) * cells[1] + text_class) * len(CHUNK_KINDS) + size
        for measure, weights in enumerate((None, student_size, teacher_size, byte_count)):
            # Weighted counts are doubles, exact up to 2 ** 53 in one call.
            sums = np.bincount(cell, weights, minlength=int(np.prod(cells)))
            self._sums[..., measure] += sums.astype(np.int64).reshape(cells)

    def total(self, *, student_unaligned: int, teacher_unaligned: int) -> CoverageRow:
        """All chunks, and the tokens in none."""
        return _row(
            "all",
            self._sums.sum(axis=(0, 1)),
            student_unaligned=student_unaligned,
            teacher_unaligned=teacher_unaligned,
        )

    def scripts(self, names: tuple[str, ...]) -> list[CoverageRow]:
        """A row for each script that occurs, most chunks first."""
        rows = [_row(name, sums) for name, sums in zip(names, self._sums.sum(axis=1), strict=True)]
        present = [row for row in rows if row.counts.chunks]
        return sorted(present, key=lambda row: -row.counts.chunks)

    def classes(self, names: tuple[str, ...]) -> list[CoverageRow]:
        """A row for each class that occurs, in the order of the classes."""
        rows = [_row(name, sums) for name, sums in zip(names, self._sums.sum(axis=0), strict=True)]
        return [row for row in rows if row.counts.chunks]


def _row(name: str, sums: NDArray[np.int64], **unaligned: int) -> CoverageRow:
    """A row from sums [CHUNK_KINDS, MEASURES]."""
    kinds = dict(zip(CHUNK_KINDS, sums[:, 0].tolist(), strict=True))
    _, student_tokens, teacher_tokens, byte_count = sums.sum(axis=0).tolist()
    return CoverageRow(
        name=name,
        counts=ChunkCounts(**kinds, **unaligned),
        student_tokens=student_tokens,
        teacher_tokens=teacher_tokens,
        byte_count=byte_count,
        one_to_one_bytes=int(sums[0, 3]),
        many_to_many_bytes=int(sums[3, 3]),
    )


@dataclass(frozen=True, slots=True)
class SideReport:
    """Token counts of one tokenizer over the audited text."""

    vocab_size: int
    tokens: int
    bytes_per_token: float
    unknown_tokens: int
    """Unknown tokens: text that the tokenizer cannot represent."""
    unknown_bytes: int
    """Bytes that the unknown tokens cover."""
    longest_chunk: int
    """Most tokens of this side in one chunk."""


class SideTally:
    """Running token counts of one tokenizer.

    Args:
        tokenizer: The tokenizer.

    Attributes:
        unaligned: Number of its tokens in no chunk.
    """

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self.unaligned = 0
        self._tokenizer = tokenizer
        self._unknown = tokenizer.unk_id
        self._tokens = self._unknown_tokens = self._unknown_bytes = self._longest = 0

    def refusal(self, text: str) -> str | None:
        """Reason why the tokenizer refuses a text; None where it takes it."""
        try:
            self._tokenizer.text_to_ids(text)
        except TokenizerError as error:
            return str(error)
        return None

    def count(self, encoded: TextTokens) -> None:
        """Count the tokens of a batch, and the unknown ones among them."""
        self._tokens += len(encoded.ids)
        self.unaligned += len(encoded.ids)
        if self._unknown is None:
            return
        unknown = np.flatnonzero(encoded.ids == self._unknown)
        self._unknown_tokens += len(unknown)
        self._unknown_bytes += int(encoded.widths[unknown].sum()) if len(unknown) else 0

    def count_chunks(self, chunk_id: NDArray[np.int32], chunk_count: int) -> NDArray[np.int64]:
        """Count the tokens of chunks; returns the number in each chunk of the batch [C]."""
        sizes = tokens_per_chunk(chunk_id, chunk_count)
        self.unaligned -= int(sizes.sum())
        self._longest = max(self._longest, int(sizes.max(initial=0)))
        return sizes

    def report(self, byte_count: int) -> SideReport:
        """The counts over a text of ``byte_count`` bytes."""
        return SideReport(
            vocab_size=self._tokenizer.vocab_size,
            tokens=self._tokens,
            bytes_per_token=byte_count / self._tokens if self._tokens else float("nan"),
            unknown_tokens=self._unknown_tokens,
            unknown_bytes=self._unknown_bytes,
            longest_chunk=self._longest,
        )
