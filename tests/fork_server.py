"""Processes of a test's own.

Those that are forked begin with the imports done: importing megatron-core takes seconds.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def fork_server():
    """The one server that a test process forks from; whoever comes first starts it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fork_server_modules"])
    return context


def run_forked(folder, function, *arguments):
    """``function(*arguments)`` in a process of its own, in ``folder``.

    Returns:
        Its exit code and what it wrote to standard output and to standard error.
    """
    with tempfile.TemporaryDirectory() as name:
        streams = [Path(name) / stream for stream in ("stdout", "stderr")]
        process = fork_server().Process(target=_run, args=(folder, streams, function, arguments))
        process.start()
        process.join(120)
        process.kill()
        process.join()
        return process.exitcode, *(stream.read_text(encoding="utf-8") for stream in streams)


def run_python(code, *arguments, cwd=REPOSITORY, env=None):
    """What an interpreter of its own wrote and returned for ``code``, which must succeed."""
    finished = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        env=env,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished


def _run(folder, streams, function, arguments):
    os.chdir(folder)
    for standard, path in zip((sys.stdout, sys.stderr), streams, strict=True):
        standard.reconfigure(encoding="utf-8")
        with path.open("wb") as file:
            os.dup2(file.fileno(), standard.fileno())
    function(*arguments)
