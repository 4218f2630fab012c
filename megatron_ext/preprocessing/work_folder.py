"""The plan of a run, and the work folder of its shards, from which a killed run is resumed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from megatron_ext.constants import MAX_RECORD_MIB
from megatron_ext.documents.records import cut_into_shards
from megatron_ext.documents.source_file import InputSlice, SourceFile
from megatron_ext.errors import ConfigError, DataError, counted, refused_input
from megatron_ext.files import (
    begin_lock,
    flush,
    hidden_name,
    new_folder,
    parse_json,
    read_bytes,
    read_json,
    write_text,
)
from megatron_ext.preprocessing.config import PreprocessConfig
from megatron_ext.preprocessing.report import ShardRecord
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.identity import tokenizer_identity

SHARD_BYTES: Final = 256 << 20
"""Most bytes of input in a shard, unless the number of shards is given."""
_PLAN = "plan.json"
_RECORD = "record.json"


@dataclass(frozen=True, slots=True)
class Plan:
    """The shards of a run, and everything that its output depends on."""

    settings: Mapping[str, Any]
    """Plain values; a run may resume another only if these are equal."""

    inputs: tuple[SourceFile, ...]
    shards: tuple[tuple[InputSlice, ...], ...]

    moment: str | None = None
    """Local time at which a run over conversations began, in ISO 8601: templates take it as the
    current time in every shard. None for texts."""

    @classmethod
    def make(
        cls,
        config: PreprocessConfig,
        tokenizer: MegatronTokenizerText,
        inputs: tuple[SourceFile, ...],
    ) -> Plan:
        """The plan of a new run.

        Raises:
            DataError: All files are empty, or one cannot be read.
        """
        total = sum(file.size for file in inputs)
        if not total:
            raise DataError("the input holds no text", got=counted(len(inputs), "empty file"))
        count = config.shard_count
        if count is None:
            count = max(config.workers or 1, -(-total // SHARD_BYTES))
        moment = datetime.now().isoformat(timespec="seconds") if config.has_conversations else None
        shards = cut_into_shards(inputs, count)
        return cls(_settings(config, tokenizer), inputs, shards, moment)

    def to_json(self) -> str:
        """The plan as canonical JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """The inverse of ``to_json``."""
        values = parse_json(text)
        return cls(
            values["settings"],
            tuple(SourceFile(**file) for file in values["inputs"]),
            tuple(tuple(InputSlice(**piece) for piece in shard) for shard in values["shards"]),
            values.get("moment"),
        )

    def digest(self) -> str:
        """SHA-256 (hex) of the plan, recorded in each shard."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def check_same(self, other: Plan, *, where: object) -> None:
        """Check that ``other``, stored at ``where``, gives the same output from the same input.

        Raises:
            ConfigError: The plans differ; the message names the difference.
        """
        fix = "pass --overwrite to start again, or undo the change"
        for name in sorted({*self.settings, *other.settings}):
            if self.settings.get(name) != other.settings.get(name):
                raise ConfigError(
                    f"the unfinished run was started with another {name.replace('_', ' ')}",
                    got=self.settings.get(name),
                    expected=other.settings.get(name),
                    fix=fix,
                    where=where,
                )
        if self.inputs != other.inputs:
            changed = {file.path for file in {*self.inputs} ^ {*other.inputs}}
            raise ConfigError(
                "the input has changed since the unfinished run was started",
                got=min(changed) if changed else "another order of the files",
                fix=fix,
                where=where,
            )


def _settings(config: PreprocessConfig, tokenizer: MegatronTokenizerText) -> dict[str, Any]:
    is_sft, limit = config.has_conversations, config.max_record_mib
    templates = tokenizer.template_choice if is_sft else ""
    return {
        "mode": config.tokenizer.mode,
        "json_keys": list(config.fields.keys),
        **({"conversation_schema": config.conversation_schema} if is_sft else {}),
        **({"chat_templates": templates} if templates else {}),
        "append_eod": config.append_eod,
        # Not in plans of before, which knew no limit.
        **({} if limit == MAX_RECORD_MIB else {"max_record_mib": limit}),
        **{f"tokenizer_{name}": value for name, value in tokenizer_identity(tokenizer).items()},
    }


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """Folder of finished shards and temporary files.

    A shard is a folder that is renamed into place once all of its files are on the disk; so a shard
    that exists is finished, whenever a process was killed. Several processes may use the folder at
    once.
    """

    path: Path

    @property
    def plan(self) -> Path:
        """File of the plan, which is there from the run's begin until its output is in place."""
        return self.path / _PLAN

    def stored_plan(self) -> Plan | None:
        """The plan of the run that began here; None without one.

        Raises:
            ConfigError: The plan cannot be read.
        """
        file = self.plan
        if not file.exists():
            return None
        try:
            return Plan.from_json(read_bytes(file))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                "the plan of the unfinished run cannot be read",
                got=error,
                fix=f"remove {self.path}",
                where=file,
            ) from error

    def lock(self) -> AbstractContextManager[None]:
        """Lock for beginning a run and for putting its output in place.

        It is a file beside the folder, which may be discarded meanwhile.
        """
        return begin_lock(self.path.with_name(f".{self.path.name}.lock"))

    def store_plan(self, plan: Plan) -> None:
        """Begin a run by writing its plan."""
        write_text(self.plan, plan.to_json())

    def discard(self) -> None:
        """Remove everything, records first: a shard without one does not count as finished."""
        for record in self.path.glob(f"*/{_RECORD}"):
            record.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            shutil.rmtree(self.path)

    def finish(self) -> None:
        """Remove the folder of a finished run."""
        with self.lock():
            # Its holder removes the file of a lock, unless it was killed.
            pass
        self.discard()

    def scratch(self) -> Path:
        """A new folder for output files, on the file system of the output."""
        folder = hidden_name(self.path / "output")
        folder.mkdir(parents=True)
        return folder

    def shard(self, index: int) -> Path:
        """Folder of one finished shard."""
        return self.path / f"{index:05d}"

    def record(self, index: int, plan: str) -> ShardRecord | None:
        """The record of a finished shard of the plan with digest ``plan``; None if unfinished."""
        file = self.shard(index) / _RECORD
        if not file.exists():
            return None
        with refused_input(
            "the record of a finished shard is damaged", where=file, fix=f"remove {file.parent}"
        ):
            record = ShardRecord.from_values(read_json(file))
        return record if record.plan == plan else None

    @contextmanager
    def new_shard(self, index: int, record: ShardRecord) -> Iterator[Path]:
        """An empty folder that becomes the shard when the block ends without an error.

        ``record`` is written into it then. A shard that another process finished meanwhile stays.
        """
        with new_folder(self.shard(index)) as folder:
            yield folder
            write_text(folder / _RECORD, json.dumps(record.to_values(), indent=1) + "\n")
            flush(*folder.iterdir(), folder)
            self._publish(folder, index, record)

    def _publish(self, folder: Path, index: int, record: ShardRecord) -> None:
        target = self.shard(index)
        try:
            folder.rename(target)
        except OSError:
            if not target.exists():
                raise
            if self.record(index, record.plan) is not None:
                return
            # Left by a run with another plan.
            target.rename(hidden_name(target))
            folder.rename(target)
