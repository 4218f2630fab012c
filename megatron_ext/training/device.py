"""What a launch runs on, said before it starts."""

from __future__ import annotations

import os
import sys

import torch

from megatron_ext.errors import ConfigError


def announce_device(*, require_gpu: bool) -> None:
    """Print what this launch runs on; one process does.

    Raises:
        ConfigError: There is no GPU, and one is required.
    """
    reason = _why_no_gpu()
    if require_gpu and reason is not None:
        raise ConfigError(
            "a GPU is required and there is none",
            where="training.require_gpu",
            got=reason,
            fix="start where nvidia-smi lists one, or leave --require-gpu out to run on the CPU",
        )
    if os.environ.get("RANK", "0") != "0":
        return
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    name = f"cpu ({reason})"
    if reason is None:
        index = int(os.environ.get("LOCAL_RANK", "0"))
        name = f"cuda:{index} {torch.cuda.get_device_name(index)}"
    sys.stdout.write(f"device: {name}, {ranks} rank{'s' if ranks > 1 else ''}\n")
    sys.stdout.flush()


def _why_no_gpu() -> str | None:
    """Why a launch would run on the CPU; None where there is a GPU."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "no CUDA device is visible"
