"""Code that a model wrote runs to its end, or is ended, and harms nothing around it."""

import json
import os
import shutil
import socket
import sys
import tempfile
import time
import venv
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.evaluation.sandbox import Limits, run_program
from megatron_ext.evaluation.tasks import TASKS, TaskOptions
from tests.evaluation.stand_in_model import StandInModel, written

QUICK = Limits(seconds=1, memory_bytes=256 << 20, disk_bytes=1 << 20)


def _can_hold():
    try:
        return run_program("", Limits()).passed
    except ConfigError:
        return False


needs_namespaces = pytest.mark.skipif(
    not _can_hold(), reason="the kernel gives ordinary users no namespaces"
)

HOSTILE = {
    "endless loop": "while True: pass",
    "sleep": "import time\ntime.sleep(1000)",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "memory": "x = bytearray(1 << 30)",
    "full disk": "for i in range(9): open(str(i), 'wb').write(b'x' * (1 << 19))",
    "leaving early": "import os\nos._exit(0)",
    "leaving by exit": "raise SystemExit(0)",
    "killing all": "import os, signal\nos.kill(-1, signal.SIGKILL)\nos._exit(0)",
    "detached": "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(1000)\n"
    "raise SystemExit",
    "much output": "import sys\nwhile True: sys.stdout.write('x' * 9999)",
    "mounts": "import ctypes\nlibc = ctypes.CDLL(None)\n"
    "assert libc.mount(None, b'/', None, 32 | 4096, None) == 0",
}


@needs_namespaces
@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE)
def test_hostile_code_is_ended_and_leaves_no_process(program, monkeypatch):
    with tempfile.TemporaryDirectory(prefix="hostile-") as place:
        # Programs are started from a folder in here, by its path.
        os.chmod(place, 0o755)
        monkeypatch.setattr(tempfile, "tempdir", place)
        began = time.monotonic()
        outcome = run_program(program, QUICK)
        # The limit, and what starting two Pythons takes on a busy machine.
        assert time.monotonic() - began < 15
        deadline = time.monotonic() + 5
        while _processes(place) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _processes(place)
        assert not outcome.passed
        assert os.listdir(place) == []


@needs_namespaces
def test_nothing_outside_can_be_written_reached_or_read_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "secret")
    tmp_path.chmod(0o777)
    victim = written(tmp_path / "victim", "whole")
    victim.chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"""
import os, socket
for path in ({str(victim)!r}, {str(tmp_path / "new")!r}, "/usr/lib/new", "/new", "/dev/new"):
    try:
        open(path, "w").write("broken")
    except OSError:
        continue
    raise AssertionError(path)
for remove in (lambda: os.unlink({str(victim)!r}), lambda: os.kill({os.getpid()}, 9)):
    try:
        remove()
    except OSError:
        continue
    raise AssertionError(remove)
for family, address in ((socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_INET, ("1.1.1.1", 80))):
    try:
        socket.socket(family).connect(address)
    except OSError:
        continue
    raise AssertionError(address)
assert "SECRET" not in os.environ
assert os.listdir("/proc") == []
assert not any(map(os.path.exists, ("/etc/passwd", "/home", "/run", "/var", "/usr/bin/env")))
open("/tmp/new_of_program", "w").write("may be written")
open("own", "w").write("may be written")
"""
        outcome = run_program(program, Limits())
    assert outcome.passed, outcome
    assert outcome.namespaces
    assert outcome.own_root
    assert victim.read_text() == "whole"
    assert not (tmp_path / "new").exists()
    assert not Path("/tmp/new_of_program").exists()


@needs_namespaces
def test_processes_are_counted():
    program = """
import os, time
for count in range(20):
    try:
        if not os.fork():
            time.sleep(100)
    except OSError:
        break
assert count < 8, count
"""
    assert run_program(program, Limits()).passed


def test_without_namespaces_limits_still_hold():
    limits = Limits(seconds=1, memory_bytes=256 << 20, needs_namespaces=False)
    assert run_program("import math\nassert math.pi > 3", replace(limits, seconds=20)).passed
    assert not run_program("while True: pass", limits).passed
    assert not run_program("x = bytearray(1 << 30)", limits).passed


@needs_namespaces
@pytest.mark.parametrize("private", ["", "environment"], ids=["folder around it", "itself"])
def test_an_environment_in_a_private_folder_runs_programs(tmp_path, monkeypatch, private):
    environment = tmp_path / "home" / "environment"
    venv.create(environment, symlinks=True)
    (tmp_path / "home" / private).chmod(0o700)
    written(tmp_path / "home" / "secret", "secret")
    (tmp_path / "link").symlink_to(environment)
    old = os.umask(0o077)
    try:
        for prefix in (environment, tmp_path / "link"):
            monkeypatch.setattr(sys, "executable", str(prefix / "bin" / "python"))
            program = f"import sys\nassert sys.prefix == {str(prefix)!r}, sys.prefix"
            assert run_program(program, Limits()).passed
    finally:
        os.umask(old)


@needs_namespaces
def test_an_environment_that_cannot_be_read_is_no_fault_of_the_program(tmp_path, monkeypatch):
    venv.create(tmp_path / "environment", symlinks=True)
    (tmp_path / "environment" / "pyvenv.cfg").chmod(0)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment" / "bin" / "python"))
    with pytest.raises(ConfigError, match=r"cannot start Python.*pyvenv\.cfg"):
        run_program("", Limits(needs_namespaces=False))


IN_NAMESPACE = "exec unshare --user --map-root-user"


