"""What files of tests take is recorded, and decides their order."""

import json
from types import SimpleNamespace

from tests.durations import DurationRecorder, Seconds, in_order, write_durations

pytest_plugins = ("pytester",)

BUSY = """
import subprocess, sys, time

CODE = "import time\\nwhile time.process_time() < 0.3: pass"

def test_a_child_works():
    subprocess.run([sys.executable, "-c", CODE], check=True)

def test_waiting():
    time.sleep(0.1)
"""


class Recording:
    """Registers the recorder as ``conftest.py`` does."""

    def __init__(self, path):
        self._path = path

    def pytest_configure(self, config):
        config.pluginmanager.register(DurationRecorder(config, self._path))


def test_a_file_takes_what_its_children_take(pytester):
    pytester.makepyfile(test_busy=BUSY, test_idle="def test_nothing(): pass")
    path = pytester.path / "durations.json"
    pytester.inline_run("-p", "no:cacheprovider", plugins=[Recording(path)]).assertoutcome(passed=3)
    table = json.loads(path.read_text())
    # Counted in ticks of a hundredth of a second.
    assert table["test_busy.py"]["cpu"] >= 0.25
    assert table["test_busy.py"]["wall"] >= 0.4
    assert table["test_idle.py"]["cpu"] < table["test_busy.py"]["cpu"]


def test_parts_of_a_file_on_several_workers_add_up(tmp_path):
    (tmp_path / "test_a.py").touch()
    config = SimpleNamespace()
    recorder = DurationRecorder(config, tmp_path / "durations.json")
    for seconds in ([1.0, 2.0], [0.5, 3.0]):
        recorder.pytest_testnodedown(
            SimpleNamespace(workeroutput={"durations": {"test_a.py": seconds}})
        )
    recorder.pytest_testnodedown(SimpleNamespace())
    recorder.pytest_sessionfinish()
    assert json.loads((tmp_path / "durations.json").read_text()) == {
        "test_a.py": {"cpu": 1.5, "wall": 5.0}
    }


def test_a_worker_reports_and_writes_nothing(tmp_path):
    config = SimpleNamespace(workeroutput={})
    DurationRecorder(config, tmp_path / "durations.json").pytest_sessionfinish()
    assert config.workeroutput == {"durations": {}}
    assert not any(tmp_path.iterdir())


def test_long_files_come_first_and_unknown_ones_before_them(tmp_path):
    path = tmp_path / "durations.json"
    assert in_order(path) is None
    for name in ("short", "long"):
        (tmp_path / f"{name}.py").touch()
    write_durations({"short.py": Seconds(9.0, 1.0), "gone.py": Seconds(1.0, 1.0)}, path)
    write_durations({"long.py": Seconds(0.1, 5.0)}, path)
    assert list(json.loads(path.read_text())) == ["long.py", "short.py"]
    key = in_order(path)
    items = [SimpleNamespace(path=tmp_path / f"{name}.py") for name in ("short", "long", "new")]
    assert [item.path.stem for item in sorted(items, key=key)] == ["new", "long", "short"]


def test_beside_a_file_that_waits_comes_one_of_ranks(tmp_path):
    path = tmp_path / "durations.json"
    measured = {"waits": (1, 9), "waits_too": (1, 5), "long": (12, 12), "ranks": (4, 4)}
    for name in (*measured, "ranks_too"):
        (tmp_path / f"{name}.py").write_text("run_ranks" if "ranks" in name else "")
    measured["ranks_too"] = (6, 6)
    write_durations({f"{name}.py": Seconds(*its) for name, its in measured.items()}, path)
    key = in_order(path)
    names = sorted(measured, key=lambda name: key(SimpleNamespace(path=tmp_path / f"{name}.py")))
    assert names == ["waits", "ranks_too", "ranks", "waits_too", "long"]
