"""Workers: all shards are made, and what one of them dies of is said."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_ext.errors import DataError, MegatronExtError
from megatron_ext.preprocessing.input_slice import InputSlice
from megatron_ext.preprocessing.shard import Progress
from megatron_ext.preprocessing.worker_pool import MakeShard, Shard, make_shards


def maker_of(kind: str) -> MakeShard:
    """What a worker calls; ``kind`` says what becomes of it."""

    def make(
        index: int, slices: tuple[InputSlice, ...], on_progress: Callable[[Progress], None]
    ) -> None:
        on_progress(Progress(size=index, text_bytes=0, documents=os.getpid(), bad=0))
        if index == 2 and kind == "refuses":
            raise DataError("the text is bad", where=slices[0].path)
        if index == 2 and kind == "finds-the-disk-full":
            raise OSError(errno.ENOSPC, "No space left on device", "/part")
        if index == 2 and kind == "fails":
            raise ZeroDivisionError("a fault of ours")
        if index == 2 and kind == "is-killed":
            os.kill(os.getpid(), signal.SIGKILL)

    if kind == "cannot-start":
        raise DataError("no tokenizer")
    return make


class MakerOf:
    """``maker_of`` for one kind, as workers get it: pickled."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self) -> MakeShard:
        return maker_of(self._kind)


SHARDS: list[Shard] = [
    (index, (InputSlice(f"/file-{index}", "json-lines", 0, 1, 1),)) for index in range(6)
]


def test_every_shard_is_made_once_and_all_processes_take_part(tmp_path: Path) -> None:
    seen: list[Progress] = []
    make_shards(MakerOf("works"), SHARDS, worker_count=2, on_progress=seen.append)
    assert sorted(progress.size for progress in seen) == list(range(6))
    pids = {progress.documents for progress in seen}
    assert len(pids) == 2
    assert os.getpid() not in pids


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("refuses", DataError, "^/file-2: the text is bad$"),
        ("finds-the-disk-full", OSError, "No space left on device: '/part'$"),
        ("fails", RuntimeError, "(?s)a worker process failed:.*ZeroDivisionError: a fault of ours"),
        ("is-killed", MegatronExtError, "a worker process was killed; got exit code -9"),
        ("cannot-start", DataError, "^no tokenizer$"),
    ],
)
def test_what_a_worker_dies_of_is_raised_and_no_other_stays(
    kind: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make_shards(MakerOf(kind), SHARDS, worker_count=2, on_progress=lambda progress: None)
    workers = [
        child
        for child in psutil.Process().children(recursive=True)
        if "spawn_main" in " ".join(child.cmdline())
    ]
    assert not workers
