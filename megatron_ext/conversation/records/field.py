"""Checked values of a record; errors name the place of each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_ext.errors import ConversationError
from megatron_ext.files import parse_json

_KEYS_SHOWN = 12


def text_of(fields: Mapping[str, Any], key: str, where: str) -> str:
    """The text under ``key``; empty where it is missing or null.

    Raises:
        ConversationError: Something else is there.
    """
    value = fields.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ConversationError(
            "the field is not text", got=type(value).__name__, expected="a string", where=where
        )
    return value


def parsed(value: Any, where: str) -> Any:
    """``value``; where it is text, the JSON that it spells.

    Raises:
        ConversationError: The text is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        spelled = parse_json(value)
        if "\\u" in value:
            # JSON can spell half of a surrogate pair, which no tokenizer takes.
            json.dumps(spelled, ensure_ascii=False).encode()
    except ValueError as error:
        raise ConversationError(
            "the text is not JSON", got=error, expected="JSON", where=where
        ) from error
    return spelled


def list_of(value: Any, where: str) -> list[Any]:
    """``value`` if it is a list or the JSON of one; empty for null and empty text.

    Raises:
        ConversationError: It is something else.
    """
    if value is None or value == "":
        return []
    items = parsed(value, where)
    if not isinstance(items, list):
        raise ConversationError(
            "the field is not a list", got=type(items).__name__, expected="a list", where=where
        )
    return items


def mapping_of(value: Any, where: str) -> Mapping[str, Any]:
    """``value`` if it is a mapping or the JSON of one.

    Raises:
        ConversationError: It is something else.
    """
    fields = parsed(value, where)
    if not isinstance(fields, Mapping):
        raise ConversationError(
            "the value is not a mapping",
            got=type(fields).__name__,
            expected="a mapping",
            where=where,
        )
    return fields


def first_key(fields: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    """The first of ``keys`` that has a value."""
    return next((key for key in keys if fields.get(key) is not None), None)


def keys_seen(fields: Iterable[object]) -> str:
    """The keys of a record, for an error."""
    names = [str(name) for name in fields]
    shown = ", ".join(names[:_KEYS_SHOWN])
    if not names:
        return "no keys"
    return f"the keys {shown}" + (", ..." if len(names) > _KEYS_SHOWN else "")
