"""Which processes of a launch are the student's, and which a teacher's own."""

from collections.abc import Iterator

import pytest

from megatron_ext.distributed import layout
from megatron_ext.distributed.layout import launched_processes
from megatron_ext.errors import ConfigError


@pytest.fixture(autouse=True)
def _without_role(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WORLD_SIZE", "7")
    yield
    layout.take({})


def test_the_first_ranks_are_the_students_and_teachers_follow_in_their_order() -> None:
    found = [layout.role_of(rank, 7, {"big": 4, "small": 1}) for rank in range(7)]
    assert [role.teacher for role in found] == [None, None, *["big"] * 4, "small"]
    assert [role.rank for role in found] == [0, 1, 0, 1, 2, 3, 0]
    assert [role.size for role in found] == [2, 2, 4, 4, 4, 4, 1]
    assert [role.launch_rank for role in found] == list(range(7))
    assert len({role.prefix for role in found}) == 3


@pytest.mark.parametrize(("rank", "processes"), [("1", 2), ("3", 5)], ids=["student", "teacher"])
def test_a_role_is_a_world_of_its_own(
    rank: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert launched_processes() == 7
    role = layout.take({"big": 5})
    assert role is layout.current()
    assert launched_processes() == processes


def test_a_launch_without_teachers_of_its_own_has_no_roles() -> None:
    assert layout.take({}) is None
    assert layout.current() is None


def test_a_launch_that_leaves_the_student_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave none for the student; got 2 processes, 2 of big"):
        layout.student_processes(2, {"big": 2})
