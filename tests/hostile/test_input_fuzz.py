"""Malformed files and arguments are refused in one line, and leave nothing behind."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.input_fuzz import COUNTS, SMALL, Ended, Fuzzed, check_whole, some

ALL = os.environ.get("MEGATRON_EXT_ALL_TEXT") == "1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


@pytest.fixture(scope="module")
def fuzzed(folder: Path) -> Iterator[Fuzzed]:
    with Fuzzed(folder, is_large=False) as fuzzed:
        yield fuzzed


def test_every_command_does_its_work_on_whole_inputs(fuzzed: Fuzzed) -> None:
    check_whole(fuzzed, [target for target in SMALL if "distill" not in target.words])


def test_malformed_inputs_are_refused_in_one_line_and_leave_nothing(
    fuzzed: Fuzzed, folder: Path
) -> None:
    counts = some(fuzzed, folder, seed=0, count=2000 if ALL else 16)
    assert counts["refused"] > counts["cases"] // 2
    assert not counts["found"]


def test_every_fault_is_counted() -> None:
    line = "megatron-ext: error: it failed\n"
    faults = {
        "tracebacks": Ended(1, "Traceback (most recent call last):\n", 1.0, ()),
        "controls": Ended(2, f"\x1b{line}", 1.0, ()),
        "long_lines": Ended(2, f"megatron-ext: error: {'x' * 3000}", 1.0, ()),
        "left_behind": Ended(2, line, 1.0, ("out/x",)),
        "hangs": Ended(-9, "", 60.0, ()),
    }
    assert set(faults) < set(COUNTS)
    for name, ended in faults.items():
        assert name in ended.faults()
    assert Ended(2, line, 1.0, ()).faults() == []
