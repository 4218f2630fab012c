"""Configuration files of the tiny run, and the command line in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import yaml

from megatron_ext.training.config import DistillConfig
from megatron_ext.training.run_folder import config_values

REPOSITORY = Path(__file__).parents[2]


def write_config(folder: Path, config: DistillConfig) -> Path:
    """The configuration as the YAML file that a user would have written."""
    path = folder / f"{Path(config.run_dir).name}.yaml"
    path.write_text(yaml.safe_dump(config_values(config), sort_keys=False), encoding="utf-8")
    return path


def start(*arguments: str) -> subprocess.Popen[str]:
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


def finish(process: subprocess.Popen[str]) -> str:
    """What a process that must succeed printed."""
    try:
        output, errors = process.communicate(timeout=180)
    finally:
        kill(process)
    assert process.returncode == 0, errors
    return output


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL for the process and for those it forked to write a checkpoint."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
