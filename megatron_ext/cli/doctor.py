"""Show versions and devices, what is missing, and which extra brings it.

    megatron-ext doctor

Nothing is downloaded or changed. The exit code is 1 where the version of an installed package does
not fit.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import Final

from megatron_ext.cli.output import write_rows
from megatron_ext.constants import __version__
from megatron_ext.imports import EXTRA_OF, package_of

_GIB: Final = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the verb has no flags."""


def run(arguments: argparse.Namespace) -> None:
    """Print the three parts; exit with 1 if the version of a package does not fit."""
    machine = f"{platform.system()} {platform.machine()}"
    print(f"megatron-ext {__version__}, Python {platform.python_version()}, {machine}\n")
    write_rows(_devices())
    print()
    write_rows(_extras())
    wrong = list(_misfits())
    if wrong:
        print()
        write_rows(wrong)
        sys.exit(1)


def _devices() -> Iterator[tuple[str, str]]:
    """Processors, memory, GPUs, and the layers that a run would have."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    yield "cpu", f"{os.cpu_count()} cores, {memory:.1f} GiB"
    if find_spec("torch") is None:
        yield "gpu", "not looked for: torch is not installed"
        return
    import torch

    from megatron_ext.training.megatron_models.cpu_megatron import why_no_gpu

    reason = why_no_gpu()
    if reason is not None:
        yield "gpu", f"none ({reason}); a run uses the CPU"
    for index in range(0 if reason else torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        capability = f"sm_{device.major}{device.minor}"
        yield f"cuda:{index}", f"{device.name}, {device.total_memory / _GIB:.1f} GiB, {capability}"
    if find_spec("transformer_engine") is None:
        yield "layers", "megatron-core's own; Transformer Engine is not installed"
    else:
        yield "layers", "Transformer Engine's"


def _extras() -> Iterator[tuple[str, str]]:
    """Each extra with the versions of its packages, or with the command that installs them."""
    packages = defaultdict(list)
    for name, extra in EXTRA_OF.items():
        packages[extra].append(package_of(name))
    yield "extra", "packages"
    for extra, names in sorted(packages.items()):
        found = {name: _version(name) for name in names}
        missing = [name for name, number in found.items() if number is None]
        parts = [f"{name} {number}" for name, number in found.items() if number is not None]
        if missing:
            command = f'pip install "megatron-ext[{extra}]"'
            parts.append(f"missing: {', '.join(missing)} ({command})")
        yield extra, ", ".join(parts)


def _misfits() -> Iterator[tuple[str, str]]:
    """Installed packages whose version is none of those that this package is made for."""
    try:
        from packaging.requirements import Requirement

        lines = requires("megatron-ext") or []
    except (ImportError, PackageNotFoundError):
        # Nothing to compare with: no package of the extras that bring it, or no installation.
        return
    for requirement in map(Requirement, lines):
        found = _version(requirement.name)
        # Those of developers are narrower.
        is_for_users = not re.search(r'"(test|dev|docs)"', str(requirement.marker))
        if found and is_for_users and not requirement.specifier.contains(found, prereleases=True):
            yield requirement.name, f"{found} does not fit; expected {requirement.specifier}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
