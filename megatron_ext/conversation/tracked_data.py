"""Messages and template variables as a template sees them: copies that remember their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.conversation.provenance import UNKNOWN, Provenance, Source
from megatron_ext.conversation.tracked_text import TrackedText, track


class TrackedDict(dict[str, Any]):
    """A mapping from one place; its keys and texts know that place too."""

    __slots__ = ("provenance",)

    provenance: Provenance


class TrackedList(list[Any]):
    """A list from one place."""

    __slots__ = ("provenance",)

    provenance: Provenance


class Progress:
    """Which message a running template has reached, to name it in an error."""

    __slots__ = ("turn",)

    def __init__(self) -> None:
        self.turn: int | None = None


class TrackedMessage(TrackedDict):
    """One message of a conversation."""

    __slots__ = ("index", "progress")

    index: int
    progress: Progress


def tracked_messages(
    messages: Sequence[Mapping[str, Any]], first_index: int, progress: Progress
) -> list[TrackedMessage]:
    """Copies of ``messages`` whose texts know their message and field.

    Messages are counted from ``first_index``.
    """
    tracked = []
    for index, message in enumerate(messages, first_index):
        copy = TrackedMessage()
        copy.index = index
        copy.progress = progress
        _fill(copy, message, "message", index, "")
        tracked.append(copy)
    return tracked


def tracked_copy(value: Any, source: Source, message: int | None, path: str) -> Any:
    """A copy of JSON-like data whose texts know that they come from ``path``.

    Text that knows its sources already keeps them; other objects are passed on as they are.
    """
    if isinstance(value, TrackedText):
        return value
    if isinstance(value, str):
        return track(value, Provenance(source, message, path))
    if isinstance(value, Mapping):
        return _fill(TrackedDict(), value, source, message, path)
    if isinstance(value, (list, tuple)):
        copy = TrackedList(
            tracked_copy(item, source, message, f"{path}[{index}]")
            for index, item in enumerate(value)
        )
        copy.provenance = Provenance(source, message, path)
        return copy
    return value


def _fill(
    copy: TrackedDict, value: Mapping[Any, Any], source: Source, message: int | None, path: str
) -> TrackedDict:
    copy.provenance = Provenance(source, message, path)
    for key, item in value.items():
        inner = f"{path}.{key}" if path else str(key)
        name = track(key, Provenance(source, message, inner)) if isinstance(key, str) else key
        copy[name] = tracked_copy(item, source, message, inner)
    return copy


def text_of(value: object, own: Provenance) -> str:
    """``value`` as a template prints it; a number, a truth value or None is ``own`` text.

    A mapping or list from one place prints as Python writes it and keeps its place; of anything
    else the source is unknown.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, (TrackedDict, TrackedList)):
        return track(_written(value), value.provenance)
    is_number = value is None or isinstance(value, (bool, int, float))
    return track(str(value), own if is_number else UNKNOWN)


def _written(value: Any) -> str:
    """``repr`` of plain copies: a subclass may write itself differently."""
    if isinstance(value, dict):
        items = ", ".join(f"{_written(key)}: {_written(item)}" for key, item in value.items())
        return f"{{{items}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return str.__repr__(value) if isinstance(value, str) else repr(value)
