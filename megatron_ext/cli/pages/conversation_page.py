"""The HTML page of conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from markupsafe import Markup, escape

from megatron_ext.alignment.audit import share_in_words
from megatron_ext.cli.pages.conversation_cells import KINDS, Cell, Kind
from megatron_ext.cli.pages.conversation_view import ConversationView, TurnView
from megatron_ext.cli.pages.frame import IN_BROWSER, BarPart, bar, element, html_page
from megatron_ext.cli.pages.token_view import number, readable_text
from megatron_ext.conversation import Provenance


def conversation_page(
    views: Sequence[ConversationView],
    *,
    title: str,
    about: str,
    failures: Mapping[int, str] | None = None,
) -> str:
    """Render the page of some conversations of one tokenizer.

    Args:
        title: Title of the page.
        about: Description of the tokenizer.
        failures: Errors of the records without a view, by number.
    """
    shown = {kind for view in views for kind in view.counts}
    values = {
        "about": about,
        "views": views,
        "failures": failures or {},
        "kinds": [(kind, meaning) for kind, meaning in KINDS.items() if kind in shown],
        "pieces": {token.token_id: token.piece for view in views for token in view.tokens},
        "anchored_turns": _anchored_turns,
        "source_bar": _source_bar,
        "tokens": _tokens,
        "totals": _totals,
        "turn_markup": _turn_markup,
    }
    return html_page("conversation", values, title=title)


def _turn_markup(turn: TurnView) -> Markup:
    """The text of a turn: a ``bdi`` for adjacent cells of one source and one training state."""

    def key(cell: Cell) -> tuple[Kind, str, bool]:
        return cell.kind, _in_words(cell.provenance), cell.is_trained

    return Markup("").join(
        element(
            "bdi",
            Markup("").join(map(_cell_markup, cells)),
            {"class": f"{kind} t" if is_trained else kind}
            | ({"data-from": source} if source else {}),
        )
        for (kind, source, is_trained), cells in groupby(turn.cells, key)
    )


def _cell_markup(cell: Cell) -> Markup:
    """A cell as an element: ``kbd`` for a control token, else ``i``.

    Minimal markup, for pages of a hundred thousand tokens: an element begins one token unless an
    attribute gives the number; its class tells whether it begins within another token.
    """
    attributes: dict[str, object] = {"class": "c"} if cell.continues else {}
    if cell.token_count != 1:
        attributes["data-n"] = cell.token_count
    # Line feeds are shown by style, so that they are not copied as text.
    text = escape(readable_text(cell.text).translate(IN_BROWSER))
    text = text.replace("↵\n", Markup("<s>↵</s>\n"))
    return element("kbd" if cell.is_control else "i", text, attributes)


def _in_words(provenance: Provenance) -> str:
    if provenance.source == "template":
        return ""
    of_message = "" if provenance.message is None else f"message {provenance.message} "
    kind = "" if provenance.source == "message" else f"{provenance.source} "
    return f"{of_message}{kind}{provenance.field}".strip()


def _anchored_turns(view: ConversationView) -> Iterator[tuple[str, TurnView]]:
    """Turns with their anchors; of a message with several turns, the first has the anchor."""
    named: set[int] = set()
    for turn in view.turns:
        if turn.message is None or turn.message in named:
            yield "", turn
        else:
            named.add(turn.message)
            yield f"r{view.record}m{turn.message}", turn


def _source_bar(view: ConversationView) -> Markup:
    parts = [
        BarPart(kind, tokens, marked=trained) for kind, (tokens, trained) in view.counts.items()
    ]
    return bar(parts, "Shares of the sources in the tokens; trained tokens are underlined")


def _totals(view: ConversationView) -> list[tuple[str, str, str]]:
    counts = [(name, number(count), "") for name, count in view.sizes.items()]
    return [
        *counts,
        ("trained tokens", number(view.trained_tokens), share_in_words(view.trained_share)),
    ]


def _tokens(view: ConversationView) -> dict[str, Any]:
    """Ids of the tokens, and the bytes each covers, for tooltips."""
    return {
        "ids": [token.token_id for token in view.tokens],
        "lengths": [token.end - token.begin for token in view.tokens],
    }
