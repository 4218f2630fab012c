"""No student that means harm ends a teacher's server, or another student's answers."""

import os
from collections.abc import Iterator

import pytest

from tests.hostile.server_attacks import ATTACKS, Target

ALL = os.environ.get("MEGATRON_EXT_ALL_TEXT") == "1"
CORE = (
    *("count -5", "count [1]", "count null", "count Infinity", "channel cuda_ipc"),
    *("bounds of two dimensions", "tokens missing", "positions NaN", "id behind the vocabulary"),
    *("deep JSON", "shape [17179869184]", "shape [4611686018427387904]", "flood of requests"),
    *("connections", "another token", "request before ready", "batches of another schema"),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    target = Target(tmp_path_factory.mktemp("server"))
    yield target
    target.close()


@pytest.mark.parametrize("name", ATTACKS if ALL else CORE)
def test_a_hostile_student_harms_no_other(name: str, target: Target) -> None:
    ATTACKS[name](target.address)
    assert target.is_alive()
    assert target.is_right(1)
