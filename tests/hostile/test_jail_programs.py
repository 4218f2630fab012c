"""Generated code reaches nothing outside, and honest programs run as ever."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.evaluation.sandbox import Limits, run_program
from tests.hostile.jail_programs import CORE, HONEST, PROGRAMS, left_behind, surroundings, tried


@pytest.fixture(scope="module")
def words() -> Iterator[dict[str, str]]:
    try:
        run_program("")
    except ConfigError:
        pytest.skip("the kernel gives no namespaces")
    with surroundings() as found:
        yield found


@pytest.mark.parametrize("name", PROGRAMS if os.environ.get("MEGATRON_EXT_ALL_TEXT") else CORE)
def test_a_hostile_program_does_not_reach_its_end(words: dict[str, str], name: str) -> None:
    outcome = tried(PROGRAMS[name], words)
    assert not outcome.passed
    assert outcome.printed.isprintable()
    assert "SyntaxError" not in outcome.printed
    assert not left_behind()


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_runs(words: dict[str, str], name: str) -> None:
    outcome = run_program(HONEST[name])
    assert outcome.passed, outcome


def test_memory_of_all_processes_has_one_limit(words: dict[str, str]) -> None:
    limits = Limits(seconds=20, memory_bytes=300 << 20)
    program = PROGRAMS["memory of children"]
    assert run_program(program, limits).reason == "out of memory"
