"""Checkpoints that carry code or damage, and what each came to.

``run(seconds, seed)`` makes a tiny checkpoint, then puts payloads into its files and damages them,
one at a time: a flipped bit, a file cut short, a file that is gone. Each must be refused in one
line of ours, and run nothing. ``python -m tests.hostile.checkpoint_attacks SECONDS SEED`` prints
the counts.
"""

import io
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import MegatronExtError
from megatron_ext.training.checkpoints.checkpoint import (
    load_checkpoint,
    load_common,
    save_checkpoint,
)
from megatron_ext.training.checkpoints.huggingface_import import lone_process
from megatron_ext.training.checkpoints.manifest import MANIFEST_FILE
from megatron_ext.training.checkpoints.slices import CheckpointSlices


class Call:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


class InState(dict[str, Any]):
    """A mapping whose pickle has a payload as its state."""

    def __init__(self, payload: Any) -> None:
        super().__init__()
        self._payload = payload

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter([("x", self._payload)])


def payloads(mark: Path) -> dict[str, bytes]:
    """Pickles that make the file ``mark`` if they are loaded."""
    command = f"touch {mark}"
    system = Call(os.system, command)
    objects: dict[str, Any] = {
        "os.system": system,
        "eval": Call(eval, f"open({str(mark)!r}, 'w')"),
        "exec": Call(exec, f"open({str(mark)!r}, 'w')"),
        "open": Call(open, str(mark), "w"),
        "in a mapping": {"run": {"config": system}},
        "in an ordered mapping": InState(system),
        "in an index": Metadata(state_dict_metadata={}, planner_data=system, storage_data={}),
        "attribute of a class": Call(getattr, Call(__import__, "os"), "system"),
        "torch.load": Call(torch.load, str(mark.with_suffix(".pt"))),
        "a path that is made": Call(os.mkdir, str(mark)),
    }
    pickles = {
        f"{name}, protocol {protocol}": pickle.dumps(value, protocol)
        for name, value in objects.items()
        for protocol in (0, 2, 4)
    }
    by_hand = f"cposix\nsystem\n(S'{command}'\ntR.".encode()
    nested = b"\x80\x04\x8c\x05torch\x8c\x1aserialization.os.system\x93\x8c"
    text = command.encode()
    return pickles | {
        "by hand": by_hand,
        "instance": f"(S'{command}'\nios\nsystem\n.".encode(),
        "dotted name": nested + bytes([len(text)]) + text + b"\x85R.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent": b"Pos.system\n.",
        "deep": b"(" * 100_000 + b"l" * 100_000 + b".",
        "long": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
        "large number of an object": b"\x80\x02]r\xff\xff\xff\x7f.",
        "large array of bytes": b"\x80\x05\x96" + b"\xff" * 5 + b"\0\0\0.",
        "number cut short": b"\x80\x02J\x01",
        "empty": b"",
        "noise": bytes(range(256)) * 9,
    }


def forms(payload: bytes) -> dict[str, bytes]:
    """A payload as it stands, and as the pickle of an archive that ``torch.load`` reads."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", payload)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")
    return {"plain": payload, "archive": archive.getvalue()}


@dataclass(frozen=True, slots=True)
class Case:
    """A change of one file."""

    kind: str
    file: str
    content: bytes | None
    """None where it is gone."""
    keeps_manifest: bool
    """Whether the manifest is of the files before; a stranger's checkpoint has none, or its own."""


COUNTS: Final = ("cases", "refused", "ran_code", "silent", "tracebacks", "long_lines")


