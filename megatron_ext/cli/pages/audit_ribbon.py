"""Both tokenizations of a text, chunk by chunk, for the page. T tokens, C chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from megatron_ext.alignment import TokenAligner
from megatron_ext.alignment.audit import AuditDocument
from megatron_ext.alignment.chunk_places import alignment_of
from megatron_ext.cli.pages.token_view import TokenView, token_views
from megatron_ext.tokenizers.base import ByteTokenizer

_BYTES_IN_TITLE: Final = 12
_KINDS: Final[Mapping[tuple[bool, ...], str]] = {
    (True, True): "1:1",
    (True, False): "1:n",
    (False, True): "n:1",
    (False, False): "n:m",
}
"""Name by whether each side has one token."""


@dataclass(frozen=True, slots=True)
class RibbonChunk:
    """A chunk, or tokens that are in none."""

    student: tuple[TokenView, ...]
    teacher: tuple[TokenView, ...]
    is_aligned: bool

    @property
    def kind(self) -> str:
        """How many student tokens meet how many of the teacher's; ``none`` outside of chunks."""
        if not self.is_aligned:
            return "none"
        is_one = tuple(
            sum(view.end > view.begin for view in side) == 1
            for side in (self.student, self.teacher)
        )
        return _KINDS[is_one]

    @property
    def is_one_to_one(self) -> bool:
        """One token on both sides."""
        return self.kind == "1:1"

    @property
    def breaks_line(self) -> bool:
        """The text goes on in the next line."""
        return any(view.covered.endswith(b"\n") for view in self.student[-1:])


@dataclass(frozen=True, slots=True)
class Ribbon:
    """A document as chunks."""

    place: str
    chunks: tuple[RibbonChunk, ...]


def ribbons(
    documents: Sequence[AuditDocument],
    student: ByteTokenizer,
    teacher: ByteTokenizer,
    *,
    most_bytes: int,
) -> Iterator[Ribbon]:
    """The documents as chunks, up to so many bytes; the last one is cut behind a character."""
    left = most_bytes
    for document in documents:
        text = document.text.encode()[:left].decode(errors="ignore")
        if not text:
            return
        left -= len(text.encode())
        yield Ribbon(document.place(0), tuple(ribbon_chunks(text, student, teacher)))


def ribbon_chunks(
    text: str, student: ByteTokenizer, teacher: ByteTokenizer
) -> Iterator[RibbonChunk]:
    """The chunks of a text in order, with the tokens between them that are in none."""
    aligner = TokenAligner(student, teacher)
    encoded = [side.encode([text]) for side in (aligner.student, aligner.teacher)]
    views = [
        token_views(tokenizer, text, tokens.ids, tokens.ends)
        for tokenizer, tokens in zip((student, teacher), encoded, strict=True)
    ]
    alignment = alignment_of(*aligner.align_joined(*encoded))
    done = (0, 0)
    for spans in zip(
        alignment.student_spans.tolist(), alignment.teacher_spans.tolist(), strict=True
    ):
        yield from _unaligned(views, done, (spans[0][0], spans[1][0]))
        student_views, teacher_views = (
            tuple(side[begin:end]) for side, (begin, end) in zip(views, spans, strict=True)
        )
        yield RibbonChunk(student_views, teacher_views, is_aligned=True)
        done = (spans[0][1], spans[1][1])
    yield from _unaligned(views, done, (len(views[0]), len(views[1])))


def _unaligned(
    views: Sequence[Sequence[TokenView]], begins: tuple[int, int], ends: tuple[int, int]
) -> Iterator[RibbonChunk]:
    student, teacher = (
        tuple(side[begin:end]) for side, begin, end in zip(views, begins, ends, strict=True)
    )
    if student or teacher:
        yield RibbonChunk(student, teacher, is_aligned=False)


def token_title(view: TokenView) -> str:
    """What is said of a token that is pointed at: its id, its place and its bytes."""
    covered = view.covered[:_BYTES_IN_TITLE].hex(" ")
    more = " …" if len(view.covered) > _BYTES_IN_TITLE else ""
    return f"id {view.token_id} · bytes {view.begin}–{view.end} · {covered}{more}"
