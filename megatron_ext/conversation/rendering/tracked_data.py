"""Template variables, and the JSON and other text made of them, with provenance.

JSON is written as ``json.dumps`` writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from megatron_ext.conversation.message import CALL_FIELDS, THINKING_FIELDS
from megatron_ext.conversation.message import place as place_of
from megatron_ext.conversation.rendering.provenance import TEMPLATE, UNKNOWN, Provenance
from megatron_ext.conversation.rendering.template_limits import consume, consume_reading
from megatron_ext.conversation.rendering.tracked_text import TrackedText, join, track
from megatron_ext.errors import ConversationError


class TrackedDict(dict[str, Any]):
    """A mapping from one place; its keys and texts have the provenance of that place."""

    # An attribute that a template reads must be an item of the mapping, not a Python attribute.
    __slots__ = ("_provenance",)

    _provenance: Provenance


class TrackedList(list[Any]):
    """A list from one place."""

    __slots__ = ("_provenance",)

    _provenance: Provenance


class TrackedMessage(TrackedDict):
    """One message of a conversation."""

    __slots__ = ()


NO_CONTENT: Final = TrackedText("", ())
"""Content of a call without one: an empty text that templates find to be none, since some print it
or search it, and others (DeepSeek-R1) write calls beside none alone."""


def provenance_of(container: TrackedDict | TrackedList) -> Provenance:
    """Provenance of a container as a whole."""
    return container._provenance


def tracked_messages(
    messages: Sequence[Mapping[str, Any]], first_index: int
) -> list[TrackedMessage]:
    """Copies of ``messages``, counted from ``first_index``, whose texts know message and field.

    They have the fields that transformers gives to templates: none that is None, and thinking by
    each name that templates read, with the source of the field that it came in. The content of a
    call without one is ``NO_CONTENT``.

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
        for name in [name for name, value in copy.items() if value is None]:
            del copy[name]
        if copy.get("role") == "assistant" and any(copy.get(name) for name in CALL_FIELDS):
            copy.setdefault("content", NO_CONTENT)
        tracked.append(_with_thinking(copy))
    return tracked


def _with_thinking(message: TrackedMessage) -> TrackedMessage:
    """The message with its thinking, if it has any, as ``thinking`` and ``reasoning_content``."""
    thinking = next((message[name] for name in THINKING_FIELDS if name in message), None)
    if thinking is None:
        return message
    copy = TrackedMessage({"thinking": thinking, **message, "reasoning_content": thinking})
    copy._provenance = message._provenance
    return copy


