from types import SimpleNamespace

import pytest

from megatron_ext.training.step_clock import TeacherWatch


def test_a_row_has_the_waiting_of_its_step_and_the_bytes_of_targets_without_the_head():
    remote = SimpleNamespace(waited_s=5.0, received_bytes=1000, received_tokens=0)
    watch = TeacherWatch({"far": remote})
    watch.begin()
    remote.waited_s, remote.received_bytes, remote.received_tokens = 7.0, 1800, 10
    row = watch.row(seconds=4.0)
    assert row == {
        "seconds/teacher_waiting": 2.0,
        "teacher_waiting_share": 0.5,
        "teacher_bytes_per_token/far": 80.0,
    }
    assert watch.shown(row) == {"waiting": "50%"}
    # An evaluation waits, too; that is not the next step's.
    remote.waited_s = 100.0
    watch.begin()
    remote.waited_s = 101.0
    assert watch.row(seconds=4.0)["teacher_waiting_share"] == pytest.approx(0.25)


def test_a_run_without_teachers_elsewhere_says_nothing():
    watch = TeacherWatch({})
    watch.begin()
    assert watch.row(seconds=1.0) == {}
    assert watch.shown({}) == {}
