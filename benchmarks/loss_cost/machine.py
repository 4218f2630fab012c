"""What results were measured on, and how they are written."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from megatron_ext.constants import __version__
from megatron_ext.files import write_text

ROOT: Final = Path(__file__).parents[2]


def machine() -> dict[str, Any]:
    """Processor, GPU and versions."""
    found: dict[str, Any] = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "liger-kernel": _version("liger-kernel"),
        "megatron_ext": __version__,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "cuda": torch.version.cuda,
        }
    return found


def commit() -> str | None:
    """The commit that is checked out, with "+" where files differ from it; None without git."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "megatron_ext")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("MEGATRON_EXT_COMMIT")
    return head + "+" if changed else head


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """``results`` as JSON, a row a line, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = []
    for name, value in results.items():
        if isinstance(value, list) and value:
            lines = ",\n  ".join(json.dumps(row) for row in value)
            entries.append(f" {json.dumps(name)}: [\n  {lines}\n ]")
        else:
            entries.append(f" {json.dumps(name)}: {json.dumps(value)}")
    write_text(path, "{\n" + ",\n".join(entries) + "\n}\n")


def _git(*arguments: str) -> str:
    finished = subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return finished.stdout.strip()


def _cpu() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if "model name" in line:
                return line.split(":")[1].strip()
    return platform.processor()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
