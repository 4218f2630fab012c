"""Ribbons: both tokenizations of a text, chunk by chunk, for HTML pages. T tokens, C chunks."""

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
"""Names of kinds of chunks by (student has one token, teacher has one token)."""


@dataclass(frozen=True, slots=True)
class RibbonChunk:
    """The tokens of a chunk, or tokens between chunks."""

    student: tuple[TokenView, ...]
    teacher: tuple[TokenView, ...]
    is_aligned: bool

    @property
    def kind(self) -> str:
        """Kind by numbers of student and teacher tokens, such as 1:n; ``none`` outside chunks."""
        if not self.is_aligned:
            return "none"
        is_one = tuple(
            sum(view.end > view.begin for view in side) == 1
            for side in (self.student, self.teacher)
        )
        return _KINDS[is_one]

    @property
    def is_one_to_one(self) -> bool:
        """Whether each side has exactly one token."""
        return self.kind == "1:1"

    @property
    def breaks_line(self) -> bool:
        """Whether the text continues on the next line."""
        return any(view.covered.endswith(b"\n") for view in self.student[-1:])


@dataclass(frozen=True, slots=True)
class Ribbon:
    """The chunks of a document."""

    place: str
    chunks: tuple[RibbonChunk, ...]


def ribbons(
    documents: Sequence[AuditDocument],
    student: ByteTokenizer,
    teacher: ByteTokenizer,
    *,
    most_bytes: int,
) -> Iterator[Ribbon]:
    """Ribbons of the first ``most_bytes`` of the documents, cut at a character boundary."""
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
    """The chunks of a text in order, and the unaligned tokens between them."""
    aligner = TokenAligner(student, teacher)
    encoded = [side.encode([text]) for side in (aligner.student, aligner.teacher)]
    views = [
        token_views(tokenizer, text, tokens.ids, tokens.ends)
        for tokenizer, tokens in zip((student, teacher), encoded, strict=True)
    ]
    alignment = alignment_of(*aligner.align_joined(*encoded))
    stops = (0, 0)
    for spans in zip(
        alignment.student_spans.tolist(), alignment.teacher_spans.tolist(), strict=True
    ):
        yield from _unaligned(views, stops, (spans[0][0], spans[1][0]))
        student_views, teacher_views = (
            tuple(side[begin:end]) for side, (begin, end) in zip(views, spans, strict=True)
        )
        yield RibbonChunk(student_views, teacher_views, is_aligned=True)
        stops = (spans[0][1], spans[1][1])
    yield from _unaligned(views, stops, (len(views[0]), len(views[1])))


def _unaligned(
    views: Sequence[Sequence[TokenView]], begins: tuple[int, int], ends: tuple[int, int]
) -> Iterator[RibbonChunk]:
    student, teacher = (
        tuple(side[begin:end]) for side, begin, end in zip(views, begins, ends, strict=True)
    )
    if student or teacher:
        yield RibbonChunk(student, teacher, is_aligned=False)


def token_title(view: TokenView) -> str:
    """Tooltip of a token: id, byte range and bytes."""
    covered = view.covered[:_BYTES_IN_TITLE].hex(" ")
    more = " …" if len(view.covered) > _BYTES_IN_TITLE else ""
    return f"id {view.token_id} · bytes {view.begin}–{view.end} · {covered}{more}"


def chunk_title(chunk: RibbonChunk) -> str:
    """Tooltips of the tokens of both sides, a line each."""
    sides = (("student", chunk.student), ("teacher", chunk.teacher))
    return "\n".join(
        f"{name}: {view.shown!r} {token_title(view)}" for name, side in sides for view in side
    )
