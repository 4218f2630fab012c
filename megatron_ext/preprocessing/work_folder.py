"""The folder of parts: which shards of which plan are finished."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.atomic_file import write_text
from megatron_ext.errors import ConfigError
from megatron_ext.preprocessing.begin_lock import begin_lock
from megatron_ext.preprocessing.plan import Plan
from megatron_ext.preprocessing.shard_record import ShardRecord

_PLAN = "plan.json"
_RECORD = "record.json"


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """Parts under way.

    A shard is a folder that appears whole, by renaming, when all of its files are on the disk; so
    a shard that exists is finished, whenever and wherever its process was killed. Several processes
    may use the folder at once.
    """

    path: Path

    def stored_plan(self) -> Plan | None:
        """The plan of the run that was begun here.

        Raises:
            ConfigError: It cannot be read.
        """
        file = self.path / _PLAN
        if not file.exists():
            return None
        try:
            return Plan.from_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                "the plan of the unfinished run cannot be read",
                got=error,
                fix=f"remove {self.path}",
                where=file,
            ) from error

    def lock(self) -> AbstractContextManager[None]:
        """Held to begin a run; beside the folder, which may be discarded meanwhile."""
        return begin_lock(self.path.with_name(f".{self.path.name}.lock"))

    def store_plan(self, plan: Plan) -> None:
        """Begin a run."""
        write_text(self.path / _PLAN, plan.to_json())

    def discard(self) -> None:
        """Remove everything; a shard that loses its files is not finished from the first one on."""
        for record in self.path.glob(f"*/{_RECORD}"):
            record.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            shutil.rmtree(self.path)

    def finish(self) -> None:
        """Remove everything of a run that has come to its end."""
        with self.lock():
            # The file of a lock goes with its holder, but for one that was killed.
            pass
        self.discard()

    def scratch(self) -> Path:
        """A new folder for what will be the output, on the file system of the output."""
        folder = self.path / f".output.{_mark()}"
        folder.mkdir(parents=True)
        return folder

    def shard(self, index: int) -> Path:
        """Folder of one finished shard."""
        return self.path / f"{index:05d}"

    def record(self, index: int, plan: str) -> ShardRecord | None:
        """The record of a shard of the plan with that digest; None where it is not finished."""
        file = self.shard(index) / _RECORD
        if not file.exists():
            return None
        record = ShardRecord.from_values(json.loads(file.read_text(encoding="utf-8")))
        return record if record.plan == plan else None

    @contextmanager
    def new_shard(self, index: int, record: ShardRecord) -> Iterator[Path]:
        """An empty folder that becomes the shard when the block ends without an error.

        ``record`` is written into it then. Where another process finished the same shard in the
        meantime, its shard stays.
        """
        folder = self.path / f".{index:05d}.{_mark()}"
        folder.mkdir(parents=True)
        try:
            yield folder
            write_text(folder / _RECORD, json.dumps(record.to_values(), indent=1) + "\n")
            _flush(folder)
            self._publish(folder, index, record)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _publish(self, folder: Path, index: int, record: ShardRecord) -> None:
        target = self.shard(index)
        try:
            folder.rename(target)
        except OSError:
            if not target.exists():
                raise
            if self.record(index, record.plan) is not None:
                return
            # Left behind by a run with another plan.
            target.rename(self.path / f".{index:05d}.{_mark()}")
            folder.rename(target)


def _mark() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def _flush(folder: Path) -> None:
    """Have the disk hold all files of ``folder`` and their names."""
    for file in (*folder.iterdir(), folder):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
