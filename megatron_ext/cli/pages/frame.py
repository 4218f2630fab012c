"""The frame of all HTML pages, and their elements.

A page is one file that needs no network and no other file. Texts, models and runs are untrusted:
everything is escaped, by the functions here and by the templates, and a page's content security
policy allows only its own style and script, by their hashes.
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
from megatron_ext.cli.pages.audit_ribbon import Ribbon, RibbonChunk, chunk_title, token_title
from megatron_ext.cli.pages.token_view import TokenView, number, one_line

_CONTROLS: Final = range(0x20)
IN_BROWSER: Final = {0x2400 + code: repr(chr(code))[1:-1] for code in _CONTROLS} | {ord("␤"): "↵"}
"""Picture of a control character in terminals -> what is shown of it where fonts lack that."""
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TableRow:
    """A named row of a table; without cells it is a heading of the rows below."""

    name: str
    cells: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether the cells are not all equal."""
        return len(set(self.cells)) > 1


@dataclass(frozen=True, slots=True)
class BarPart:
    """A segment of a stacked bar."""

    style: str
    """CSS class of the colour."""
    size: float
    title: str = ""
    """Tooltip."""
    marked: float = 0
    """Size of the underlined part."""


def element(tag: str, content: str = "", attributes: Mapping[str, object] = _NONE) -> Markup:
    """An HTML element; content is escaped unless it is ``Markup``, attributes always."""
    named = "".join(f' {name}="{escape(str(value))}"' for name, value in attributes.items())
    return Markup(f"<{tag}{named}>{escape(content)}</{tag}>")


def bar(parts: Sequence[BarPart], label: str) -> Markup:
    """A stacked bar whose segments are as wide as the sizes of the parts."""
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
    """An entry of a legend: the colour of a class, and its meaning."""
    return element("span", "", {"class": f"swatch {style}"}) + text


def in_line(text: str) -> str:
    """Text on one line, with invisible characters shown."""
    return one_line(text).translate(IN_BROWSER)


def ribbon_markup(ribbon: Ribbon) -> Markup:
    """Minimal markup of a ribbon: ``b`` a chunk, ``u`` a side, ``i`` a token."""
    return Markup("").join(map(_chunk, ribbon.chunks))


def _chunk(chunk: RibbonChunk) -> Markup:
    sides = Markup("").join(
        element("u", Markup("").join(map(_token, side))) for side in (chunk.student, chunk.teacher)
    )
    kind = {}
    if not chunk.is_one_to_one:
        kind = {"class": "x" if chunk.is_aligned else "o", **told_on_focus(chunk_title(chunk))}
    return element("b", sides, kind) + Markup("<br>" if chunk.breaks_line else "")


def told_on_focus(words: str) -> dict[str, str]:
    """Attributes of an element whose words are shown at the foot of the page while it has focus, by
    keyboard or touch."""
    return {"tabindex": "0", "role": "group", "aria-label": words}


def _token(view: TokenView) -> Markup:
    text = element("bdi", in_line(view.shown) or "∅")
    return element("i", text, {"title": token_title(view)})


_ASSETS: Final = Path(__file__).with_name("assets")


def html_page(
    name: str, values: Mapping[str, Any], *, title: str, styles: Sequence[str] = ()
) -> str:
    """Render the page of a template.

    The template extends ``frame.html.jinja``. The page includes the styles of the frame and of its
    name, and the script of its name if there is one.

    Args:
        name: Name of the template, the style and the script.
        values: Variables of the template.
        title: Title of the page.
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
    """An inline style or script of a page.

    Args:
        paths: Its files, part of this package, with nothing to escape.
    """

    def __init__(self, *paths: Path) -> None:
        self.source = Markup("".join(path.read_text(encoding="utf-8") for path in paths))

    @property
    def hash(self) -> str:
        """Hash of the contents in the content security policy."""
        digest = hashlib.sha256(self.source.encode()).digest()
        return f"sha256-{base64.b64encode(digest).decode()}"
