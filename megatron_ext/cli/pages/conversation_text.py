"""A conversation in a terminal: coloured by source, with the trained part marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Final

from megatron_ext.alignment.audit import share_in_words
from megatron_ext.cli.pages.conversation_cells import KINDS, Kind
from megatron_ext.cli.pages.conversation_view import ConversationView, TurnView
from megatron_ext.cli.pages.readable import one_line, readable_text
from megatron_ext.cli.pages.terminal import (
    BLUE,
    BOLD,
    BOLD_UNDERLINED,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    RED,
    TEAL,
    VIOLET,
    WARNING,
    styled,
)

_COLORS: Final[Mapping[Kind, str]] = {
    "template": GREY,
    "system": VIOLET,
    "user": BLUE,
    "tool": ORANGE,
    "assistant": GREEN,
    "image": PINK,
    "variable": TEAL,
    "unknown": RED,
}


def conversation_ribbon(view: ConversationView, *, color: bool) -> str:
    """The text of a conversation turn by turn, its legend, totals and warnings.

    Trained text is bold and underlined; without colour it stands in ``⟪⟫``, and what the template
    has not written in ``‹›``.
    """
    return "".join(_lines(view, color=color))


def _lines(view: ConversationView, *, color: bool) -> Iterator[str]:
    yield f"{totals(view)}\n\n"
    yield f"{_legend(view, color=color)}\n"
    for turn in view.turns:
        title = styled(_COLORS[turn.kind] + BOLD, turn.title, color=color)
        yield f"\n{' · '.join((f'── {title}', *turn.counts))}\n"
        text = "".join(_runs(turn, color=color))
        yield text if text.endswith("\n") else f"{text}\n"
    if view.refusal is not None:
        refused = styled(WARNING, "a run leaves the conversation out", color=color)
        yield f"\n{refused}: {one_line(view.refusal)}\n"
    if view.warnings:
        yield f"\n{styled(WARNING, 'warnings', color=color)}\n"
    for warning in view.warnings:
        name = view.message_name(warning.message)
        yield f"  {name}{': ' if name else ''}{one_line(warning.text)}\n"


def totals(view: ConversationView) -> str:
    """How much there is of a conversation, and how much of it is trained."""
    share = share_in_words(view.trained_share)
    counts = [f"{count:,} {name}" for name, count in view.sizes.items()]
    return " · ".join((*counts, f"{view.trained_tokens:,} trained ({share})"))


def _legend(view: ConversationView, *, color: bool) -> str:
    """Which mark means what, and how many tokens there are of each."""
    names = [
        _marked(kind, f"{KINDS[kind]} {tokens:,}", color=color)
        for kind, (tokens, _) in view.counts.items()
    ]
    trained = f"trained {view.trained_tokens:,}"
    names.append(styled(BOLD_UNDERLINED, trained) if color else f"⟪{trained}⟫")
    return "tokens: " + "  ".join(names)


def _runs(turn: TurnView, *, color: bool) -> Iterator[str]:
    """The text of a turn."""
    for is_trained, cells in groupby(turn.cells, lambda cell: cell.is_trained):
        text = ""
        for kind, same in groupby(cells, lambda cell: cell.kind):
            shown = readable_text("".join(cell.text for cell in same))
            text += _marked(kind, shown, is_trained=is_trained, color=color)
        if is_trained and not color:
            text, line_end = text.removesuffix("\n"), "\n" * text.endswith("\n")
            text = f"⟪{text}⟫{line_end}"
        yield text


def _marked(kind: Kind, text: str, *, is_trained: bool = False, color: bool) -> str:
    if color:
        return styled(_COLORS[kind] + BOLD_UNDERLINED * is_trained, text)
    return text if kind == "template" else f"‹{text}›"