def tracked_copy(value: Any, place: Provenance) -> Any:
    """A copy of JSON-like data whose texts have the provenance ``place``.

    Text with provenance keeps it; other objects are passed on as they are.

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
            _copied(item, Provenance(place.source, place.message, f"{place.field}[{index}]"))
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


def text_of(value: object, own: Provenance) -> str:
    """``value`` as a template prints it; numbers, booleans and None get the provenance ``own``.

    A mapping or list from one place prints as in Python and keeps its place; anything else is of
    unknown source.
    """
    if isinstance(value, str):
        return value
    is_number = value is None or isinstance(value, (bool, int, float))
    if not is_number:
        consume(0, consume_reading(value))
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


def settled(result: str, inputs: Iterable[Any]) -> str:
    """``result`` with the source of its inputs where that is certain, else ``result`` as it is.

    * Made of template text and numbers only, it is template text.
    * Made of text from one message, or from the variables, and at most white space of the template,
      it comes from there.
    * Anything else, such as a line-wrapped mixture of markers and content, is of unknown source.
    """
    places: dict[Provenance, None] = {}
    has_template = False
    for text, provenance in _runs(inputs):
        if provenance.source == "template":
            has_template = has_template or not text.isspace()
        else:
            places[provenance] = None
    if not places:
        return track(result, TEMPLATE)
    place = _common_place(list(places))
    return result if place is None or has_template else track(result, place)


def _common_place(places: list[Provenance]) -> Provenance | None:
    """Common provenance of fields of one message, or of variables; None where there is none."""
    first = places[0]
    if any(place.source == "unknown" for place in places):
        return None
    if any((place.source, place.message) != (first.source, first.message) for place in places):
        return None
    if len(places) > 1 and any(place.field == "role" for place in places):
        # A role is never trained and content may be.
        return None
    return first._replace(field=_common_path([place.field for place in places]))


def _common_path(paths: Sequence[str]) -> str:
    """``content`` of ``content[0].text`` and ``content[1].text``."""
    steps = zip(*(re.findall(r"[^.\[]+|\[\d+\]", path) for path in paths), strict=False)
    shared = takewhile(lambda names: len(set(names)) == 1, steps)
    return ".".join(names[0] for names in shared).replace(".[", "[")


def _runs(values: Iterable[Any]) -> Iterator[tuple[str, Provenance]]:
    """Every run of text in ``values``; opaque objects count as of unknown source."""
    for value in values:
        consume(1)
        if isinstance(value, TrackedText):
            consume(len(value.runs) >> 2)
            yield from value.pieces()
        elif isinstance(value, str):
            if value:
                yield value, UNKNOWN
        elif isinstance(value, (TrackedDict, TrackedList)):
            yield "", provenance_of(value)
        elif isinstance(value, Mapping):
            yield from _runs(value.keys())
            yield from _runs(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _runs(value)
        elif value is not None and not isinstance(value, (bool, int, float)):
            yield "", UNKNOWN


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonStyle:
    """The options of ``json.dumps`` that chat templates use."""

    ensure_ascii: bool = False
    """Write what is not ASCII as escapes."""
    indent: str | None = None
    """Indentation of one level of nesting; None writes everything in one line."""
    item_separator: str = ", "
    """Between two items."""
    key_separator: str = ": "
    """Between a key and its value."""
    sort_keys: bool = False
    """Sort keys instead of keeping the order of the mapping."""

    @classmethod
    def of(
        cls,
        *,
        ensure_ascii: bool,
        indent: int | str | None,
        separators: tuple[str, str] | None,
        sort_keys: bool,
    ) -> JsonStyle:
        """The style that ``json.dumps`` has with these arguments."""
        consume(0, abs(indent) if isinstance(indent, int) else 0)
        item, key = separators or ((", " if indent is None else ","), ": ")
        return cls(
            ensure_ascii=ensure_ascii,
            indent=" " * indent if isinstance(indent, int) else indent,
            item_separator=item,
            key_separator=key,
            sort_keys=sort_keys,
        )


def to_json(value: Any, style: JsonStyle, own: Provenance) -> TrackedText:
    """``value`` as JSON.

    Args:
        value: JSON-like data. Data from one place keep that place, including punctuation and
            numbers; a container that the template made keeps the places of its texts.
        style: Options of the output.
        own: Provenance of punctuation and numbers that have no other.

    Raises:
        TypeError: ``value`` holds an object that JSON cannot hold.
    """
    return join(_consumed(_pieces(value, style, own, "")))


def _consumed(pieces: Iterator[TrackedText]) -> Iterator[TrackedText]:
    """The pieces, each of which consumes its size before the next is made."""
    for piece in pieces:
        consume(1, len(piece))
        yield piece


def _pieces(value: Any, style: JsonStyle, own: Provenance, margin: str) -> Iterator[TrackedText]:
    if isinstance(value, TrackedText):
        yield _text(value, style, own)
    elif isinstance(value, Mapping):
        own = provenance_of(value) if isinstance(value, TrackedDict) else own
        items = sorted(value.items()) if style.sort_keys else value.items()
        rows = (
            [_key(key, style, own), track(style.key_separator, own), item] for key, item in items
        )
        yield from _container("{}", rows, style, own, margin)
    elif isinstance(value, (list, tuple)):
        own = provenance_of(value) if isinstance(value, TrackedList) else own
        yield from _container("[]", ([item] for item in value), style, own, margin)
    else:
        yield track(json.dumps(value, ensure_ascii=style.ensure_ascii), own)


def _container(
    brackets: str, rows: Any, style: JsonStyle, own: Provenance, margin: str
) -> Iterator[TrackedText]:
    """JSON of a container; each row is the written text before a value, then the value."""
    inner = margin if style.indent is None else margin + style.indent
    line = "" if style.indent is None else "\n"
    before = brackets[0] + line + (inner if line else "")
    is_empty = True
    for *written, value in rows:
        is_empty = False
        yield track(before, own)
        yield from written
        yield from _pieces(value, style, own, inner)
        before = style.item_separator + line + (inner if line else "")
    yield track(brackets if is_empty else line + (margin if line else "") + brackets[1], own)


def _key(key: Any, style: JsonStyle, own: Provenance) -> TrackedText:
    if isinstance(key, TrackedText):
        return _text(key, style, own)
    # Leave to json.dumps which keys other than strings it writes, and how.
    written = json.dumps({key: 0}, ensure_ascii=style.ensure_ascii)
    return track(written[1 : written.rindex(":")], own)


def _text(text: TrackedText, style: JsonStyle, own: Provenance) -> TrackedText:
    """A string with quotes. Escapes are per character, so that runs can be written one by one."""
    if len(text.runs) == 1:
        own = text.runs[0][1]
    pieces = [track('"', own)]
    if len(text.runs) > 1:
        consume(len(text.runs))
    for run, provenance in text.pieces():
        pieces.append(track(json.dumps(run, ensure_ascii=style.ensure_ascii)[1:-1], provenance))
    return join([*pieces, track('"', own)])
