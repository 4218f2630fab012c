"""``RecordFields``, the values read of each record, and blocks of good and bad records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from megatron_ext.constants import MAX_RECORD_MIB
from megatron_ext.conversation.records import (
    RECORD_SCHEMA_REGISTRY,
    RecordSchemaName,
    conversation_record,
)
from megatron_ext.errors import ConversationError, DataError

FieldContent = Literal["text", "sentences", "conversation", "record"]
"""A text; a text or a list of texts; a ``ConversationRecord``; the record itself, unchecked."""
_KEYS_SHOWN = 12
MOST_RECORD_BYTES: Final = MAX_RECORD_MIB << 20
"""Bytes of a record, unless another limit is given."""
_CONVERSATION_KEYS = ("messages", "conversations")
"""Usual names of the field that holds a conversation."""


class BadRecordError(DataError):
    """A record that cannot be used, in a run that stops at the first."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A line or row that cannot be used."""

    line: int | None
    """Line counted from 1 in its slice; None for the whole file."""

    problem: str
    """Reason, in one line of text."""

    rows: int = 1
    """Number of lines or rows lost."""

    @classmethod
    def of(cls, line: int | None, error: Exception, *, rows: int = 1) -> BadRecord:
        """The bad record that ``error`` describes."""
        return cls(line, str(error).replace("\n", " "), rows)

    def error(self, path: str, lines_before: int = 0) -> BadRecordError:
        """The error of a run that refuses bad records."""
        return BadRecordError(self.problem, where=self.place(path, lines_before))

    def place(self, path: str, lines_before: int = 0) -> str:
        """``file:line``.

        Args:
            path: Path of the file.
            lines_before: Lines of the file before the slice.
        """
        return path if self.line is None else f"{path}:{self.line + lines_before}"


@dataclass(frozen=True, slots=True)
class RecordFields:
    """Fields that are read of each record.

    Attributes:
        keys: Names of the fields.
        content: Kind of value that each holds.
        flag: The flag or configuration key that sets ``keys``, for error messages.
        conversation_flag: The flag that reads conversations in place of texts, for error messages;
            None where there is no such flag.
        schema: Schema of conversations: a row of ``RECORD_SCHEMA_REGISTRY``, or ``auto`` to detect
            it in each record.
        are_default: Whether ``keys`` are the default, so that a conversation is read from the
            record as a whole.
        most_bytes: Bytes of a record; one with more is bad.
    """

    keys: tuple[str, ...]
    content: FieldContent = "text"
    flag: str = "--text-field"
    conversation_flag: str | None = None
    schema: RecordSchemaName = "auto"
    are_default: bool = False
    most_bytes: int = MOST_RECORD_BYTES

    @property
    def are_unread(self) -> bool:
        """Whether records are passed on unchecked."""
        return self.content == "record"

    def values_of(self, record: object) -> list[Any]:
        """The fields of one record, in the order of ``keys``.

        Raises:
            DataError: The record is no mapping, lacks a field, or a field holds something else.
        """
        if self.are_unread:
            return [record]
        if self.content == "conversation":
            return self._conversations_of(record)
        if not isinstance(record, dict):
            raise self._error(self.keys[0], type(record).__name__)
        return [self._value_of(record, key) for key in self.keys]

    def columns_of(self, present: Sequence[str]) -> list[str]:
        """The columns to read of a file with the columns ``present``.

        Raises:
            DataError: A field is missing.
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
        """The error of a record or file that lacks ``key``."""
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
        """Advice for a record that lacks a key, or holds something else there."""
        fix = f"set {self.flag} to the field that holds the {name}"
        is_conversation = any(key in present for key in _CONVERSATION_KEYS)
        if name == "text" and is_conversation and self.conversation_flag is not None:
            return f"pass {self.conversation_flag} to read the conversations there, or {fix}"
        return fix


def check_record_size(size: int, most_bytes: int) -> None:
    """Check the number of bytes of a record.

    Raises:
        DataError: It is above ``most_bytes``.
    """
    if size > most_bytes:
        raise DataError(
            "the record is too long",
            got=f"more than {most_bytes:,} bytes",
            fix="cut it into several, or raise data.max_record_mib of a run, --max-record-mib of "
            "tokenize",
        )


AS_THEY_ARE: Final = RecordFields(("record",), "record")
"""Whole records, unchecked."""


@dataclass(slots=True)
class RecordBlock:
    """Consecutive records, as columns. R records.

    Attributes:
        columns: Values [R] of each key.
        lines: Line or row of each record [R], counted from 1 in the slice.
        bad: Lines and rows that cannot be used.
        line_count: Lines or rows that the block spans, blank and bad ones included.
        size: Bytes of the file that the block stands for.
        starts: Byte offset of each line, in uncompressed JSON lines; empty elsewhere.
    """

    columns: tuple[list[Any], ...]
    lines: list[int] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)
    line_count: int = 0
    size: int = 0
    starts: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, fields: RecordFields) -> RecordBlock:
        """A block without records yet."""
        return cls(tuple([] for _ in fields.keys))

    def add(self, line: int, values: Sequence[Any]) -> None:
        """Append a record in place."""
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)
        self.lines.append(line)
