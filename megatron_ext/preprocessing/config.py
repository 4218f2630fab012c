"""``PreprocessConfig``, the settings of ``megatron-ext tokenize``, and detection of the schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, get_args

from megatron_ext.constants import MAX_RECORD_MIB
from megatron_ext.conversation.records import RecordSchemaName
from megatron_ext.documents.id_tokenizers import OutputNames
from megatron_ext.documents.record_fields import AS_THEY_ARE, FieldContent, RecordFields
from megatron_ext.documents.records import file_records, schema_of
from megatron_ext.documents.source_file import SourceFile
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig

_FILES: Final = 16
_RECORDS: Final = 100
"""Files, and records of each, from which the schema is detected."""


_OF_ONE_FIELD: Final = ("auto", "messages", "sharegpt")
"""Schemas whose records have the turns in one field."""

MOST_WORKERS: Final = 1 << 12
"""Worker processes of one command."""

MOST_SHARDS: Final = 1 << 16
"""Shards of an input: each is a file of its own until they are joined."""


@dataclass(kw_only=True, frozen=True, slots=True)
class PreprocessConfig:
    """Settings of one run of ``megatron-ext tokenize``.

    Raises:
        ConfigError: A value that cannot be used, named by its flag.
    """

    inputs: tuple[str, ...]
    """Files, folders and glob patterns: JSON lines, Parquet, Arrow, plain text; JSON and text also
    gzipped."""

    output_prefix: str
    """Folder and first part of the names of the output: PREFIX_KEY_document.bin and .idx."""

    tokenizer: TokenizerConfig
    """The tokenizer; its mode determines whether records hold texts or conversations. If the mode
    is text, the mode saved with the tokenizer takes precedence: ``with_mode_of``."""

    json_keys: tuple[str, ...] = ()
    """Fields to read, each into files of its own; when unset text, or in the mode sft the
    conversation of the record as a whole, into files named messages."""

    conversation_schema: RecordSchemaName = "auto"
    """Schema of conversations in the mode sft: messages, sharegpt, alpaca, tool-calls or
    prompt-completion; auto to detect it from the first records."""

    append_eod: bool = False
    """End every document that has any tokens with the end-of-document token."""

    workers: int | None = None
    """Worker processes; when unset one for each shard, up to the number of cores."""

    shard_count: int | None = None
    """Shards of the input; when unset as many as workers, and none over 256 MiB."""

    shard_indices: tuple[int, ...] = ()
    """Make these shards only and leave joining them to a later run; all when unset."""

    overwrite: bool = False
    """Replace existing output, and shards of an unfinished run with other settings."""

    strict: bool = False
    """Stop at the first record that cannot be used, instead of reporting it and going on."""

    max_record_mib: int = MAX_RECORD_MIB
    """MiB of a record; a longer one cannot be used, and no more of it is held in memory."""

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ConfigError("no input is named", where="--input")
        name = Path(self.output_prefix).name
        if self.output_prefix.endswith(("/", "\\")) or name in ("", ".", ".."):
            raise ConfigError(
                "the prefix names a folder",
                got=repr(self.output_prefix),
                expected="a folder and the first part of a file name, as in out/corpus",
                where="--output-prefix",
            )
        if self.tokenizer.mode not in ("text", "sft"):
            raise ConfigError(
                "the mode has no indexed dataset",
                got=self.tokenizer.mode,
                expected="text or sft",
                where="--tokenizer-mode",
            )
        if self.tokenizer.prompt_format is not None and not self.has_conversations:
            raise ConfigError(
                "a prompt format is named, and texts have no use for one",
                got=self.tokenizer.prompt_format,
                fix="add --tokenizer-mode sft where the records hold conversations",
                where="--tokenizer-prompt-format",
            )
        self._check_schema()
        _check_count(self.workers, MOST_WORKERS, "--workers")
        _check_count(self.shard_count, MOST_SHARDS, "--shards")
        if self.max_record_mib < 1:
            raise ConfigError(
                "too small", got=self.max_record_mib, expected=">= 1", where="--max-record-mib"
            )
        self._check_keys()
        self._check_shards()

    def with_mode_of(self, tokenizer: MegatronTokenizerText) -> PreprocessConfig:
        """A copy with the mode of ``tokenizer``, which its metadata may have set.

        Raises:
            ConfigError: The mode has no indexed dataset.
        """
        if tokenizer.mode == self.tokenizer.mode:
            return self
        if tokenizer.mode != "sft":
            raise ConfigError(
                "the tokenizer's metadata name a mode that has no indexed dataset",
                got=tokenizer.mode,
                expected="text or sft",
                fix="name other metadata with --tokenizer-metadata",
                where=self.tokenizer.metadata or self.tokenizer.model,
            )
        return replace(self, tokenizer=replace(self.tokenizer, mode="sft"))

    def with_schema(self, name: RecordSchemaName) -> PreprocessConfig:
        """A copy with ``conversation_schema`` set to ``name``."""
        return replace(self, conversation_schema=name)

    @property
    def has_conversations(self) -> bool:
        """Whether records hold conversations, which are trained in part."""
        return self.tokenizer.mode == "sft"

    @property
    def fields(self) -> RecordFields:
        """Fields that are read of each record."""
        content: FieldContent = "conversation" if self.has_conversations else "sentences"
        default = "messages" if self.has_conversations else "text"
        return RecordFields(
            self.json_keys or (default,),
            content,
            schema=self.conversation_schema,
            are_default=not self.json_keys,
            most_bytes=self.max_record_mib << 20,
            conversation_flag="--tokenizer-mode sft",
        )

    @property
    def names(self) -> OutputNames:
        """Names of the output files."""
        return OutputNames(Path(self.output_prefix), self.fields.keys, self.has_conversations)

    def _check_keys(self) -> None:
        for key in self.json_keys:
            if not key or "/" in key or "\0" in key:
                raise ConfigError(
                    "the key cannot be part of a file name", got=repr(key), where="--text-field"
                )
        if len(set(self.json_keys)) < len(self.json_keys):
            raise ConfigError(
                "a key is named twice", got=" ".join(self.json_keys), where="--text-field"
            )

    def _check_schema(self) -> None:
        if self.conversation_schema not in get_args(RecordSchemaName):
            raise ConfigError(
                "unknown conversation schema",
                got=repr(self.conversation_schema),
                expected=f"one of {', '.join(get_args(RecordSchemaName))}",
                where="--conversation-schema",
            )
        if self.json_keys and self.conversation_schema not in _OF_ONE_FIELD:
            raise ConfigError(
                "records of this schema have no field that holds the conversation",
                got=f"{self.conversation_schema} and {' '.join(self.json_keys)}",
                fix="leave one of --text-field and --conversation-schema out",
                where="--text-field",
            )

    def _check_shards(self) -> None:
        if self.shard_indices and self.shard_count is None:
            raise ConfigError(
                "one shard of how many?",
                fix="give every process the same --shards",
                where="--shard-index",
            )
        for index in self.shard_indices:
            if self.shard_count is not None and not 0 <= index < self.shard_count:
                raise ConfigError(
                    "there is no such shard",
                    got=index,
                    expected=f"0 to {self.shard_count - 1}",
                    where="--shard-index",
                )


def with_settled_schema(config: PreprocessConfig, files: Sequence[SourceFile]) -> PreprocessConfig:
    """Replace the schema ``auto`` by that of the first records of the files.

    The same files give the same schema, so all processes of a run agree, and those that resume it.
    Where no record can be read it stays ``auto``, and the reader reports the error.

    Raises:
        DataError: No schema, or more than one, fits the records; the error names the file.
    """
    if not config.has_conversations or config.conversation_schema != "auto":
        return config
    found: dict[str, RecordSchemaName] = {}
    for file in files:
        records = _first_records(file)
        if records:
            found[file.path] = _schema(config, file, records)
        if len(found) == _FILES:
            break
    if not found:
        return config
    names = sorted(set(found.values()))
    if len(names) > 1:
        paths = {name: path for path, name in found.items()}
        raise DataError(
            "the files hold conversations of several schemas",
            got=", ".join(f"{name} in {paths[name]}" for name in names),
            fix="tokenize them apart, or name one with --conversation-schema",
        )
    return config.with_schema(names[0])


def _first_records(file: SourceFile) -> list[Any]:
    """Readable records from the beginning of a file."""
    first = next(file_records(file, AS_THEY_ARE), None)
    return [] if first is None else first.columns[0][:_RECORDS]


def _schema(config: PreprocessConfig, file: SourceFile, records: Sequence[Any]) -> RecordSchemaName:
    keys = config.json_keys or (None,)
    names = {schema_of(records, key=key, where=file.path) for key in keys}
    if len(names) > 1:
        raise DataError(
            "the keys hold conversations of several schemas",
            got=", ".join(sorted(names)),
            fix="tokenize them apart",
            where=file.path,
        )
    return names.pop()


def _check_count(count: int | None, most: int, flag: str) -> None:
    if count is not None and not 1 <= count <= most:
        problem = "too few" if count < 1 else "too many"
        raise ConfigError(problem, got=count, expected=f"1 to {most:,}", where=flag)
