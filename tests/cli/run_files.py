"""Configuration files of the tiny run, and the command line in a process of its own."""

import hashlib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ext.cli.main import main
from megatron_ext.training.run_folder import config_values
from tests.fork_server import fork_server

REPOSITORY = Path(__file__).parents[2]


def write_config(folder, config):
    """The configuration as the YAML file that a user would have written."""
    path = folder / f"{Path(config.run_dir).name}.yaml"
    path.write_text(yaml.safe_dump(config_values(config), sort_keys=False), encoding="utf-8")
    return path


def start(*arguments):
    """``megatron-ext`` with these arguments on one CPU process, its output captured."""
    # One thread, for the same sums in every process; no GPU, for the same run on every machine.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_ext", *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process):
    """What a process that must succeed printed."""
    try:
        output, errors = process.communicate(timeout=180)
    finally:
        kill(process)
    assert process.returncode == 0, errors
    return output


def refusal(capsys, *words):
    """What a command line that must be refused says on standard error, in one line at its end."""
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    errors = capsys.readouterr().err
    assert stopped.value.code == 2
    assert errors.splitlines()[-1].startswith("megatron-ext: error")
    return errors


def contents(folder):
    """What is in a folder: digests of files by their path."""
    return {
        path.relative_to(folder): path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
    }


def kill(process):
    """SIGKILL for the process and for those it forked to write a checkpoint."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class PreloadedRun:
    """``megatron-ext`` in a process of its own that is forked from one with the imports done.

    Args:
        arguments: Of the command line.
        output: File for what it prints.
    """

    def __init__(self, *arguments, output):
        context = fork_server()
        self.output = output
        self._process: Any = context.Process(target=_run_preloaded, args=(arguments, output))
        self._process.start()

    def is_alive(self):
        """Whether it runs."""
        return bool(self._process.is_alive())

    def kill(self):
        """SIGKILL for the process and for those it forked to write a checkpoint."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()

    @property
    def pid(self):
        """Its process id."""
        return self._process.pid

    def send(self, number):
        """A signal for the process alone."""
        os.kill(self._process.pid, number)

    def exit_code(self):
        """Its exit code; waits for its end."""
        self._process.join(180)
        self.kill()
        return self._process.exitcode

    def text(self):
        """What it printed."""
        return self.output.read_text(encoding="utf-8")

    def finish(self):
        """What it printed; it must succeed."""
        assert self.exit_code() == 0, self.text()
        return self.text()


def _run_preloaded(arguments, output):
    os.setsid()
    # One thread, for the same sums in every process; no GPU, for the same run on every machine.
    import torch

    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with output.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main(arguments)
