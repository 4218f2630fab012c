"""An encoded conversation cut where its tokens or its sources change.

Shape letters: T tokens, N bytes of the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_ext.conversation import EncodedConversation, Provenance
from megatron_ext.conversation.message import INSTRUCTION_ROLES, TOOL_ROLES, byte_offsets

Kind = Literal["template", "system", "user", "tool", "assistant", "image", "variable", "unknown"]
"""What supplied characters: a message by the role of its author, or another source."""

KINDS: Final[Mapping[Kind, str]] = {
    "template": "written by the template",
    "system": "system message",
    "user": "user message",
    "tool": "result of a tool",
    "assistant": "assistant message",
    "image": "image token",
    "variable": "tools and other variables",
    "unknown": "source unknown",
}
"""Every kind, in the order of a legend."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Characters of one source between two token boundaries: as a rule one token."""

    start: int
    """First character of the text that it holds."""
    text: str
    provenance: Provenance
    kind: Kind
    first_token: int
    """Number of the first token that begins in it."""
    token_count: int
    """How many tokens begin in it: several where tokens share a character, none where one token
    crosses from one source to another."""
    continues: bool
    """It begins within a token that began before it."""
    is_trained: bool
    """The tokens that reach into it are trained."""
    is_control: bool
    """It is written by a control token."""


def cells_of(
    encoded: EncodedConversation, roles: Mapping[int, str], is_control: NDArray[np.bool_]
) -> list[Cell]:
    """The cells of a conversation, which hold its text in order and each of its tokens once.

    Args:
        encoded: Of T tokens.
        roles: Role of each message by index.
        is_control: Whether each token is a control token [T].
    """
    offsets = byte_offsets(encoded.text)
    begins = np.concatenate(([0], encoded.byte_ends))[: len(encoded.ids)]
    bounds = _bounds(encoded, offsets, begins)
    firsts = np.searchsorted(begins, offsets[bounds])
    # A token without bytes at the very end of the text belongs to the last cell.
    firsts[-1] = len(begins)
    before = np.concatenate(([0], encoded.byte_ends))[firsts]
    cuts = (before > offsets[bounds]).tolist()
    # A token without bytes is shown with its neighbours and says nothing of them.
    untrained = _counted(~encoded.trained & (encoded.byte_ends > begins))
    trained, control = _counted(encoded.trained), _counted(is_control)
    cells: list[Cell] = []
    spans = iter(encoded.spans)
    span = next(spans, None)
    numbered = zip(pairwise(bounds.tolist()), pairwise(firsts.tolist()), cuts, strict=False)
    for (start, end), (first, after), continues in numbered:
        while span is not None and span.end <= start:
            span = next(spans, None)
        assert span is not None
        reached = first - continues
        cells.append(
            Cell(
                start=start,
                text=encoded.text[start:end],
                provenance=span.provenance,
                kind=kind_of(span.provenance, roles),
                first_token=first,
                token_count=after - first,
                continues=continues,
                is_trained=trained[after] > trained[reached]
                and untrained[after] == untrained[reached],
                is_control=control[after] > control[reached],
            )
        )
    return cells


def kind_of(provenance: Provenance, roles: Mapping[int, str]) -> Kind:
    """What supplied characters that come from a place; a message that has no role is a system's."""
    if provenance.source != "message":
        return provenance.source
    assert provenance.message is not None
    return kind_of_role(roles.get(provenance.message, "system"))


def kind_of_role(role: str) -> Kind:
    """What a message of a role supplies."""
    if role in INSTRUCTION_ROLES:
        return "system"
    if role in TOOL_ROLES:
        return "tool"
    return "assistant" if role == "assistant" else "user"


def _counted(flags: NDArray[np.bool_]) -> list[int]:
    """How many of ``flags`` [T] are set before each place [T + 1]."""
    counts: list[int] = np.concatenate(([0], np.cumsum(flags))).tolist()
    return counts


def _bounds(
    encoded: EncodedConversation, offsets: NDArray[np.int64], begins: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Characters at which a cell begins and, last, the number of characters."""
    characters = np.searchsorted(offsets, begins)
    whole = characters[offsets[characters] == begins]
    starts = [span.start for span in encoded.spans]
    bounds: NDArray[np.int64] = np.unique(
        np.concatenate((whole, starts, [0, len(encoded.text)])).astype(np.int64)
    )
    return bounds
