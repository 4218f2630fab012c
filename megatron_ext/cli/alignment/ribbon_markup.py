"""Chunks of a text as elements of a page."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Final

from markupsafe import Markup

from megatron_ext.cli.alignment.ribbon import Ribbon, RibbonChunk, token_title
from megatron_ext.cli.inlined_file import InlinedFile
from megatron_ext.cli.token_view import TokenView
from megatron_ext.cli.visible_text import one_line

RIBBON_STYLE: Final = InlinedFile(Path(__file__).with_name("pages") / "ribbon.css")
"""What the elements look like."""

LINE_FEED: Final = ("␤", "↵")
"""How a terminal shows one, and the sign that fonts of browsers have."""


def ribbon_markup(ribbon: Ribbon) -> Markup:
    """The chunks as elements, as lean as can be: ``b`` a chunk, ``u`` a side, ``i`` a token."""
    return Markup("".join(map(_chunk, ribbon.chunks)))


def in_line(text: str) -> str:
    """Text that stays in its line and shows what has no shape."""
    return one_line(text).replace(*LINE_FEED)


def _chunk(chunk: RibbonChunk) -> str:
    sides = "".join(
        f"<u>{''.join(map(_token, side))}</u>" for side in (chunk.student, chunk.teacher)
    )
    kind = "" if chunk.is_one_to_one else f' class="{"x" if chunk.is_aligned else "o"}"'
    return f"<b{kind}>{sides}</b>{'<br>' if chunk.breaks_line else ''}"


def _token(view: TokenView) -> str:
    text = escape(in_line(view.shown) or "∅")
    return f'<i title="{escape(token_title(view))}"><bdi>{text}</bdi></i>'
