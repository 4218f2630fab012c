"""Conversations in a file for a person to look at: a JSON document, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_ext.conversation.records import (
    ConversationRecord,
    conversation_record,
    sniff_record_schema,
)
from megatron_ext.errors import ConfigError, ConversationError, DataError


def json_records(text: str, where: str) -> list[Any]:
    """The records of a JSON document or of JSON lines.

    A document is one record, or a list of them; a list of turns is one record.

    Args:
        text: What the file holds.
        where: The file, for errors.

    Raises:
        DataError: It is neither.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return _lines(text, where)
    if not isinstance(document, list) or _has_schema([document]):
        return [document]
    return document


def file_schema(records: Sequence[Any], where: str) -> str:
    """Name of the schema that the records of a file have.

    Raises:
        DataError: They have none that is known, or leave a choice.
    """
    try:
        return sniff_record_schema(records)
    except ConversationError as error:
        raise DataError(str(error), where=where) from error


def has_conversations(records: Sequence[Any]) -> bool:
    """Whether some record has a known schema."""
    return any(_has_schema([record]) for record in records)


def conversation_of(records: Sequence[Any], number: int, schema: str) -> ConversationRecord:
    """The conversation of one record, counted from 1.

    Raises:
        ConfigError: There is no such record.
        ConversationError: It is no conversation of the schema.
    """
    if not 1 <= number <= len(records):
        raise ConfigError(
            "there is no such record", got=number, expected=f"1 to {len(records)}", where="--record"
        )
    return conversation_record(records[number - 1], schema)


@contextmanager
def naming_record(where: str, number: int) -> Iterator[None]:
    """Let a ``ConversationError`` of the block name the file and the record."""
    try:
        yield
    except ConversationError as error:
        raise ConversationError(str(error), where=f"{where}, record {number}") from error


def _has_schema(records: Sequence[Any]) -> bool:
    try:
        sniff_record_schema(records)
    except ConversationError:
        return False
    return True


def _lines(text: str, where: str) -> list[Any]:
    records = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DataError(
                "neither a JSON document nor JSON lines", got=error, where=f"{where}:{number}"
            ) from None
    if not records:
        raise DataError("there are no records", where=where)
    return records
