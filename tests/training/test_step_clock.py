"""What a phase of a step takes is its own time, and nothing waits to learn it."""

from types import SimpleNamespace

import pytest

from megatron_ext.training.step_clock import StepClock, StepWatch, TeacherWatch


class Device:
    """Reaches its marks when it is told to, a second of its own after the other."""

    def __init__(self):
        self.marked = self.reached = 0

    def mark(self):
        self.marked += 1
        return Reached(self, self.marked)


class Reached:
    def __init__(self, device, number):
        self.device, self.number = device, number

    def query(self):
        return self.number <= self.device.reached

    def elapsed_time(self, later):
        assert later.query(), "this would wait for the device"
        return 1e3 * (later.number - self.number)


class Batches:
    waited = 0.0


def run_phases(clock, *names):
    for name in names:
        with clock.phase(name):
            pass


def test_an_inner_phase_is_not_counted_in_the_outer_one():
    device = Device()
    clock = StepClock(device.mark)
    with clock.phase("student"):
        run_phases(clock, "loss", "loss")
    device.reached = device.marked
    # Marks 1 to 6: five seconds, of which two are the loss's.
    assert clock.read() == {"student": 3.0, "loss": 2.0}
    assert clock.read() == {}


def test_phases_that_the_device_has_not_ended_are_in_the_next_reading():
    device = Device()
    clock = StepClock(device.mark)
    run_phases(clock, "teacher")
    with clock.phase("student"):
        run_phases(clock, "loss")
    device.reached = 5
    assert clock.read() == {"teacher": 1.0}
    run_phases(clock, "optimizer")
    device.reached = device.marked
    assert clock.read() == {"student": 2.0, "loss": 1.0, "optimizer": 1.0}


def test_the_host_is_timed_where_there_is_no_device(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    moments = iter([1.0, 3.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(moments))
    clock = StepClock()
    run_phases(clock, "data")
    assert clock.read() == {"data": 2.5}


def test_a_phase_that_fails_is_over():
    device = Device()
    clock = StepClock(device.mark)
    with pytest.raises(ValueError, match="broken"), clock.phase("data"):
        raise ValueError("broken")
    run_phases(clock, "teacher")
    device.reached = device.marked
    assert clock.read() == {"data": 1.0, "teacher": 1.0}


def test_the_loss_of_a_forward_step_is_timed_and_passed_on():
    device = Device()
    clock = StepClock(device.mark)

    def step(microbatches, model):
        return "output", lambda output, non_loss_data=False: (output, non_loss_data)

    with clock.phase("student"):
        output, loss = clock.with_timed_loss(step)(iter([]), "model")
        assert (output, loss(output)) == ("output", ("output", False))
        assert loss(output, non_loss_data=True) == ("output", True)
    device.reached = device.marked
    assert clock.read() == {"student": 3.0, "loss": 2.0}


def test_a_row_has_throughput_waiting_and_memory():
    device, batches = Device(), Batches()
    clock = StepClock(device.mark)
    watch = StepWatch(clock, batches)
    batches.waited = 0.5
    run_phases(clock, "data")
    device.reached = device.marked
    row = watch.row({"tokens": 100}, seconds=4.0)
    assert row.pop("memory_bytes") > 1 << 20
    assert row == {"tokens_per_second": 25.0, "seconds/waiting": 0.5, "seconds/data": 1.0}
    batches.waited = 0.75
    assert watch.row({"tokens": 1}, seconds=1.0)["seconds/waiting"] == 0.25
    # The streams were opened again.
    batches.waited = 0.25
    assert watch.row({"tokens": 1}, seconds=1.0)["seconds/waiting"] == 0.25


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
