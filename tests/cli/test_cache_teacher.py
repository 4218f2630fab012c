"""A recording that is killed goes on, and says what its files take."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from megatron_ext.cli.main import main
from tests.cli.run_files import PreloadedRun, write_config
from tests.training.tiny_run import student_run


def test_a_recording_that_is_killed_goes_on_where_it_was(folder: Path) -> None:
    file = write_config(folder, student_run(folder, "cached"))
    cache = folder / "cache"
    killed = _record(file, cache)
    deadline = time.monotonic() + 120
    while not _files(cache):
        assert killed.is_alive(), killed.output.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    killed.kill()
    kept = {path: path.stat().st_mtime_ns for path in _files(cache)}
    said = json.loads((cache / "cache.json").read_text())
    assert not said["is_complete"]
    assert 0 < len(kept) < len(said["shards"])

    output = _record(file, cache).finish()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    said = json.loads((cache / "cache.json").read_text())
    assert said["is_complete"]
    assert len(_files(cache)) == len(said["shards"])
    size = sum(path.stat().st_size for path in _files(cache))
    total = re.search(r"([\d,]+) tokens in [\d,]+ windows: ([\d,]+) bytes", output)
    assert total is not None, output
    assert int(total[2].replace(",", "")) == size
    assert "label in fp32: 8 bytes a token = 4 label_log_probs + 4 boundary_log_probs" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--teacher", "nobody"), "no such teacher; got nobody; expected one of teacher"),
        (("--top-k", "0", "--targets", "topk"), "no such number of most probable tokens; got 0"),
        (("--file-mib", "0"), "--file-mib must be positive"),
    ],
    ids=("teacher", "top-k", "file"),
)
def test_a_recording_that_cannot_be_is_refused(
    flags: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(folder, student_run(folder, "refused"))
    with pytest.raises(SystemExit):
        main(("cache-teacher", "--config", str(file), "--output", str(folder / "none"), *flags))
    assert message in capsys.readouterr().err
    assert not (folder / "none").exists()


def _record(config: Path, cache: Path) -> PreloadedRun:
    return PreloadedRun(
        *("cache-teacher", "--config", str(config), "--output", str(cache)),
        *("--targets", "label", "--file-mib", "0.0001"),
        output=config.with_suffix(".log"),
    )


def _files(cache: Path) -> list[Path]:
    return sorted(cache.glob("targets-*.bin"))
