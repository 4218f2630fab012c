"""Answers of a model to many conversations, written as training data; goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from megatron_ext.conversation.records import (
    ConversationRecord,
    conversation_record,
    sniff_record_schema,
)
from megatron_ext.engines.chat_endpoint import Answer
from megatron_ext.errors import ConversationError, DataError
from megatron_ext.evaluation.tasks.task import read_records
from megatron_ext.files import flush, parse_json, whole_lines, write_bytes

_LEFT_OUT: Final = "cut, or without a text"

Once = Callable[[Callable[[], Any]], Any]

Answers = Callable[[Sequence[ConversationRecord], int], list[Answer]]
"""Answers records, of which the first has a number among all."""


def asked_conversations(path: Path, text_field: str) -> list[ConversationRecord]:
    """The conversations of a file up to their last answers; a record with a text asks just that.

    Raises:
        DataError: The file cannot be read, or a record asks nothing.
    """
    records = []
    for number, record in enumerate(read_records(path), 1):
        text = record.get(text_field)
        if isinstance(text, str):
            records.append(ConversationRecord([{"role": "user", "content": text}]))
            continue
        where = f"{path}, record {number}"
        try:
            schema = sniff_record_schema([record])
        except ConversationError as error:
            raise DataError(
                f"a record has no text in {text_field}, and no conversation of one schema",
                where=where,
                got=f"the fields {', '.join(map(str, record))}",
                expected="a text there, or messages, each with role and content",
                fix="set --text-field to the field that holds the user's message",
            ) from error
        try:
            records.append(conversation_record(record, schema).asked())
        except ConversationError as error:
            raise DataError(str(error), where=where) from error
    return records


@dataclass(frozen=True, kw_only=True)
class TeacherTexts:
    """A file of answered conversations, one a line: ``messages`` and ``generated_by``.

    Answers that were cut are left out, since a student would learn to stop in their middle, and
    those that say nothing. Until all are there, lines are in ``OUTPUT.partial``, which a second
    call with the same settings continues.
    """

    output: Path

    about: Mapping[str, Any]
    """Model and sampling, which every line says."""

    batch: int = 64
    """Conversations that are answered between two writes."""

    @property
    def partial(self) -> Path:
        """File of the lines so far."""
        return self.output.with_name(f"{self.output.name}.partial")

    def write(
        self, records: Sequence[ConversationRecord], answers: Answers, once: Once
    ) -> tuple[int, int]:
        """Answer what is not answered yet, and write the file; every rank calls it.

        Args:
            answers: Called on every rank.
            once: Calls a function on one rank and gives all ranks its result.

        Returns:
            Numbers of answers that are in the file, and that were left out.

        Raises:
            DataError: The partial file is of other conversations or settings.
        """
        done = once(lambda: self._done(records))
        for first in range(len(done), len(records), self.batch):
            part = records[first : first + self.batch]
            pairs = zip(part, answers(part, first), strict=True)
            lines = [self._line(*pair) for pair in pairs]
            once(partial(self._append, lines))
            done += lines
            once(partial(_tell, len(done), len(records)))
        kept = [line for line in done if not line.startswith(b'{"left_out"')]
        once(lambda: self._finish(kept))
        return len(kept), len(done) - len(kept)

    def _append(self, lines: Sequence[bytes]) -> None:
        with self.partial.open("ab") as file:
            file.write(b"".join(lines))
        flush(self.partial)

    def _finish(self, lines: Sequence[bytes]) -> None:
        write_bytes(self.output, b"".join(lines))
        self.partial.unlink(missing_ok=True)

    def _done(self, records: Sequence[ConversationRecord]) -> list[bytes]:
        """The whole lines of a partial file, after a check that they are of these records."""
        if not self.partial.exists():
            return []
        lines = [line + b"\n" for line in whole_lines(self.partial)]
        for number, (line, record) in enumerate(zip(lines, records, strict=False), 1):
            if parse_json(line).get("key") != self._key(record):
                raise DataError(
                    "the file was begun with other conversations or settings",
                    where=f"{self.partial}:{number}",
                    fix="remove it, or repeat the call that began it",
                )
        write_bytes(self.partial, b"".join(lines))
        return lines

    def _line(self, record: ConversationRecord, answer: Answer) -> bytes:
        says_something = answer.text.strip() or answer.others.get("tool_calls")
        is_kept = answer.is_whole and says_something
        values: dict[str, Any] = {} if is_kept else {"left_out": _LEFT_OUT}
        values |= {
            "messages": [
                *record.messages,
                {"role": "assistant", "content": answer.text, **answer.others},
            ],
            **record.template_variables,
            "generated_by": dict(self.about),
            "key": self._key(record),
        }
        return json.dumps(values, ensure_ascii=False).encode() + b"\n"

    def _key(self, record: ConversationRecord) -> str:
        settings = {name: value for name, value in self.about.items() if name != "date"}
        asked = [list(record.messages), dict(record.template_variables), settings]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def _tell(done: int, total: int) -> None:
    sys.stderr.write(f"{done:,} of {total:,} conversations are answered\n")
