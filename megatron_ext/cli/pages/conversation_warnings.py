"""Warnings of a conversation: what a person should look at before a model trains on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_ext.cli.pages.conversation_cells import Cell
from megatron_ext.conversation import IMAGE_TOKEN, Conversation, EncodedConversation
from megatron_ext.conversation.message import CALL_FIELDS, THINKING_FIELDS, content_text
from megatron_ext.tokenizers.special_tokens import ControlTokens

_HEADER_FIELDS = ("role", "name")
_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class ConversationWarning:
    """One thing to look at."""

    message: int | None
    """Index of the message that it is about; None for the whole conversation."""
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
    """Everything to look at, in the order of the messages.

    Args:
        conversation: Messages.
        encoded: What became of them.
        cells: The cells of that.
        trained_roles: Whose messages are trained as a rule.
        control_tokens: Those of the vocabulary.
        has_images: Image tokens in a content are images.
    """
    found = [
        *_untrained(conversation, encoded, cells, trained_roles),
        *_changed(conversation, encoded, has_images=has_images),
        *_split_answers(encoded, cells),
        *_control_names(encoded, cells, control_tokens),
    ]
    return sorted(found, key=lambda warning: -1 if warning.message is None else warning.message)


def _untrained(
    conversation: Conversation,
    encoded: EncodedConversation,
    cells: Sequence[Cell],
    trained_roles: Collection[str],
) -> Iterator[ConversationWarning]:
    """Messages that one would expect to be trained."""
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
    """Messages of which a template leaves out a field, or whose content it changes."""
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
    """Answers of which a token is shared with other text, so that it cannot be trained."""
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
    """What is written of each message's fields, by index and name; without images."""
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
    """Names of control tokens in what messages say, and what they were read as."""
    read = {cell.start for cell in cells if cell.is_control}
    found: dict[tuple[int | None, bool], Counter[str]] = {}
    for span in encoded.spans:
        if span.may_hold_control_tokens:
            continue
        text = encoded.text[span.start : span.end]
        for match in control_tokens.find(text):
            key = span.provenance.message, span.start + match.begin in read
            found.setdefault(key, Counter())[text[match.begin : match.end]] += 1
    for (message, is_read), names in found.items():
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
