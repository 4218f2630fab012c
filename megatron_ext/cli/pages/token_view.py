"""Tokens of a text as a person reads them: coloured boundaries and a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.cli.pages.readable import visible_text
from megatron_ext.cli.pages.terminal import styled, table_lines
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.tokenizers.token_ids import ByteEnds

_BACKGROUNDS = ("\x1b[48;5;24m", "\x1b[48;5;58m")
_TRAINED = "\x1b[1;38;5;120m"
_PLAIN = "\x1b[38;5;252m"
_BOUNDARY = "│"


@dataclass(frozen=True, slots=True)
class TokenView:
    """One token of a text."""

    token_id: int
    piece: str
    """Display string in the vocabulary."""
    begin: int
    """First byte of the text that it covers."""
    end: int
    """First byte that it does not cover."""
    covered: bytes
    """What it covers."""
    trained: bool | None
    """Whether a loss is put on it; None for a plain text."""

    @property
    def shown(self) -> str:
        """What it covers; the bytes of a part of a character in angle brackets."""
        try:
            return self.covered.decode()
        except UnicodeDecodeError:
            return f"<{self.covered.hex(' ')}>"

    def as_row(self) -> dict[str, Any]:
        """The same for JSON."""
        row: dict[str, Any] = {
            "id": self.token_id,
            "piece": self.piece,
            "bytes": [self.begin, self.end],
            "text": self.shown,
        }
        return row if self.trained is None else row | {"trained": self.trained}


def token_views(
    tokenizer: ByteTokenizer,
    text: str,
    ids: NDArray[np.integer[Any]],
    ends: ByteEnds,
    trained: Sequence[bool] | None = None,
) -> list[TokenView]:
    """A view of each token.

    Args:
        tokenizer: Gives the pieces.
        text: The text, N bytes in UTF-8.
        ids: Its tokens [T].
        ends: Where each ends in its bytes [T].
        trained: Whether each is trained [T].
    """
    raw = text.encode()
    marks: Sequence[bool | None] = [None] * len(ids) if trained is None else trained
    spans = pairwise([0, *ends.tolist()])
    return [
        TokenView(token_id, tokenizer.id_to_token(token_id), begin, end, raw[begin:end], mark)
        for token_id, (begin, end), mark in zip(ids.tolist(), spans, marks, strict=True)
    ]


def ribbon(views: Sequence[TokenView], *, color: bool) -> str:
    """The text with its token boundaries: backgrounds that alternate, or bars without colour.

    Trained tokens are bold and green; without colour they stand in double angle brackets.
    """
    return "".join(_coloured(views) if color else _barred(views))


def _coloured(views: Sequence[TokenView]) -> Iterator[str]:
    for number, view in enumerate(views):
        style = _BACKGROUNDS[number % 2] + (_TRAINED if view.trained else _PLAIN)
        yield styled(style, _visible(view))
    yield "\n"


def _barred(views: Sequence[TokenView]) -> Iterator[str]:
    inside = False
    for view in views:
        if bool(view.trained) != inside:
            inside = bool(view.trained)
            yield "⟪" if inside else "⟫"
        yield _visible(view) + _BOUNDARY
    yield "⟫\n" if inside else "\n"


def _visible(view: TokenView) -> str:
    return visible_text(view.shown) or "∅"


def table(views: Sequence[TokenView]) -> str:
    """One line for each token: number, id, bytes, whether it is trained, piece and text."""
    rows = [("#", "id", "bytes", "trained", "piece", "text")]
    for number, view in enumerate(views):
        mark = {None: "", True: "yes", False: "-"}[view.trained]
        span = f"{view.begin}-{view.end}"
        rows.append(
            (str(number), str(view.token_id), span, mark, repr(view.piece), repr(view.shown))
        )
    if all(row[3] == "" for row in rows[1:]):
        rows = [(*row[:3], *row[4:]) for row in rows]  # type: ignore[misc]
    return "\n".join(table_lines(rows, "<" * len(rows[0]))) + "\n"


def listing(views: Sequence[TokenView], *, limit: int, color: bool) -> str:
    """Ribbon and table of the first tokens, and how many more there are.

    Args:
        views: The tokens.
        limit: How many to list; 0 for all.
        color: As for ``ribbon``.
    """
    shown = views[:limit] if limit else views
    more = len(views) - len(shown)
    rest = f"... {more:,} tokens more; --limit 0 shows all\n" if more else ""
    return f"{ribbon(shown, color=color)}\n{table(shown)}{rest}"
