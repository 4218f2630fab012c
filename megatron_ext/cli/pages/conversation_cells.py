"""Cells of an encoded conversation, cut where tokens or sources change, and warnings about it.

T tokens, N bytes of the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_ext.conversation import IMAGE_TOKEN, Conversation, EncodedConversation, Provenance
from megatron_ext.conversation.message import (
    CALL_FIELDS,
    INSTRUCTION_ROLES,
    THINKING_FIELDS,
    TOOL_ROLES,
    byte_offsets,
    content_text,
)
from megatron_ext.tokenizers.special_tokens import ControlTokens

Kind = Literal["template", "system", "user", "tool", "assistant", "image", "variable", "unknown"]
"""Source of characters: a message, by the role of its author, or something else."""

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
"""Names of all kinds, in the order of the legend."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Characters of one source between two token boundaries, usually one token."""

    start: int
    """Position of its first character in the text."""
    text: str
    provenance: Provenance
    kind: Kind
    first_token: int
    """Index of the first token that begins in it."""
    token_count: int
    """Number of tokens that begin in it: several if tokens share a character, none if one token
    crosses from one source to another."""
    continues: bool
    """Whether it begins within a token that began before it."""
    is_trained: bool
    """Whether the tokens that overlap it are trained."""
    is_control: bool
    """Whether it is a control token."""


def cells_of(
    encoded: EncodedConversation, roles: Mapping[int, str], is_control: NDArray[np.bool_]
) -> list[Cell]:
    """The cells of a conversation: its text in order, and each of its tokens once.

    Args:
        encoded: The conversation, of T tokens.
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
    # A token without bytes is shown with its neighbours and does not affect their flags.
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
    """Kind of characters by provenance; a message without a role counts as a system message."""
    if provenance.source != "message":
        return provenance.source
    assert provenance.message is not None
    return kind_of_role(roles.get(provenance.message, "system"))


def kind_of_role(role: str) -> Kind:
    """Kind of characters from a message of a role."""
    if role in INSTRUCTION_ROLES:
        return "system"
    if role in TOOL_ROLES:
        return "tool"
    return "assistant" if role == "assistant" else "user"


def _counted(flags: NDArray[np.bool_]) -> list[int]:
    """Number of set ``flags`` [T] before each position [T + 1]."""
    counts: list[int] = np.concatenate(([0], np.cumsum(flags))).tolist()
    return counts


def _bounds(
    encoded: EncodedConversation, offsets: NDArray[np.int64], begins: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Character positions at which cells begin, and the number of characters."""
    characters = np.searchsorted(offsets, begins)
    whole = characters[offsets[characters] == begins]
    starts = [span.start for span in encoded.spans]
    bounds: NDArray[np.int64] = np.unique(
        np.concatenate((whole, starts, [0, len(encoded.text)])).astype(np.int64)
    )
    return bounds


_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class ConversationWarning:
    """Something to check before a model trains on the conversation."""

    message: int | None
    """Index of the message concerned; None for the whole conversation."""
    text: str


def conversation_warnings(
    conversation: Conversation,
    encoded: EncodedConversation,
    cells: Sequence[Cell],
    *,
    trained_roles: Collection[str],
    control_tokens: ControlTokens,
    has_images: bool,
) -> list[ConversationWarning]:
    """All warnings about a conversation, in the order of its messages.

    Args:
        conversation: Messages.
        encoded: The encoded conversation.
        cells: The cells of ``encoded``.
        trained_roles: Roles whose messages are trained.
        control_tokens: Control tokens of the vocabulary.
        has_images: Whether image tokens in contents stand for images.
    """
    warnings = [
        *_untrained(conversation, encoded, cells, trained_roles),
        *_changed(conversation, encoded, has_images=has_images),
        *_split_answers(encoded, cells),
        *_control_names(encoded, cells, control_tokens),
    ]
    return sorted(warnings, key=lambda warning: -1 if warning.message is None else warning.message)


