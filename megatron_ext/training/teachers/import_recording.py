"""Import of another program's recordings into a cache of a teacher's targets.

Recordings are read once, in order and a part at a time; each part makes one file of the cache, with
the windows of the run that its texts begin with. Parts with a whole file are not read again.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.files import flush, hidden_name
from megatron_ext.teachers.formed_targets import filler, to_records
from megatron_ext.teachers.recorded_text import (
    RecordedText,
    RecordingFormat,
    Tail,
    check_recorded,
    recorded_targets,
)
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.training.configuration.config import DistillConfig, ParallelConfig
from megatron_ext.training.inputs import Inputs
from megatron_ext.training.metrics import progress_bar
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.teachers.block_recorder import Block, block_bytes, blocks_of
from megatron_ext.training.teachers.identity import WEIGHTS, cache_identity
from megatron_ext.training.teachers.recorded_files import (
    Part,
    RecordedFiles,
    RecordPlace,
    placed,
    records_of,
)
from megatron_ext.training.teachers.recording import (
    Recording,
    begin_cache,
    finish_cache,
    is_whole,
    recording_config,
)
from megatron_ext.training.teachers.run_windows import RunWindow, RunWindows, window_texts
from megatron_ext.training.teachers.shard_file import Window, write_shard
from megatron_ext.training.teachers.target_cache import Manifest
from megatron_ext.training.teachers.target_checks import check_targets


class ImportedWindow(NamedTuple):
    """What is known of a window that was found."""

    is_own: bool = False
    """Whether the recorded text goes on with the window's last label. Where it has another token
    there, the label's probability may be unknown, and a text that has the label takes its place."""

    tokens: int = 0
    unknown_labels: int = 0
    """Labels outside the K whose probability was not recorded."""
    above_one: int = 0
    """Tokens whose K sum to more than 1, by rounding or by the error of a curve."""
    most_mass: float = 0.0
    """Largest sum."""


_BEFORE: Final = ImportedWindow()
"""A window that an earlier start imported."""


class ImportReport(NamedTuple):
    """Counts over the windows that were imported by this start."""

    windows: int
    tokens: int
    unknown_labels: int
    above_one: int
    most_mass: float

    @classmethod
    def of(cls, windows: Collection[ImportedWindow]) -> ImportReport:
        """The sums."""
        new = [window for window in windows if window is not _BEFORE]
        return cls(
            windows=len(new),
            tokens=sum(window.tokens for window in new),
            unknown_labels=sum(window.unknown_labels for window in new),
            above_one=sum(window.above_one for window in new),
            most_mass=max((window.most_mass for window in new), default=0.0),
        )

    def __str__(self) -> str:
        return (
            f"{self.windows:,} windows, {self.tokens:,} tokens, {self.unknown_labels:,} labels of "
            f"unknown probability; recorded mass up to {self.most_mass:.4f}, above 1 for "
            f"{self.above_one:,} tokens, whose tail is empty"
        )


def import_config(config: DistillConfig, name: str, folder: Path) -> DistillConfig:
    """``config`` for an import into ``folder``: one process, and the teacher from its cache."""
    alone = recording_config(replace(config, parallel=ParallelConfig()), folder, world_size=1)

    def cached(section: Any) -> Any:
        return section and replace(section, cache=str(folder))

    if alone.teacher is not None:
        return replace(alone, teacher=cached(alone.teacher))
    return replace(alone, teachers={**alone.teachers, name: cached(alone.teachers[name])})


def import_recording(
    config: DistillConfig,
    inputs: Inputs,
    recorded: RecordedFiles,
    recording: Recording,
) -> tuple[Manifest, ImportReport]:
    """Make or finish a cache from recordings, in this process alone.

    Args:
        config: The result of ``import_config``.
        inputs: The result of ``read_inputs`` for it, without targets.
        recorded: The recordings.
        recording: The cache, of the form ``topk``.

    Raises:
        ConfigError: The objective needs another form, or the folder holds another cache.
        DataError: A record is none of the format, of other ids, or no prediction; or a window of
            the run has no record.
    """
    name, form, folder = recording.teacher, recording.form, recording.folder
    check_targets(config, TeacherPlan.of(config, name), form, key="cache")
    parts = recorded.parts(recording.file_bytes)
    manifest = Manifest(
        form=form,
        identity={**cache_identity(config, inputs, name), WEIGHTS: "recorded elsewhere"},
        shards=tuple(f"targets-{number:06d}.bin" for number in range(len(parts))),
        block_bytes=recording.file_bytes,
        imported=recorded.described(),
    )
    begin_cache(folder, manifest)
    windows = RunWindows(_blocks(inputs, recording), name)
    shards = list(zip(manifest.shards, parts, strict=True))
    missing = [shard for shard in shards if not is_whole(folder, manifest, shard[0])]
    importer = _Importer(
        form=form,
        run=windows,
        format=recorded.reader(),
        tail=recorded.tail,
        found=dict.fromkeys(
            _found(folder, manifest, {*manifest.shards} - {*dict(missing)}), _BEFORE
        ),
    )
    with progress_bar("import", total=len(shards), done=len(shards) - len(missing)) as bar:
        for shard, part in missing:
            write_shard(
                folder / shard,
                importer.windows_of(part, is_first=shard == manifest.shards[0]),
                bytes_per_token=form.bytes_per_token,
                digest=manifest.digest,
            )
            bar.update()
    _check_covered(windows, folder, manifest)
    finish_cache(folder, manifest)
    return Manifest.load(folder), ImportReport.of(importer.found.values())


