"""A conversation in a terminal: coloured by source, with the trained part marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Final

from megatron_ext.alignment.audit import share_in_words
from megatron_ext.cli.pages.conversation_cells import KINDS, Kind
from megatron_ext.cli.pages.conversation_view import ConversationView, TurnView
from megatron_ext.cli.pages.conversation_warnings import ConversationWarning
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
_TRAINED: Final = BOLD_UNDERLINED
_REFUSED: Final = "a run leaves the conversation out"


def conversation_ribbon(view: ConversationView, *, color: bool) -> str:
    """The text of a conversation turn by turn, its legend, totals and warnings.

    Trained text is bold and underlined; without colour it stands in ``⟪⟫``, and what the template
    has not written in ``‹›``.
    """
    paint = _Paint(color)
    return "".join(_lines(view, paint))


def _lines(view: ConversationView, paint: _Paint) -> Iterator[str]:
    yield f"{totals(view)}\n\n"
    yield f"{paint.legend(view)}\n"
    for turn in view.turns:
        yield f"\n{paint.heading(turn)}\n"
        text = "".join(paint.runs(turn))
        yield text if text.endswith("\n") else f"{text}\n"
    if view.refusal is not None:
        yield f"\n{paint.warning(_REFUSED)}: {one_line(view.refusal)}\n"
    if view.warnings:
        yield f"\n{paint.warning('warnings')}\n"
        yield from (f"  {warning_line(view, warning)}\n" for warning in view.warnings)


def totals(view: ConversationView) -> str:
    """How much there is of a conversation, and how much of it is trained."""
    return " · ".join(
        (
            f"{len(view.roles):,} messages",
            f"{len(view.text):,} characters",
            f"{len(view.tokens):,} tokens",
            f"{view.trained_tokens:,} trained ({share_in_words(view.trained_share)})",
        )
    )


def turn_summary(turn: TurnView) -> str:
    """How much there is of a turn, and how much of it is trained or why nothing."""
    parts = [f"{turn.characters:,} characters", f"{turn.tokens:,} tokens"]
    if turn.trained_tokens:
        parts.append(f"{turn.trained_tokens:,} trained")
    elif turn.message is not None:
        parts.append(turn.untrained or "nothing trained")
    return " · ".join(parts)


def turn_title(turn: TurnView) -> str:
    """The number and the role of a turn."""
    if turn.message is None:
        return "template"
    # The format's own system message is no message of the conversation.
    return f"{turn.message} {turn.role}" if turn.message >= 0 else turn.role


def warning_line(view: ConversationView, warning: ConversationWarning) -> str:
    """A warning with its place."""
    text = one_line(warning.text)
    if warning.message is None or not 0 <= warning.message < len(view.roles):
        return text
    return f"{warning.message} {view.roles[warning.message]}: {text}"


class _Paint:
    """Marks sources and what is trained, with colours or with brackets."""

    def __init__(self, color: bool) -> None:
        self._color = color

    def legend(self, view: ConversationView) -> str:
        """Which mark means what, and how many tokens there are of each."""
        names = []
        for kind, (tokens, _) in view.counts.items():
            name = f"{KINDS[kind]} {tokens:,}"
            if not self._color and kind != "template":
                name = f"‹{name}›"
            names.append(self._styled(_COLORS[kind], name))
        trained = f"trained {view.trained_tokens:,}"
        names.append(self._styled(_TRAINED, trained) if self._color else f"⟪{trained}⟫")
        return "tokens: " + "  ".join(names)

    def heading(self, turn: TurnView) -> str:
        """The line above a turn."""
        title = self._styled(_COLORS[turn.kind] + BOLD, turn_title(turn))
        return f"── {title} · {turn_summary(turn)}"

    def warning(self, text: str) -> str:
        """A word that calls for attention."""
        return self._styled(WARNING, text)

    def runs(self, turn: TurnView) -> Iterator[str]:
        """The text of a turn."""
        for is_trained, cells in groupby(turn.cells, lambda cell: cell.is_trained):
            text = ""
            for kind, same in groupby(cells, lambda cell: cell.kind):
                text += self._run(kind, readable_text("".join(c.text for c in same)), is_trained)
            if is_trained and not self._color:
                text, lines = text.removesuffix("\n"), "\n" * text.endswith("\n")
                text = f"⟪{text}⟫{lines}"
            yield text

    def _run(self, kind: Kind, text: str, is_trained: bool) -> str:
        if not self._color:
            return text if kind == "template" else f"‹{text}›"
        style = _COLORS[kind] + _TRAINED * is_trained
        return self._styled(style, text)

    def _styled(self, style: str, text: str) -> str:
        return styled(style, text, color=self._color)