class Victim:
    """A tiny checkpoint, and what becomes of it.

    Args:
        folder: Folder to work in.
        groups: Those of ``lone_process``, open as long as it is read.
    """

    def __init__(self, folder: Path, groups: ProcessGroups) -> None:
        self.mark = folder / "ran"
        self.groups = groups
        self._tensor = torch.arange(96, dtype=torch.float32).view(8, 12)
        files = folder / "tokenizer"
        files.mkdir()
        (files / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
        state = self._state() | {"iteration": 3, "run": {"config": {"student": {"a": 1}}}}
        self.path = save_checkpoint(
            folder / "checkpoints", 3, state, groups=groups, keep=1, files=(files,)
        )
        assert self.read() == ("silent", ""), "it is whole"
        self._copy = Path(shutil.copytree(self.path, folder / "whole"))

    def files(self) -> list[str]:
        """Names of its files."""
        paths = (path for path in sorted(self._copy.rglob("*")) if path.is_file())
        return [path.relative_to(self._copy).as_posix() for path in paths]

    def content(self, name: str) -> bytes:
        """Content of a file, as it was saved."""
        return (self._copy / name).read_bytes()

    def attack(self, case: Case) -> tuple[str, str]:
        """What came of a case: ``refused``, ``silent``, ``ran_code`` or ``tracebacks``; a text."""
        path = self.path / case.file
        manifest = self.path / MANIFEST_FILE
        try:
            if case.content is None:
                path.unlink()
            else:
                path.write_bytes(case.content)
            if not case.keeps_manifest:
                manifest.unlink(missing_ok=True)
            kind, text = self.read()
        finally:
            path.write_bytes(self.content(case.file))
            manifest.write_bytes(self.content(MANIFEST_FILE))
        if os.path.lexists(self.mark):
            self.remove_mark()
            return "ran_code", text
        return kind, text

    def remove_mark(self) -> None:
        """Forget that a payload has run."""
        self.mark.rmdir() if self.mark.is_dir() else self.mark.unlink()

    def read(self) -> tuple[str, str]:
        """Read the checkpoint in each way that there is: all must refuse it, in one line."""
        kinds: dict[str, str] = {}
        for reading in (self._load, self._slices, lambda: load_common(self.path)):
            try:
                reading()
            except MegatronExtError as error:
                kinds.setdefault("refused", str(error))
            except Exception as error:
                kinds["tracebacks"] = f"{type(error).__name__}: {error}"
        worst = next((kind for kind in ("tracebacks", "refused") if kind in kinds), "silent")
        return worst, kinds.get(worst, "")

    def _state(self) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

        tensor = ShardedTensor.from_rank_offsets("weight", self._tensor)
        return {"weight": tensor, "random": ShardedObject("random", {"seed": [1, 2]}, (1,), (0,))}

    def _load(self) -> None:
        load_checkpoint(self.path, self._state())

    def _slices(self) -> None:
        CheckpointSlices(self.path).read([("weight", ())])


def payload_cases(victim: Victim) -> Iterator[Case]:
    """Payloads in every file that has a pickle in it."""
    for name, payload in payloads(victim.mark).items():
        for form, content in forms(payload).items():
            for file in (".metadata", "common.pt"):
                yield Case(f"{name}, {form}", file, content, keeps_manifest=False)
        for file in victim.files():
            if file.endswith(".distcp"):
                yield from _in_shard(victim, file, name, payload)


def _in_shard(victim: Victim, file: str, name: str, payload: bytes) -> Iterator[Case]:
    """A payload in place of each tensor and object of a shard, in room of the same length."""
    content = victim.content(file)
    start = content.find(b"PK\x03\x04")
    while start >= 0:
        stop = content.find(b"PK\x05\x06", start) + 22
        for form, changed in forms(payload).items():
            if len(changed) <= stop - start and form == "plain":
                room = changed.ljust(stop - start, b"\0")
                yield Case(
                    f"{name} in a shard", file, content[:start] + room + content[stop:], False
                )
        start = content.find(b"PK\x03\x04", stop)


def damage_cases(victim: Victim, draw: random.Random, *, flips: int = 3) -> Iterator[Case]:
    """Flips, cuts and losses of every file, with the manifest and, where it is read, without."""
    for file in victim.files():
        content = victim.content(file)
        has_pickle = file.endswith((".pt", ".metadata", ".distcp", ".json"))
        if file != MANIFEST_FILE:
            yield Case("gone", file, None, keeps_manifest=True)
        lengths = {0, len(content) - 1, draw.randrange(max(1, len(content)))}
        for length in sorted(lengths):
            yield Case("cut", file, content[:length], keeps_manifest=True)
        for _ in range(flips):
            changed = bytearray(content)
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            yield Case("flip", file, bytes(changed), keeps_manifest=True)
            if has_pickle and file != MANIFEST_FILE:
                yield Case("flip, no manifest", file, bytes(changed), keeps_manifest=False)


def run(seconds: float, seed: int) -> dict[str, Any]:
    """Counts of what came of the cases, and up to ten that were not refused as they should be.

    ``silent`` counts damage that a manifest should have shown; without one a flipped bit of a
    number is not seen.
    """
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, lone_process() as groups:
        return attack_all(Victim(Path(folder), groups), seconds, seed)


def attack_all(victim: Victim, seconds: float, seed: int) -> dict[str, Any]:
    """``run`` of one checkpoint."""
    draw = random.Random(seed)
    counts: dict[str, Any] = dict.fromkeys(COUNTS, 0)
    found: list[str] = []
    end = time.monotonic() + seconds
    first = [*payload_cases(victim), *damage_cases(victim, draw)]
    draw.shuffle(first)
    for case in _until(end, first, victim, draw):
        kind, text = victim.attack(case)
        is_quiet = kind == "silent" and not case.keeps_manifest
        counts["cases"] += 1
        if not is_quiet:
            counts[kind] += 1
        is_long = kind == "refused" and not (text.isprintable() and len(text) < 1000)
        counts["long_lines"] += is_long
        if (kind != "refused" and not is_quiet) or is_long:
            found.append(f"{case.kind} of {case.file}: {kind}: {text[:300]}")
    return counts | {"found": found[:10]}


def _until(end: float, first: list[Case], victim: Victim, draw: random.Random) -> Iterator[Case]:
    """Given cases, then random damage, until the time is over."""
    for case in first:
        if time.monotonic() > end:
            return
        yield case
    while True:
        for case in damage_cases(victim, draw, flips=9):
            if time.monotonic() > end:
                return
            yield case


if __name__ == "__main__":
    result = run(float(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
