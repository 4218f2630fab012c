"""The records of a stretch of the input, and what their fields must hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_ext.errors import DataError
from megatron_ext.preprocessing.bad_record import BadRecord

FieldContent = Literal["text", "sentences", "conversation"]
"""A text; a text or a list of texts; a list of messages."""

_KEYS_SHOWN = 12
_CONVERSATION_KEYS = ("messages", "conversations")
"""Under which names data sets have their conversations."""

_NAMES: dict[FieldContent, str] = {
    "text": "text",
    "sentences": "text",
    "conversation": "conversation",
}


@dataclass(frozen=True, slots=True)
class RecordFields:
    """Which fields of a record are read.

    Attributes:
        keys: Their names.
        content: What each holds.
        flag: The flag or configuration key that sets ``keys``, for error messages.
        conversation_flag: The flag that has conversations read in place of texts, for error
            messages; None where nothing has.
    """

    keys: tuple[str, ...]
    content: FieldContent = "text"
    flag: str = "--json-keys"
    conversation_flag: str | None = None

    def values_of(self, record: object) -> list[Any]:
        """The fields of one record, in the order of ``keys``.

        Raises:
            DataError: It is no mapping, lacks a field, or one holds something else.
        """
        if not isinstance(record, dict):
            raise self._error(self.keys[0], type(record).__name__)
        return [self._value_of(record, key) for key in self.keys]

    def missing(self, key: str, present: Iterable[str]) -> DataError:
        """The error of a record, or a file, that has other fields."""
        names = list(present)
        return self._error(key, f"keys {names[:_KEYS_SHOWN]}", names)

    def _value_of(self, record: dict[str, Any], key: str) -> Any:
        if key not in record:
            raise self.missing(key, record)
        value = record[key]
        if self.content == "conversation":
            fits = isinstance(value, list)
        else:
            fits = isinstance(value, str) or (
                self.content == "sentences"
                and isinstance(value, list)
                and all(isinstance(sentence, str) for sentence in value)
            )
        if not fits:
            raise self._error(key, f"a value of type {type(value).__name__}", record)
        return value

    def _error(self, key: str, got: str, present: Iterable[str] = ()) -> DataError:
        return DataError(
            f"the line has no {_NAMES[self.content]} under {key!r}",
            got=got,
            fix=self._fix(key, set(present)),
        )

    def _fix(self, key: str, present: set[str]) -> str:
        """What to do about a record that lacks ``key``, or holds something else there."""
        content = _NAMES[self.content]
        fix = f"set {self.flag} to the field that holds the {content}"
        found = next((name for name in _CONVERSATION_KEYS if name in present), None)
        if found is None or (content == "conversation" and found == key):
            return fix
        if content == "conversation":
            return f"{fix}, as in {self.flag} {found}"
        if self.conversation_flag is None:
            return fix
        flags = f"{self.conversation_flag} {self.flag} {found}"
        return f"pass {flags} to read the conversations there, or {fix}"


@dataclass(slots=True)
class RecordBlock:
    """Consecutive records, as columns. R records.

    Attributes:
        columns: Value of each record [R], for each key.
        lines: Where each record stands [R], counted from 1 in its slice.
        bad: What gives no record.
        line_count: Lines or rows that the block spans, blank and bad ones included.
        size: Its share of the bytes of the file.
    """

    columns: tuple[list[Any], ...]
    lines: list[int] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)
    line_count: int = 0
    size: int = 0

    @classmethod
    def empty(cls, fields: RecordFields) -> RecordBlock:
        """A block to which records are added."""
        return cls(tuple([] for _ in fields.keys))

    def add(self, line: int, values: Sequence[Any]) -> None:
        """Append a record."""
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)
        self.lines.append(line)
