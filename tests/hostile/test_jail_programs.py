"""Generated code reaches nothing outside, and honest programs run as ever."""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.evaluation import sandbox
from megatron_ext.evaluation.sandbox import Limits, run_program
from tests.hostile.jail_programs import (
    CORE,
    HONEST,
    PROGRAMS,
    by,
    left_behind,
    surroundings,
    tried,
    ways,
)

ALL = bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))
WAYS = ("bubblewrap", "namespaces of our own")


def _path_of(way: str) -> str | None:
    """Skip the test where there is no such way."""
    if way == "bubblewrap" and len(ways()) == 1:
        pytest.skip("no bubblewrap that holds a program is installed")
    return ways()[0] if way == "bubblewrap" else None


@pytest.fixture(scope="module")
def words() -> Iterator[dict[str, str]]:
    try:
        run_program("")
    except ConfigError:
        pytest.skip("the kernel gives no namespaces")
    with surroundings() as found:
        yield found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS if ALL else CORE)
def test_a_hostile_program_does_not_reach_its_end(
    words: dict[str, str], name: str, way: str
) -> None:
    with by(_path_of(way)):
        outcome = tried(PROGRAMS[name], words)
    assert not outcome.passed
    assert outcome.bubblewrap == (way == "bubblewrap")
    assert outcome.printed.isprintable()
    assert "SyntaxError" not in outcome.printed
    assert not left_behind()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_runs(words: dict[str, str], name: str, way: str) -> None:
    with by(_path_of(way)):
        outcome = run_program(HONEST[name])
    assert outcome.passed, outcome


def test_a_bubblewrap_that_holds_nothing_is_not_used(
    words: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    false = tmp_path / "bwrap"
    # Such as one whose namespaces the kernel refuses.
    false.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1")
    false.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name, path: str(false))
    sandbox.usable_bubblewrap.cache_clear()
    try:
        outcome = run_program("")
    finally:
        sandbox.usable_bubblewrap.cache_clear()
    assert outcome.passed
    assert not outcome.bubblewrap


@pytest.mark.parametrize("name", ["memory of children", "memory of hidden children"])
def test_memory_of_all_processes_has_one_limit(words: dict[str, str], name: str) -> None:
    limits = Limits(seconds=20, memory_bytes=300 << 20)
    program = PROGRAMS[name]
    assert run_program(program, limits).reason == "out of memory"


def test_a_process_that_hides_its_maps_counts_its_resident_pages(tmp_path: Path) -> None:
    (tmp_path / "statm").write_text("900 300 200 1 0 500 0\n")
    assert sandbox._bytes_of(tmp_path) == 300 * mmap.PAGESIZE
    (tmp_path / "smaps_rollup").write_text("Rss: 9 kB\nPss: 7 kB\nSwapPss: 1 kB\n")
    assert sandbox._bytes_of(tmp_path) == 8 << 10