@needs_namespaces
@pytest.mark.skipif(shutil.which("unshare") is None, reason="util-linux is not installed")
@pytest.mark.parametrize("needs", [True, False], ids=["namespaces", "limits alone"])
def test_root_of_namespaces_without_nobody_holds_a_program(tmp_path, monkeypatch, needs):
    _python_through(tmp_path, monkeypatch, f'{IN_NAMESPACE} {sys.executable} "$@"')
    program = "import os\nassert os.getuid() != 0\n" + HOSTILE["mounts"].replace("==", "!=")
    assert run_program(program, Limits(needs_namespaces=needs)).passed


@needs_namespaces
@pytest.mark.skipif(shutil.which("unshare") is None, reason="util-linux is not installed")
def test_root_that_nothing_holds_runs_no_program(tmp_path, monkeypatch):
    no_more = f'echo 0 > /proc/sys/user/max_user_namespaces; exec {sys.executable} "$@"'
    _python_through(tmp_path, monkeypatch, f"{IN_NAMESPACE} sh -c '{no_more}' sh \"$@\"")
    with pytest.raises(ConfigError, match="root cannot become nobody"):
        run_program("", Limits(needs_namespaces=False))


def test_the_end_of_what_a_program_prints_says_why_it_failed():
    limits = Limits(needs_namespaces=False)
    noisy = "import sys\nsys.stderr.write('\\x1b]0;x\\x07\\n' * (1 << 17))"
    assert run_program(noisy, limits).passed
    failed = run_program(f"{noisy}\n1 / 0", limits)
    assert failed.reason == "failed"
    assert failed.printed.endswith("ZeroDivisionError: division by zero")
    assert failed.printed.isprintable()
    assert "utf-8" in run_program("x = '\ud800'", limits).printed


def test_code_runs_only_where_it_was_allowed(tmp_path):
    data = written(tmp_path / "x.jsonl", "{}")
    with pytest.raises(ConfigError, match="--run-generated-code"):
        TASKS["humaneval_plus"](TaskOptions(data=data))


EVALPLUS = {
    "task_id": "HumanEval/0",
    "prompt": 'def half(x):\n    """Half of x."""\n',
    "canonical_solution": "    return x / 2\n",
    "entry_point": "half",
    "base_input": [[4]],
    "plus_input": [[3], ["fails in the reference"]],
    "atol": 0,
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def half(x):\n    """Half of x."""\n',
    "entry_point": "half",
    "test": "def check(candidate):\n    assert candidate(4) == 2\n    assert candidate(3) == 1.5\n",
}
MBPP = {
    "task_id": 2,
    "prompt": "Write a function to halve a number.",
    "test_imports": ["import math"],
    "test_list": ["assert half(4) == 2"],
    "test": "assert half(4) == 2\nassert half(3) == 1.5\n",
}


@needs_namespaces
@pytest.mark.parametrize(
    ("task", "row", "head"),
    [
        ("humaneval_plus", EVALPLUS, ""),
        ("humaneval_plus", HUMANEVAL, ""),
        ("mbpp_plus", {**EVALPLUS, "canonical_solution": "def half(x):\n    return x / 2"}, ""),
        ("mbpp_plus", MBPP, "def half(x):\n"),
    ],
    ids=["evalplus", "humaneval-hf", "evalplus-mbpp", "mbpp-hf"],
)
def test_solutions_pass_base_and_plus_tests(tmp_path, task, row, head):
    data = written(tmp_path / "problems.jsonl", f"{json.dumps(row)}\n{json.dumps(row)}\n")
    bodies = iter(["    return x / 2", "    return x // 2"])
    made = TASKS[task](TaskOptions(data=data, run_generated_code=True))
    result = made.run(StandInModel(complete=lambda prompt: head + next(bodies)))
    assert result.metrics["pass@1/plus"] == 0.5
    if "pass@1/base" in result.metrics:
        assert result.metrics["pass@1/base"] == 1.0
    assert [sample["plus"] for sample in result.samples] == ["passed", "failed"]


@needs_namespaces
def test_a_reference_that_fails_on_every_input_is_an_error_of_the_data(tmp_path):
    broken = {**EVALPLUS, "task_id": "X", "canonical_solution": "    return x / nothing\n"}
    data = written(tmp_path / "problems.jsonl", f"{json.dumps(EVALPLUS)}\n{json.dumps(broken)}\n")
    made = TASKS["humaneval_plus"](TaskOptions(data=data, run_generated_code=True))
    with pytest.raises(DataError, match=r"X, base.*every input: NameError.*'nothing'"):
        made.run(StandInModel(complete=lambda prompt: "    return x / 2"))


@needs_namespaces
@pytest.mark.parametrize(
    ("task", "row", "field"),
    [
        ("humaneval_plus", EVALPLUS, "canonical_solution"),
        ("humaneval_plus", HUMANEVAL, "canonical_solution"),
        ("mbpp_plus", MBPP, "code"),
    ],
    ids=["evalplus", "humaneval-hf", "mbpp-hf"],
)
def test_a_first_reference_that_fails_is_an_error_of_the_sandbox(tmp_path, task, row, field):
    data = written(tmp_path / "x.jsonl", json.dumps({**row, field: "    import not_there"}))
    with pytest.raises(ConfigError, match=r"sandbox cannot run the reference.*not_there"):
        TASKS[task](TaskOptions(data=data, run_generated_code=True))


def _python_through(folder, monkeypatch, command):
    """Put a shell script in the place of the interpreter."""
    script = written(folder / "python", f"#!/bin/sh\n{command}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def _processes(place):
    """Command lines that name a folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if place in line:
            found.append(line)
    return found
