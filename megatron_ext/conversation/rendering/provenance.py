"""Provenance of the characters of a rendered conversation.

A mask is decided by where characters came from, not by looking for markers in the result. So is
which text may become a control token: text of the template may, text of a message may not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_ext.conversation.message import ROLES, byte_offsets

Source = Literal["template", "message", "image", "variable", "unknown"]
"""``image`` is an image token of a message, ``variable`` is text of the template's variables
(tools, documents), ``unknown`` is text that a template made in a way that hides its source.
"""


class Provenance(NamedTuple):
    """Source of a run of characters, and the turn and block in which it was written."""

    source: Source
    """Kind of the source."""
    message: int | None = None
    """Index of the message that supplied them; None for other sources."""
    field: str = ""
    """Path in the message or among the variables: ``content``, ``tools[0].function.name``."""
    turn: int | None = None
    """Index of the message whose turn of the template's loop wrote them; None outside of loops."""
    is_generated: bool = False
    """The characters stand in a ``{% generation %}`` block."""


_new = tuple.__new__
"""Constructor of a named tuple, in a third of the time that a call of its class takes."""

Run = tuple[int, Provenance]
"""A number of characters, and their provenance."""

TEMPLATE: Final = Provenance("template")
UNKNOWN: Final = Provenance("unknown")


def placed(provenance: Provenance, turn: int | None, is_generated: bool) -> Provenance:
    """``provenance`` within the turn of a message and maybe a ``{% generation %}`` block.

    A turn or block that an inner loop or block has set already stays.
    """
    source, message, field, inner_turn, inner_generated = provenance
    if inner_turn is not None:
        turn = inner_turn
    return _new(Provenance, (source, message, field, turn, is_generated or inner_generated))


class Span(NamedTuple):
    """Characters from ``start`` up to ``end`` of a rendered conversation, from one source."""

    start: int
    end: int
    provenance: Provenance

    @property
    def is_template(self) -> bool:
        """Whether the template itself wrote the characters."""
        return self.provenance.source == "template"

    @property
    def may_hold_control_tokens(self) -> bool:
        """Whether names of control tokens in it are parsed."""
        return self.provenance.source in ("template", "image")


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the provenance of each character."""

    text: str
    spans: tuple[Span, ...]
    """Consecutive spans without gaps, each as long as its provenance allows."""
    has_generation_blocks: bool
    """The template marks trained text with ``{% generation %}``."""

    @cached_property
    def unknown_spans(self) -> list[Span]:
        """Spans of unknown source, in order."""
        return [span for span in self.spans if span[2][0] == "unknown"]

    @cached_property
    def written_messages(self) -> frozenset[int | None]:
        """Indices of the messages that supplied some of the text; None for other sources."""
        return frozenset([message for _, _, (_, message, _, _, _) in self.spans])

    @cached_property
    def byte_offsets(self) -> NDArray[np.int64]:
        """Byte at which each character begins and, last, the number of bytes [characters + 1]."""
        return byte_offsets(self.text)

    @cached_property
    def control_ranges(self) -> list[tuple[int, int]]:
        """Half-open character ranges in which names of control tokens are parsed.

        Neighbouring template text is one range, whatever its turn, including the role of a message
        in between: templates compose ``<|user|>`` of ``<|``, the role and ``|>``. An image token is
        a range of its own, so that it completes no name that a template has begun.
        """
        ranges: list[tuple[int, int]] = []
        joins = False
        for start, end, (source, _, field, _, _) in self.spans:
            is_template = source == "template" or (
                # A whole role: only the few of ROLES are accepted.
                field == "role" and source == "message" and self.text[start:end].lower() in ROLES
            )
            if is_template and joins:
                ranges[-1] = (ranges[-1][0], end)
            elif is_template or source == "image":
                ranges.append((start, end))
            joins = is_template
        return ranges


def merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """``runs`` with neighbours of one provenance as one run."""
    joined: list[Run] = []
    length, provenance = 0, UNKNOWN
    for more, following in runs:
        if following is provenance or following == provenance:
            length += more
            continue
        if length:
            joined.append((length, provenance))
        length, provenance = more, following
    if length:
        joined.append((length, provenance))
    return tuple(joined)
