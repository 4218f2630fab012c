"""Elements of pages. A text becomes a part of one here or in a template, and is escaped by both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from markupsafe import Markup, escape

from megatron_ext.cli.pages.audit_ribbon import Ribbon, RibbonChunk, token_title
from megatron_ext.cli.pages.readable import one_line
from megatron_ext.cli.pages.token_view import TokenView

_LINE_FEED: Final = ("␤", "↵")
"""How a terminal shows one, and the sign that fonts of browsers have."""
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of a table: its name and its cells; without cells a heading of the rows below."""

    name: str
    cells: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """The cells are not all the same."""
        return len(set(self.cells)) > 1


@dataclass(frozen=True, slots=True)
class BarPart:
    """A part of a bar."""

    style: str
    """Class that has its colour."""
    size: float
    title: str = ""
    """Its tooltip."""
    marked: float = 0
    """How much of it is underlined."""


def element(tag: str, content: str = "", attributes: Mapping[str, object] = _NONE) -> Markup:
    """An element; its content is escaped unless it is ``Markup``, its attributes always are."""
    named = "".join(f' {name}="{escape(str(value))}"' for name, value in attributes.items())
    return Markup(f"<{tag}{named}>{escape(content)}</{tag}>")


def bar(parts: Sequence[BarPart], label: str) -> Markup:
    """Parts beside one another, as wide as they are large."""
    whole = sum(part.size for part in parts) or 1
    rectangles, begin = [], 0.0
    for part in (part for part in parts if part.size):
        rectangles.append(_rectangle(part.style, begin / whole, part.size / whole, part.title))
        if part.marked:
            rectangles.append(_rectangle("marked", begin / whole, part.marked / whole))
        begin += part.size
    return element(
        "svg",
        Markup("").join(rectangles),
        {
            "class": "bar",
            "viewBox": "0 0 100 12",
            "preserveAspectRatio": "none",
            "role": "img",
            "aria-label": label,
        },
    )


def _rectangle(style: str, begin: float, width: float, title: str = "") -> Markup:
    y, height = (9, 3) if style == "marked" else (0, 12)
    return element(
        "rect",
        element("title", title) if title else "",
        {
            "class": style,
            "x": f"{100 * begin:.3f}",
            "y": y,
            "width": f"{100 * width:.3f}",
            "height": height,
        },
    )


def swatch(style: str, text: str) -> Markup:
    """A text behind the colour of a class, which the text stands for."""
    return element("span", "", {"class": f"swatch {style}"}) + text


def in_line(text: str) -> str:
    """Text that stays in its line and shows what has no shape."""
    return one_line(text).replace(*_LINE_FEED)


def ribbon_markup(ribbon: Ribbon) -> Markup:
    """The chunks as elements, as lean as can be: ``b`` a chunk, ``u`` a side, ``i`` a token."""
    return Markup("").join(map(_chunk, ribbon.chunks))


def _chunk(chunk: RibbonChunk) -> Markup:
    sides = Markup("").join(
        element("u", Markup("").join(map(_token, side))) for side in (chunk.student, chunk.teacher)
    )
    kind = {} if chunk.is_one_to_one else {"class": "x" if chunk.is_aligned else "o"}
    return element("b", sides, kind) + Markup("<br>" if chunk.breaks_line else "")


def _token(view: TokenView) -> Markup:
    text = element("bdi", in_line(view.shown) or "∅")
    return element("i", text, {"title": token_title(view)})
