"""Files in which another program has recorded a teacher's predictions, and their records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast, get_args

from megatron_ext.documents.record_fields import RecordFields
from megatron_ext.documents.records import cut_into_shards, lines_before, read_records
from megatron_ext.documents.source_file import InputSlice, SourceFile, find_sources
from megatron_ext.errors import ConfigError, DataError, MegatronExtError, UnknownNameError
from megatron_ext.teachers.distillkit_recording import (
    CONFIG_FILE,
    CompressionConfig,
    DistillKitRecording,
)
from megatron_ext.teachers.recorded_text import RecordedText, RecordingFormat, Tail
from megatron_ext.teachers.vllm_recording import VllmRecording
from megatron_ext.training.teachers.identity import hash_of_file

FormatName = Literal["vllm", "distillkit"]

_MOST_RECORD_BYTES: Final = 1 << 31
"""A text of 8,192 tokens with 256 predictions each is 150 MB of vLLM's JSON."""

Part = tuple[InputSlice, ...]
"""Records that become one file of a cache."""


class RecordPlace(NamedTuple):
    """Place of a record."""

    piece: InputSlice
    line: int

    def __str__(self) -> str:
        """``file:line``; the lines before a slice take reading the file."""
        return f"{self.piece.path}:{self.line + lines_before(self.piece)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFiles:
    """Recordings of one program."""

    format: FormatName

    names: tuple[str, ...]
    """Files, folders and patterns."""

    tail: Tail = "exact"

    compression_config: Path | None = None
    """DistillKit's description of a capture; None for that beside the first file."""

    @classmethod
    def of(
        cls, words: Sequence[str], *, tail: Tail, compression_config: Path | None
    ) -> RecordedFiles:
        """The recordings that a format's name and names of files stand for.

        Raises:
            ConfigError: There is no such format, or no file.
        """
        name, *files = words
        if name not in get_args(FormatName):
            raise UnknownNameError(
                "there is no such format of recordings",
                got=name,
                expected=" or ".join(get_args(FormatName)),
            )
        if not files:
            raise ConfigError("no recording is named", expected=f"--import {name} FILE ...")
        if compression_config is not None and name != "distillkit":
            raise ConfigError("--compression-config describes a capture of DistillKit", got=name)
        return cls(
            format=cast("FormatName", name),
            names=tuple(files),
            tail=tail,
            compression_config=compression_config,
        )

    def reader(self) -> RecordingFormat:
        """The reader of the format.

        Raises:
            ConfigError: The description of a capture is missing or wrong.
        """
        if self.format == "vllm":
            return VllmRecording()
        path = self.compression_config
        return DistillKitRecording(
            CompressionConfig.load(path or Path(self._files()[0].path).parent / CONFIG_FILE)
        )

    def parts(self, part_bytes: int) -> list[Part]:
        """Parts of about so many bytes, cut between records where the kind of file can be.

        Raises:
            DataError: A file is missing or no file of records.
        """
        files = self._files()
        count = max(-(-sum(file.size for file in files) // part_bytes), 1)
        return [part for part in cut_into_shards(files, count) if part]

    def top_count(self) -> int:
        """K, the number of likeliest tokens in the first record.

        Raises:
            MegatronExtError: It cannot be read.
        """
        reader = self.reader()
        for part in self.parts(_MOST_RECORD_BYTES):
            for record, place in records_of(part):
                for text in placed(lambda one: reader.texts(one, None), record, place):
                    if len(text.scores.top_ids):
                        return int(text.scores.top_ids.shape[1])
        raise DataError("the recordings hold no prediction", where=", ".join(self.names))

    def described(self) -> dict[str, Any]:
        """What a cache is imported from, as plain values; reads all files.

        Raises:
            DataError: A file cannot be read.
        """
        try:
            hashes = [hash_of_file(Path(file.path)) for file in self._files()]
        except OSError as error:
            raise DataError("a recording cannot be read", got=error) from error
        return {"format": self.format, "tail": self.tail, "files": hashes}

    def _files(self) -> tuple[SourceFile, ...]:
        files = find_sources(self.names, fix="check the files behind --import").files
        for file in files:
            if file.kind in ("text", "text-gzip"):
                raise DataError(
                    "the recording is not a file of records",
                    where=file.path,
                    got="plain text, by its name",
                    expected=".jsonl, .json, .parquet or .arrow",
                )
        return files


def records_of(part: Part) -> Iterator[tuple[Any, RecordPlace]]:
    """The records of a part, and their places.

    Raises:
        DataError: A record cannot be read; with file and line.
    """
    fields = RecordFields(("record",), "record", most_bytes=_MOST_RECORD_BYTES)
    for piece in part:
        for block in read_records(piece, fields):
            if block.bad:
                raise block.bad[0].error(piece.path, lines_before(piece))
            for line, record in zip(block.lines, block.columns[0], strict=True):
                yield record, RecordPlace(piece, line)


def placed(
    read: Callable[[Any], list[RecordedText]], record: Any, place: RecordPlace
) -> list[RecordedText]:
    """``read(record)``, whose error gets the place.

    Raises:
        DataError: The error of ``read``.
    """
    try:
        return read(record)
    except MegatronExtError as error:
        raise DataError(str(error), where=place) from error
