"""The frame of all HTML pages, each one file that needs nothing else: no network, no other file.

What texts, models and runs say is hostile: everything is escaped, and a page's policy lets nothing
load or run but its own style and script, which it knows by their hashes.

Elements of pages. A text becomes a part of one here or in a template, and is escaped by both.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from megatron_ext.alignment.audit import share_in_words
from megatron_ext.cli.pages.audit_ribbon import Ribbon, RibbonChunk, token_title
from megatron_ext.cli.pages.token_view import TokenView, number, one_line

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


_ASSETS: Final = Path(__file__).with_name("assets")


def html_page(
    name: str, values: Mapping[str, Any], *, title: str, styles: Sequence[str] = ()
) -> str:
    """The page that the template of a name makes.

    The template extends ``frame.html.jinja``. The page has the style of the frame and its own, and
    its own script where there is one.

    Args:
        name: Of the template, the style and the script.
        values: Names that the template knows.
        title: Of the page.
        styles: Names of further styles.
    """
    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "in_line": in_line,
        "number": number,
        "ribbon": ribbon_markup,
        "share": share_in_words,
    }
    script = _ASSETS / f"{name}.js"
    return environment.get_template(f"{name}.html.jinja").render(
        values,
        title=title,
        style=_Inlined(*(_ASSETS / f"{style}.css" for style in ("frame", *styles, name))),
        script=_Inlined(script) if script.exists() else None,
    )


class _Inlined:
    """A style or a script that a page holds.

    Args:
        paths: Its files, which are ours and hold nothing to escape.
    """

    def __init__(self, *paths: Path) -> None:
        self.source = Markup("".join(path.read_text(encoding="utf-8") for path in paths))

    @property
    def hash(self) -> str:
        """What the page's policy calls it."""
        digest = hashlib.sha256(self.source.encode()).digest()
        return f"sha256-{base64.b64encode(digest).decode()}"
