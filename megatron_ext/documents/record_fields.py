"""The records of a stretch of a file, what their fields must hold, and what cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from megatron_ext.conversation.records import (
    RECORD_SCHEMA_REGISTRY,
    RecordSchemaName,
    conversation_record,
)
from megatron_ext.errors import ConversationError, DataError

FieldContent = Literal["text", "sentences", "conversation", "record"]
"""A text; a text or a list of texts; a ``ConversationRecord``; whatever the record is, unread."""
_KEYS_SHOWN = 12
_CONVERSATION_KEYS = ("messages", "conversations")
"""Under which names data sets have their conversations."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A line or row that gives no document."""

    line: int | None
    """Counted from 1 in its slice; None where the whole file is meant."""

    problem: str
    """One line of text."""

    rows: int = 1
    """How many lines or rows are lost."""

    @classmethod
    def of(cls, line: int | None, error: Exception, *, rows: int = 1) -> BadRecord:
        """The record that ``error`` is about."""
        return cls(line, str(error).replace("\n", " "), rows)

    def error(self, path: str, lines_before: int = 0) -> DataError:
        """The error that stops a run which takes no bad records."""
        return DataError(self.problem, where=self.place(path, lines_before))

    def place(self, path: str, lines_before: int = 0) -> str:
        """``file:line``.

        Args:
            path: The file.
            lines_before: Its lines before the slice.
        """
        return path if self.line is None else f"{path}:{self.line + lines_before}"


@dataclass(frozen=True, slots=True)
class RecordFields:
    """Which fields of a record are read.

    Attributes:
        keys: Their names.
        content: What each holds.
        flag: The flag or configuration key that sets ``keys``, for error messages.
        conversation_flag: The flag that has conversations read in place of texts, for error
            messages; None where nothing has.
        schema: How conversations are written: a row of ``RECORD_SCHEMA_REGISTRY``, or ``auto`` to
            tell it of each record anew.
        are_default: ``keys`` were not asked for: the record as a whole gives one conversation.
    """

    keys: tuple[str, ...]
    content: FieldContent = "text"
    flag: str = "--json-keys"
    conversation_flag: str | None = None
    schema: RecordSchemaName = "auto"
    are_default: bool = False

    @property
    def are_unread(self) -> bool:
        """Whether a record is taken as it is."""
        return self.content == "record"

    def values_of(self, record: object) -> list[Any]:
        """The fields of one record, in the order of ``keys``.

        Raises:
            DataError: It is no mapping, lacks a field, or one holds something else.
        """
        if self.are_unread:
            return [record]
        if self.content == "conversation":
            return self._conversations_of(record)
        if not isinstance(record, dict):
            raise self._error(self.keys[0], type(record).__name__)
        return [self._value_of(record, key) for key in self.keys]

    def columns_of(self, present: Sequence[str]) -> list[str]:
        """The columns that are read of a file that has ``present``.

        Raises:
            DataError: It lacks a field.
        """
        if self.are_unread:
            return list(present)
        wanted = {*self.keys}
        if self.content == "conversation":
            names = RECORD_SCHEMA_REGISTRY if self.schema == "auto" else (self.schema,)
            wanted |= {key for name in names for key in RECORD_SCHEMA_REGISTRY[name].keys}
        found = [name for name in present if name in wanted]
        missing = next((key for key in self.keys if key not in present), None)
        if missing is not None and not (self.are_default and found):
            raise self.missing(missing, present)
        return found

    def missing(self, key: str, present: Iterable[str]) -> DataError:
        """The error of a record, or a file, that has other fields."""
        names = list(present)
        return self._error(key, f"keys {names[:_KEYS_SHOWN]}", names)

    def _conversations_of(self, record: object) -> list[Any]:
        try:
            return [
                conversation_record(record, self.schema, key=None if self.are_default else key)
                for key in self.keys
            ]
        except ConversationError as error:
            raise DataError(str(error)) from error

    def _value_of(self, record: dict[str, Any], key: str) -> Any:
        if key not in record:
            raise self.missing(key, record)
        value = record[key]
        fits = isinstance(value, str) or (
            self.content == "sentences"
            and isinstance(value, list)
            and all(isinstance(sentence, str) for sentence in value)
        )
        if not fits:
            raise self._error(key, f"a value of type {type(value).__name__}", record)
        return value

    def _error(self, key: str, got: str, present: Iterable[str] = ()) -> DataError:
        name = "conversation" if self.content == "conversation" else "text"
        return DataError(
            f"the line has no {name} under {key!r}", got=got, fix=self._fix(name, set(present))
        )

    def _fix(self, name: str, present: set[str]) -> str:
        """What to do about a record that lacks a key, or holds something else there."""
        fix = f"set {self.flag} to the field that holds the {name}"
        is_conversation = any(key in present for key in _CONVERSATION_KEYS)
        if name == "text" and is_conversation and self.conversation_flag is not None:
            return f"pass {self.conversation_flag} to read the conversations there, or {fix}"
        return fix


AS_THEY_ARE: Final = RecordFields(("record",), "record")
"""Whole records, unread."""


@dataclass(slots=True)
class RecordBlock:
    """Consecutive records, as columns. R records.

    Attributes:
        columns: Value of each record [R], for each key.
        lines: Where each record stands [R], counted from 1 in its slice.
        bad: What gives no record.
        line_count: Lines or rows that the block spans, blank and bad ones included.
        size: Its share of the bytes of the file.
        starts: Byte at which each of its lines begins, in JSON lines that are not compressed; empty
            elsewhere.
    """

    columns: tuple[list[Any], ...]
    lines: list[int] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)
    line_count: int = 0
    size: int = 0
    starts: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, fields: RecordFields) -> RecordBlock:
        """A block to which records are added."""
        return cls(tuple([] for _ in fields.keys))

    def add(self, line: int, values: Sequence[Any]) -> None:
        """Append a record."""
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)
        self.lines.append(line)
