"""A recording that is killed goes on, and says what its files take."""

import json
import re
import time

import pytest
import yaml

from megatron_ext.cli.output import named_teacher
from megatron_ext.errors import ConfigError, UnknownNameError
from megatron_ext.training.run_folder import config_values
from tests.cli.run_files import PreloadedRun, refusal, write_config
from tests.training.dry_run.planned_runs import planned_run
from tests.training.tiny_run import changed, student_run, write_corpus


def test_a_recording_that_is_killed_goes_on_where_it_was(folder):
    file = write_config(folder, student_run(folder, "cached"))
    values = yaml.safe_load(file.read_text())
    del values["run_dir"]
    file.write_text(yaml.safe_dump(values))
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
def test_a_recording_that_cannot_be_is_refused(flags, message, folder, capsys):
    file = write_config(folder, student_run(folder, "refused"))
    words = ("cache-teacher", "--config", file, "--output", folder / "none", *flags)
    assert message in refusal(capsys, *words)
    assert not (folder / "none").exists()


def _record(config, cache):
    return PreloadedRun(
        *("cache-teacher", "--config", str(config), "--output", str(cache)),
        *("--targets", "label", "--file-mib", "0.0001"),
        output=config.with_suffix(".log"),
    )


def _files(cache):
    return sorted(cache.glob("targets-*.bin"))


ONE = planned_run()
assert ONE.teacher is not None
TWO = changed(ONE, teacher=None, teachers={"a": ONE.teacher, "b": ONE.teacher})


def test_the_only_teacher_needs_no_name():
    assert named_teacher(ONE, None, what_for="serve") == "teacher"
    assert named_teacher(TWO, "b", what_for="serve") == "b"


def test_what_is_missing_or_wrong_is_said_with_what_there_is():
    alone = changed(ONE, teacher=None, loss={"objective": "next_token"})
    with pytest.raises(ConfigError, match="no teacher to serve"):
        named_teacher(alone, None, what_for="serve")
    with pytest.raises(ConfigError, match=r"several teachers.*one of a, b"):
        named_teacher(TWO, None, what_for="serve")
    with pytest.raises(UnknownNameError, match=r"no such teacher.*'?c'?.*one of a, b"):
        named_teacher(TWO, "c", what_for="cache")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "a server needs an address to listen at"),
        (("--address", "here:1", "--tls-cert", "c"), "got --tls-cert alone; expected both or none"),
        (("--address", "here:1", "--teacher", "nobody"), "no such teacher; got nobody"),
        (("--address", "here:1"), "teacher.checkpoint"),
        (("--address", "here:1", "--teacher-placement", "server"), "without serving.address"),
    ],
    ids=["address", "key", "name", "checkpoint", "placement"],
)
def test_what_cannot_be_served_is_said_in_one_line(flags, message, tmp_path, capsys):
    write_corpus(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(config_values(student_run(tmp_path, "run"))))
    said = refusal(capsys, "serve-teacher", "--config", file, *flags)
    assert message in said
    assert said.count("\n") == 1
