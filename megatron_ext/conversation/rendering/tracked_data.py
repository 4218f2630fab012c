"""Messages and template variables as a template sees them: copies that remember their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.conversation.message import place as place_of
from megatron_ext.conversation.rendering.provenance import UNKNOWN, Provenance
from megatron_ext.conversation.rendering.template_limits import spend, spend_on
from megatron_ext.conversation.rendering.tracked_text import TrackedText, track
from megatron_ext.errors import ConversationError


class TrackedDict(dict[str, Any]):
    """A mapping from one place; its keys and texts know that place too."""

    # A template that asks for an attribute must find an item of the mapping, not one of ours.
    __slots__ = ("_provenance",)

    _provenance: Provenance


class TrackedList(list[Any]):
    """A list from one place."""

    __slots__ = ("_provenance",)

    _provenance: Provenance


class TrackedMessage(TrackedDict):
    """One message of a conversation."""

    __slots__ = ()


def provenance_of(container: TrackedDict | TrackedList) -> Provenance:
    """The place that a container comes from as a whole."""
    return container._provenance


def tracked_messages(
    messages: Sequence[Mapping[str, Any]], first_index: int
) -> list[TrackedMessage]:
    """Copies of ``messages`` whose texts know their message and field.

    Messages are counted from ``first_index``.

    Raises:
        ConversationError: A message is nested too deeply, or holds itself.
    """
    tracked = []
    for index, message in enumerate(messages, first_index):
        copy = TrackedMessage()
        try:
            _fill(copy, message, Provenance("message", index))
        except RecursionError as error:
            raise _too_deep("the message", place_of(index)) from error
        tracked.append(copy)
    return tracked


def tracked_copy(value: Any, place: Provenance) -> Any:
    """A copy of JSON-like data whose texts know that they come from ``place``.

    Text that knows its sources already keeps them; other objects are passed on as they are.

    Raises:
        ConversationError: The data are nested too deeply, or hold themselves.
    """
    try:
        return _copied(value, place)
    except RecursionError as error:
        raise _too_deep(f"the variable {place.field}", None) from error


def _copied(value: Any, place: Provenance) -> Any:
    if isinstance(value, TrackedText):
        return value
    if isinstance(value, str):
        return track(value, place)
    if isinstance(value, Mapping):
        return _fill(TrackedDict(), value, place)
    if isinstance(value, (list, tuple)):
        copy = TrackedList(
            _copied(item, _inside(place, f"{place.field}[{index}]"))
            for index, item in enumerate(value)
        )
        copy._provenance = place
        return copy
    return value


def _fill(copy: TrackedDict, value: Mapping[Any, Any], place: Provenance) -> TrackedDict:
    copy._provenance = place
    source, message, field, _, _ = place
    for key, item in value.items():
        path = f"{field}.{key}" if field else str(key)
        inner = tuple.__new__(Provenance, (source, message, path, None, False))
        name = track(key, inner) if isinstance(key, str) else key
        copy[name] = track(item, inner) if type(item) is str else _copied(item, inner)
    return copy


def _too_deep(what: str, where: str | None) -> ConversationError:
    return ConversationError(
        f"{what} is nested too deeply, or holds itself", expected="data as in JSON", where=where
    )


def _inside(place: Provenance, field: str) -> Provenance:
    return Provenance(place.source, place.message, field)


def text_of(value: object, own: Provenance) -> str:
    """``value`` as a template prints it; a number, a truth value or None is ``own`` text.

    A mapping or list from one place prints as Python writes it and keeps its place; of anything
    else the source is unknown.
    """
    if isinstance(value, str):
        return value
    is_number = value is None or isinstance(value, (bool, int, float))
    if not is_number:
        spend(0, spend_on(value))
    if isinstance(value, (TrackedDict, TrackedList)):
        return track(_written(value), value._provenance)
    return track(str(value), own if is_number else UNKNOWN)


def _written(value: Any) -> str:
    """``repr`` of plain copies: a subclass may write itself differently."""
    if isinstance(value, dict):
        items = ", ".join(f"{_written(key)}: {_written(item)}" for key, item in value.items())
        return f"{{{items}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return str.__repr__(value) if isinstance(value, str) else repr(value)
