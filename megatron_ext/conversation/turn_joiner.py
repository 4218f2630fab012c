"""The output of a template, piece by piece, and which message's turn each piece was written in."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ext.conversation.provenance import Run, in_turn, merged
from megatron_ext.conversation.tracked_text import TrackedText, as_tracked


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
        self = super().__new__(cls)
        self.loop = loop
        self.message = message
        return self

    def __str__(self) -> str:
        return self


def join_turns(pieces: Iterable[str]) -> TrackedText:
    """``pieces`` one after another, each run told its turn: the innermost open loop's message."""
    texts: list[str] = []
    runs: list[Run] = []
    open_loops: dict[int, int] = {}
    turn: int | None = None
    for piece in pieces:
        if isinstance(piece, TurnMark):
            # Taken out first: a loop that goes on is opened anew, as the innermost.
            open_loops.pop(piece.loop, None)
            if piece.message is not None:
                open_loops[piece.loop] = piece.message
            turn = next(reversed(open_loops.values()), None)
            continue
        known = as_tracked(piece)
        texts.append(known)
        if turn is None:
            runs.extend(known.runs)
        else:
            runs.extend((length, in_turn(provenance, turn)) for length, provenance in known.runs)
    return TrackedText("".join(texts), tuple(merged(runs)))
