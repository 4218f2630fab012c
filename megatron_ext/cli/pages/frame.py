"""The frame of all HTML pages, each one file that needs nothing else: no network, no other file.

What texts, models and runs say is hostile: everything is escaped, and a page's policy lets nothing
load or run but its own style and script, which it knows by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megatron_ext.alignment.audit import share_in_words
from megatron_ext.cli.pages.markup import in_line, ribbon_markup
from megatron_ext.cli.pages.readable import number

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