def write_prompts(inputs: Inputs, recording: Recording) -> int:
    """Write what is to be recorded: the ids of every window, as JSON lines of vLLM's prompts.

    Args:
        inputs: The result of ``read_inputs`` for ``import_config``, without targets.
        recording: Teacher, and the file in place of a folder.

    Returns:
        Number of windows.

    Raises:
        MegatronExtError: A document cannot be read.
    """
    count, path = 0, recording.folder
    hidden = hidden_name(path)
    try:
        with hidden.open("x", encoding="utf-8") as file:
            for ids in window_texts(_blocks(inputs, recording), recording.teacher):
                file.write(json.dumps({"prompt_token_ids": ids}) + "\n")
                count += 1
        flush(hidden)
        hidden.replace(path)
    except OSError as error:
        raise ConfigError("cannot write the prompts", where=path, got=error.strerror) from error
    finally:
        hidden.unlink(missing_ok=True)
    return count


def _blocks(inputs: Inputs, recording: Recording) -> list[Block]:
    return blocks_of(inputs.data, block_bytes(recording.form, recording.file_bytes))


class _Importer(NamedTuple):
    """Converter of recorded texts to windows of the cache."""

    form: TargetForm
    run: RunWindows
    format: RecordingFormat
    tail: Tail
    found: dict[bytes, ImportedWindow]
    """The windows by their keys."""

    def windows_of(self, part: Part, *, is_first: bool) -> list[Window]:
        """The windows of a part, each once; of the first also those that need no prediction.

        Raises:
            DataError: A record cannot be used; with file and line.
        """
        windows: dict[bytes, Window] = {}
        if is_first:
            for window in self.run.untrained:
                records = to_records(filler(self.form, window.length), self.form)
                windows.setdefault(window.key, Window(window.key, records))
        for record, place in records_of(part):
            for text in placed(self._texts, record, place):
                for window in self._windows(text, place):
                    is_own = window.is_continued_in(text.ids)
                    before = self.found.get(window.key)
                    if before is None or (is_own and not before.is_own):
                        windows[window.key] = self._converted(window, text)
        return list(windows.values())

    def _texts(self, record: Any) -> list[RecordedText]:
        """The checked texts of a record."""
        texts = self.format.texts(record, self.form.count)
        for text in texts:
            check_recorded(
                text, self.form.vocab_size, most_mass=self.format.most_mass, tail=self.tail
            )
        return texts

    def _windows(self, text: RecordedText, place: RecordPlace) -> list[RunWindow]:
        rows = len(text.scores.top_ids)
        windows = self.run.of_text(text.ids, rows)
        if not windows:
            raise DataError(
                "the recorded ids are of no window that the teacher reads in this run",
                where=place,
                got=self.run.nearest(text.ids, rows),
                fix="record what cache-teacher --prompts lists, or set data.append_eod to false "
                "where the end-of-document token alone is missing",
            )
        return windows

    def _converted(self, window: RunWindow, text: RecordedText) -> Window:
        fields = recorded_targets(text, window.labels(text.ids), self.tail)
        mass = torch.from_numpy(text.scores.top_log_probs[: window.needed]).double().exp().sum(-1)
        self.found[window.key] = ImportedWindow(
            is_own=window.is_continued_in(text.ids),
            tokens=window.needed,
            unknown_labels=int(fields["label_log_probs"].isnan().sum()),
            above_one=int((mass > 1).sum()),
            most_mass=float(mass.max()),
        )
        if window.length > window.needed:
            rest = filler(self.form, window.length - window.needed)
            fields = {name: torch.cat([values, rest[name]]) for name, values in fields.items()}
        return Window(window.key, to_records(fields, self.form))


def _found(folder: Path, manifest: Manifest, shards: Collection[str]) -> set[bytes]:
    """Keys of the windows in files of the cache."""
    heads = (manifest.head(folder, name) for name in shards)
    return {key.tobytes() for head in heads for key in head.windows["key"]}


def _check_covered(windows: RunWindows, folder: Path, manifest: Manifest) -> None:
    """Check that every window of the run has records.

    Raises:
        DataError: Some have none.
    """
    found = _found(folder, manifest, manifest.shards)
    missing = list(windows.missing(found))
    if missing:
        first = missing[0]
        raise DataError(
            "the recordings lack windows of this run",
            where=first.place,
            got=f"no record of {len(missing):,} of {len(windows.keys):,} windows; the first has "
            f"{first.needed} tokens to predict",
            fix="record what cache-teacher --prompts lists, in which a text longer than a row is "
            "cut into windows, or leave the texts out of data.train",
        )
