"""Conversations as one HTML page that needs nothing else: no network, no other file.

What conversations say is hostile: everything is escaped, and the page's policy lets nothing run or
load but its own style and script, which it knows by their hashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megatron_ext.cli.conversation.cells import KINDS, Cell, Kind
from megatron_ext.cli.conversation.ribbon import turn_title
from megatron_ext.cli.conversation.view import ConversationView, TurnView
from megatron_ext.cli.inlined_file import InlinedFile
from megatron_ext.cli.visible_text import one_line, readable_text
from megatron_ext.conversation import Provenance

_PAGES: Final = Path(__file__).with_name("pages")


def conversation_page(
    views: Sequence[ConversationView],
    *,
    title: str,
    about: str,
    failures: Mapping[int, str] | None = None,
) -> str:
    """The page of some conversations of one tokenizer.

    Args:
        views: The conversations.
        title: What they are.
        about: What they were tokenized with.
        failures: What is wrong with records that have no view, by number.
    """
    environment = Environment(
        loader=FileSystemLoader(_PAGES),
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["one_line"] = one_line
    shown = {kind for view in views for kind in view.counts}
    return environment.get_template("conversation.html.jinja").render(
        title=title,
        about=about,
        views=views,
        failures=failures or {},
        kinds=[(kind, meaning) for kind, meaning in KINDS.items() if kind in shown],
        pieces={token.token_id: token.piece for view in views for token in view.tokens},
        style=InlinedFile(_PAGES / "conversation.css"),
        script=InlinedFile(_PAGES / "conversation.js"),
        anchored_turns=_anchored_turns,
        runs=_runs,
        shares=_shares,
        tokens=_tokens,
        turn_title=turn_title,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring cells from one source, all trained or none."""

    kind: Kind
    source: str
    """Where the characters come from, in words; empty for the template."""
    is_trained: bool
    markup: Markup
    """The cells."""


@dataclass(frozen=True, slots=True)
class _Share:
    """The tokens of one kind, as a part of a bar."""

    kind: Kind
    begin: int
    tokens: int
    trained: int


def _runs(turn: TurnView) -> Iterator[_Run]:
    def key(cell: Cell) -> tuple[Kind, str, bool]:
        return cell.kind, _in_words(cell.provenance), cell.is_trained

    for (kind, source, is_trained), cells in groupby(turn.cells, key):
        yield _Run(kind, source, is_trained, _markup(cells))


def _in_words(provenance: Provenance) -> str:
    if provenance.source == "template":
        return ""
    of_message = "" if provenance.message is None else f"message {provenance.message} "
    kind = "" if provenance.source == "message" else f"{provenance.source} "
    return f"{of_message}{kind}{provenance.field}".strip()


def _anchored_turns(view: ConversationView) -> Iterator[tuple[str, TurnView]]:
    """Each turn with its name on the page; a message that has several turns names the first."""
    named: set[int] = set()
    for turn in view.turns:
        if turn.message is None or turn.message in named:
            yield "", turn
        else:
            named.add(turn.message)
            yield f"r{view.record}m{turn.message}", turn


def _shares(view: ConversationView) -> Iterator[_Share]:
    begin = 0
    for kind, (tokens, trained) in view.counts.items():
        yield _Share(kind, begin, tokens, trained)
        begin += tokens


def _tokens(view: ConversationView) -> dict[str, Any]:
    """Ids, and how many bytes each covers: what the page shows of a token besides its text."""
    return {
        "ids": [token.token_id for token in view.tokens],
        "lengths": [token.end - token.begin for token in view.tokens],
    }


def _markup(cells: Iterable[Cell]) -> Markup:
    """Cells as elements: ``kbd`` for a control token, else ``i``.

    As lean as can be, for pages of a hundred thousand tokens: an element begins one token unless it
    says how many, and its class says that it begins within another.
    """
    return Markup("".join(map(_element, cells)))


def _element(cell: Cell) -> str:
    tag = "kbd" if cell.is_control else "i"
    continues = ' class="c"' if cell.continues else ""
    count = "" if cell.token_count == 1 else f' data-n="{cell.token_count}"'
    # Line feeds are shown, but are no part of what is copied.
    text = escape(readable_text(cell.text)).replace("␤\n", "<s>↵</s>\n")
    return f"<{tag}{continues}{count}>{text}</{tag}>"
