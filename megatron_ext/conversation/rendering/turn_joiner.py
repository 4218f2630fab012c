"""Concatenation of a template's output, each piece with the message turn it was written in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from megatron_ext.conversation.rendering.provenance import UNKNOWN, Provenance, Run, placed
from megatron_ext.conversation.rendering.template_limits import spend
from megatron_ext.conversation.rendering.tracked_text import TrackedText, as_tracked

PROGRESS: Final = "_progress"
"""Variable of a running template: its ``OpenLoops``, to name the message in an error."""

_FEW_RUNS: Final = 16
"""So many come with the piece of output; more are paid for."""


class OpenLoops:
    """The loops over messages that are going on, and the message that each has come to."""

    def __init__(self) -> None:
        self._messages: dict[int, int] = {}

    @property
    def turn(self) -> int | None:
        """Index of the message whose turn it is: the innermost loop's."""
        return next(reversed(self._messages.values()), None)

    def move(self, loop: int, message: int | None) -> None:
        """A loop comes to a message, or is over."""
        # Taken out first: a loop that goes on is opened anew, as the innermost.
        self._messages.pop(loop, None)
        if message is not None:
            self._messages[loop] = message


class TurnMark(str):
    """An empty piece of output: a loop of the template comes to a message, or is over.

    Args:
        loop: Number of the loop in its template.
        message: Index of the message; None when the loop is over.
    """

    __slots__ = ("loop", "message")

    loop: int
    message: int | None

    def __new__(cls, loop: int, message: int | None) -> TurnMark:
        self = str.__new__(cls)
        self.loop = loop
        self.message = message
        return self

    def __str__(self) -> str:
        return self


class GenerationMark(str):
    """An empty piece of output: a ``{% generation %}`` block begins, or is over."""

    __slots__ = ()

    def __str__(self) -> str:
        return self


GENERATION_BEGINS: Final = GenerationMark()
GENERATION_ENDS: Final = GenerationMark()


def join_turns(pieces: Iterable[str]) -> TrackedText:
    """``pieces`` one after another, each run told its turn and whether a block generates it.

    The turn is that of the innermost open loop's message.
    """
    texts: list[TrackedText] = []
    runs: list[Run] = []
    loops = OpenLoops()
    turn: int | None = None
    blocks = characters = 0
    # What each provenance is within this turn and block. By identity, which the texts keep alive:
    # hashing all fields of each run would be slow.
    told: dict[int, Provenance] = {}
    length, within = 0, UNKNOWN
    for piece in pieces:
        kind = type(piece)
        if kind is TurnMark:
            loops.move(piece.loop, piece.message)  # type: ignore[attr-defined]
            turn = loops.turn
            told = {}
            continue
        if kind is GenerationMark:
            blocks += 1 if piece is GENERATION_BEGINS else -1
            told = {}
            continue
        known = as_tracked(piece)
        texts.append(known)
        characters += len(known)
        if len(known.runs) > _FEW_RUNS:
            spend(len(known.runs) >> 2)
        for more, provenance in known.runs:
            following = told.get(id(provenance))
            if following is None:
                following = told[id(provenance)] = placed(provenance, turn, blocks > 0)
            if following == within:
                length += more
                continue
            if length:
                runs.append((length, within))
            length, within = more, following
    if length:
        runs.append((length, within))
    spend(len(runs) >> 2, characters)
    return TrackedText("".join(texts), tuple(runs))
