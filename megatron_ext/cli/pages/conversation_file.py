"""Conversations in a file for a person to look at: a JSON document, or JSON lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_ext.conversation.records import (
    ConversationRecord,
    conversation_record,
    sniff_record_schema,
)
from megatron_ext.documents.json_records import parse, parse_lines
from megatron_ext.documents.record_fields import AS_THEY_ARE
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
        document = parse(text.encode(), as_it_is=True)
    except DataError:
        return _lines(text, where)
    if not isinstance(document, list) or _has_schema([document]):
        return [document]
    return document


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
    block = parse_lines(text.encode().split(b"\n"), AS_THEY_ARE, first_line=1)
    for bad in block.bad:
        raise DataError(
            "neither a JSON document nor JSON lines", got=bad.problem, where=bad.place(where)
        )
    if not block.lines:
        raise DataError("there are no records", where=where)
    return block.columns[0]
