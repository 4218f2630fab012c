"""Concatenation of a template's output, each piece with the message turn it was written in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from megatron_ext.conversation.rendering.provenance import UNKNOWN, Provenance, Run, placed
from megatron_ext.conversation.rendering.template_limits import consume
from megatron_ext.conversation.rendering.tracked_text import TrackedText, as_tracked

PROGRESS: Final = "_progress"
"""Variable of a running template that holds its ``OpenLoops``, to name messages in errors."""

_FEW_RUNS: Final = 16
"""Runs of a piece of output that cost nothing; more consume steps."""


class OpenLoops:
    """Running loops over messages, and the current message of each."""

    def __init__(self) -> None:
        self._messages: dict[int, int] = {}

    @property
    def turn(self) -> int | None:
        """Index of the current message of the innermost loop."""
        return next(reversed(self._messages.values()), None)

    def move(self, loop: int, message: int | None) -> None:
        """Set the current message of a loop; None ends the loop."""
        # Removed first, so that the loop is added again as the innermost.
        self._messages.pop(loop, None)
        if message is not None:
            self._messages[loop] = message


class TurnMark(str):
    """Empty piece of output that marks the next message of a loop, or the end of the loop.

    Args:
        loop: Number of the loop in its template.
        message: Index of the message; None at the end of the loop.
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
    """Empty piece of output that marks the begin or end of a ``{% generation %}`` block."""

    __slots__ = ()

    def __str__(self) -> str:
        return self


GENERATION_BEGINS: Final = GenerationMark()
GENERATION_ENDS: Final = GenerationMark()


def join_turns(pieces: Iterable[str]) -> TrackedText:
    """Concatenation of ``pieces`` with turn and ``{% generation %}`` block set in each run.

    The turn is that of the innermost open loop's message.
    """
    texts: list[TrackedText] = []
    runs: list[Run] = []
    loops = OpenLoops()
    turn: int | None = None
    blocks = characters = 0
    # Provenance within this turn and block, by the id of the original, which the texts keep alive:
    # hashing all fields of each run would be slow.
    cache: dict[int, Provenance] = {}
    length, within = 0, UNKNOWN
    for piece in pieces:
        kind = type(piece)
        if kind is TurnMark:
            loops.move(piece.loop, piece.message)  # type: ignore[attr-defined]
            turn = loops.turn
            cache = {}
            continue
        if kind is GenerationMark:
            blocks += 1 if piece is GENERATION_BEGINS else -1
            cache = {}
            continue
        text = as_tracked(piece)
        texts.append(text)
        characters += len(text)
        if len(text.runs) > _FEW_RUNS:
            consume(len(text.runs) >> 2)
        for more, provenance in text.runs:
            following = cache.get(id(provenance))
            if following is None:
                following = cache[id(provenance)] = placed(provenance, turn, blocks > 0)
            if following == within:
                length += more
                continue
            if length:
                runs.append((length, within))
            length, within = more, following
    if length:
        runs.append((length, within))
    consume(len(runs) >> 2, characters)
    return TrackedText("".join(texts), tuple(runs))