def _untrained(
    conversation: Conversation,
    encoded: EncodedConversation,
    cells: Sequence[Cell],
    trained_roles: Collection[str],
) -> Iterator[ConversationWarning]:
    """Warnings about untrained messages of trained roles."""
    if not encoded.trained.any():
        yield ConversationWarning(None, "nothing of the conversation is trained")
    trained = {cell.provenance.message for cell in cells if cell.is_trained}
    trained |= {cell.provenance.turn for cell in cells if cell.is_trained}
    for index, message in enumerate(conversation):
        if message["role"] not in trained_roles or index in trained:
            continue
        reason = encoded.excluded.get(index, "nothing of it is written")
        yield ConversationWarning(index, f"not trained: {reason}")


def _changed(
    conversation: Conversation, encoded: EncodedConversation, *, has_images: bool
) -> Iterator[ConversationWarning]:
    """Warnings about fields that a template leaves out, and contents that it changes."""
    shown = _shown_fields(encoded)
    for index, message in enumerate(conversation):
        for field in ("content", *THINKING_FIELDS, *CALL_FIELDS):
            given = message.get(field)
            if field == "content":
                given = content_text(message)
                given = given.replace(IMAGE_TOKEN, "") if has_images else given
            if not given or (isinstance(given, str) and not given.strip()):
                continue
            if (index, field) not in shown:
                yield ConversationWarning(index, f"{field} is left out")
            elif field == "content" and shown[index, field] != given:
                change = _change(given, shown[index, field])
                yield ConversationWarning(index, f"content is changed: {change}")


def _change(given: str, shown: str) -> str:
    if shown.strip() == given.strip():
        return f"{len(given) - len(shown):,} characters of white space around it are left out"
    if shown in given:
        return f"{len(shown):,} of its {len(given):,} characters are shown"
    return f"{len(given):,} characters are given, {len(shown):,} others are shown"


def _split_answers(
    encoded: EncodedConversation, cells: Iterable[Cell]
) -> Iterator[ConversationWarning]:
    """Warnings about text of answers that shares a token with other text and is untrained."""
    ranges = iter(encoded.trained_ranges)
    start, end = next(ranges, (0, 0))
    for cell in cells:
        while end <= cell.start and end:
            start, end = next(ranges, (0, 0))
        if start <= cell.start < end and not cell.is_trained:
            yield ConversationWarning(
                cell.provenance.turn,
                f"{cell.text!r} belongs to the answer and is not trained: its token reaches beyond",
            )


def _shown_fields(encoded: EncodedConversation) -> dict[tuple[int, str], str]:
    """Rendered text of the messages' fields, by message and field; without images."""
    shown: dict[tuple[int, str], list[str]] = {}
    for span in encoded.spans:
        place = span.provenance
        if place.message is not None and place.source == "message":
            name = place.field.partition(".")[0].partition("[")[0]
            shown.setdefault((place.message, name), []).append(encoded.text[span.start : span.end])
    return {key: "".join(texts) for key, texts in shown.items()}


def _control_names(
    encoded: EncodedConversation, cells: Iterable[Cell], control_tokens: ControlTokens
) -> Iterator[ConversationWarning]:
    """Warnings about names of control tokens in messages, and how they were read."""
    read = {cell.start for cell in cells if cell.is_control}
    names_of: dict[tuple[int | None, bool], Counter[str]] = {}
    for span in encoded.spans:
        if span.may_hold_control_tokens:
            continue
        text = encoded.text[span.start : span.end]
        for match in control_tokens.find(text):
            key = span.provenance.message, span.start + match.begin in read
            names_of.setdefault(key, Counter())[text[match.begin : match.end]] += 1
    for (message, is_read), names in names_of.items():
        became = "are read as control tokens" if is_read else "stay text"
        yield ConversationWarning(
            message, f"names of control tokens in it {became}: {_listed(names)}"
        )


def _listed(names: Counter[str]) -> str:
    shown = [
        name if count == 1 else f"{name} ({count:,} times)"
        for name, count in names.most_common(_NAMES_SHOWN)
    ]
    more = len(names) - len(shown)
    return ", ".join([*shown, f"{more:,} more"] if more else shown)
