"""``SFTConfig``, the settings of an SFT data set, and ``SFTRecords``, its records by number.

R records.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from megatron_ext.conversation import Conversation
from megatron_ext.conversation.records import RecordSchemaName, conversation_record
from megatron_ext.data.sft_packing import Packing
from megatron_ext.documents.index import line_index
from megatron_ext.documents.reader import RecordReader
from megatron_ext.documents.record_fields import AS_THEY_ARE
from megatron_ext.documents.records import schema_of
from megatron_ext.documents.source_file import SourceFile, find_sources
from megatron_ext.errors import ConfigError, DataError

TooLong = Literal["truncate-right", "truncate-left", "drop", "refuse"]
LossMode = Literal["assistant", "full"]
Loss = Literal["drop", "refuse"]
_SNIFFED: Final = 64
"""Records that are read to detect the schema."""
ConversationInput = tuple[Conversation, Mapping[str, Any]]
"""Messages, and the other variables of a template."""


@dataclass(kw_only=True, frozen=True, slots=True)
class SFTConfig:
    """Treatment of records by an ``SFTDataset``."""

    loss_mode: LossMode = "assistant"
    """Tokens that are trained: those that the prompt format and the tokenizer's ``train_on`` name
    (``assistant``), or every token of a conversation (``full``)."""

    packing: Packing = "none"
    """Packing of conversations into samples. A training step that reads neither ``cu_seqlens`` nor
    the attention mask requires ``none``."""

    too_long: TooLong = "truncate-right"
    """Treatment of a conversation longer than a sample: cut its end or its beginning, leave it out,
    or end the run."""

    untrained: Loss = "drop"
    """Treatment of a conversation without a trained token, possibly after it is cut: leave it out,
    or end the run."""

    bad_records: Loss = "refuse"
    """Treatment of a line without a usable conversation: leave it out, or end the run."""

    append_eod: bool = True
    """End each conversation with the end-of-document token unless it ends with it, as Megatron-LM
    does. It is trained if the token before it is."""

    split_at_system: bool = True
    """Begin a new conversation at each system message of a record, as Megatron-LM does."""

    shuffle: bool = True
    """Shuffle conversations before they are packed, and samples anew in each epoch, by the seed.
    Otherwise both are in the order of the file."""

    conversation_schema: RecordSchemaName = "auto"
    """Schema of the records; ``auto`` to detect it from the first of them."""

    json_key: str | None = None
    """Field that holds the turns of a record, where it has an unusual name."""

    workers: int = 1
    """Processes that tokenize the data set for the plan of its samples."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(
                "there must be a worker", got=self.workers, expected=">= 1", where="sft.workers"
            )
        hints = get_type_hints(type(self))
        for name in (f.name for f in fields(self)):
            choices = get_args(hints[name])
            value = getattr(self, name)
            if get_origin(hints[name]) is Literal and value not in choices:
                raise ConfigError(
                    f"{name} is none of its choices",
                    got=repr(value),
                    expected=", ".join(choices),
                    where=f"sft.{name}",
                )


class SFTRecords:
    """Conversations in the lines of a file, or of all files in a folder; blank lines do not count.

    The byte offset of each line is computed once and cached; nothing else is held in memory.

    Args:
        path: A file, a folder or a glob pattern.
        cache_folder: Folder of the cache; None for a hidden folder beside the first file.
        config: Treatment of the records.

    Attributes:
        path: The given path.
        cache_folder: Folder of the cache.

    Raises:
        DataError: A file is missing, compressed, unreadable or not JSON lines; or no schema, or
            more than one, fits the records.
    """

    def __init__(self, path: str, *, cache_folder: Path | None, config: SFTConfig) -> None:
        self.path = path
        self._files = find_sources([path]).files
        for file in self._files:
            _check_kind(file)
        self._config = config
        self._records = RecordReader(self._files, AS_THEY_ARE)
        beside = Path(self._files[0].path).parent / ".sft_cache"
        self.cache_folder = beside if cache_folder is None else cache_folder
        self._index = line_index(self._files, cache_folder=self.cache_folder)
        self._schema = self._settled_schema()

    def __len__(self) -> int:
        return len(self._index["start"])

    @property
    def identity(self) -> dict[str, Any]:
        """Plain values that change whenever the records may have changed."""
        return {"files": [asdict(file) for file in self._files], "schema": self._schema}

    def place(self, number: int) -> str:
        """``file:line`` of a record."""
        return self._records.place(self._file(number), int(self._index["line"][number]))

    def conversations(self, number: int) -> list[ConversationInput]:
        """The conversations of a record: one, or several where it is split at system messages.

        Raises:
            DataError: The line is not JSON, or the file has changed.
            ConversationError: The record has another schema, or cannot be used.
        """
        record = conversation_record(self._parsed(number), self._schema, key=self._config.json_key)
        if not self._config.split_at_system:
            return [(record.messages, record.template_variables)]
        pieces = _split_at_system(record.messages)
        return [(messages, record.template_variables) for messages in pieces]

    def _parsed(self, number: int) -> Any:
        line, start = (int(self._index[name][number]) for name in ("line", "start"))
        return self._records.record(self._file(number), line, start)

    def _file(self, number: int) -> int:
        return bisect_right(self._index.notes["first_record"], number) - 1

    def _settled_schema(self) -> RecordSchemaName:
        first = list(islice(self._good_records(), _SNIFFED))
        if self._config.conversation_schema != "auto" or not first:
            return self._config.conversation_schema
        return schema_of(first, key=self._config.json_key, where=self.path)

    def _good_records(self) -> Iterator[Any]:
        for number in range(len(self)):
            try:
                yield self._parsed(number)
            except DataError:
                # Bad lines are judged by ``bad_records`` when conversations are read.
                continue


def _split_at_system(messages: Conversation) -> list[Conversation]:
    is_system = [message.get("role") == "system" for message in messages]
    starts = [i for i in range(1, len(messages)) if is_system[i] and not is_system[i - 1]]
    return [messages[a:b] for a, b in pairwise([0, *starts, len(messages)])]


def _check_kind(file: SourceFile) -> None:
    if file.kind != "json-lines":
        raise DataError(
            "records are read by number, which this file does not allow",
            got=file.kind,
            expected="JSON lines, not compressed",
            fix="write one record a line",
            where=file.path,
        )
