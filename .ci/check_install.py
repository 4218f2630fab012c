"""Ask pip whether all that this repository installs can be had from the public index alone.

    python .ci/check_install.py ["REQUIREMENT ..." ...]

Each extra of ``pyproject.toml`` is resolved by itself, and so is each argument: requirements among
which ``.`` is the repository. Nothing is installed. The indexes, folders and constraints that pip
is configured with are left out, since they hide it when the public index has no answer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
AT_ONCE: Final = 4
SHOWN: Final = ("torch", "triton", "numpy", "transformers")
"""Packages whose versions are shown."""

HOW_TO_CONNECT: Final = ("PIP_CERT", "PIP_CLIENT_CERT", "PIP_PROXY", "PIP_DEFAULT_TIMEOUT")
"""What is kept of pip's configuration: nothing else is found because of it."""


class Answer(NamedTuple):
    """What pip makes of a set of requirements."""

    works: bool
    text: str


def main() -> None:
    """Print a line for each set; exit with 1 if one cannot be installed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("requirements", nargs="*", help="further sets")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to install for")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        project = build_wheel(Path(folder), arguments.python)
        sets = [f".[{extra}]" for extra in extras(project)] + arguments.requirements

        def answer(requirements: str) -> Answer:
            names = [re.sub(r"^\.", str(project), name) for name in requirements.split()]
            return resolve(names, arguments.python)

        works = True
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for requirements, (resolved, text) in zip(sets, pool.map(answer, sets), strict=True):
                print(f"{requirements}: {text}", flush=True)
                works &= resolved
    sys.exit(not works)


def build_wheel(folder: Path, python: str) -> Path:
    """The repository as a wheel in ``folder``; what is made on the way stays there, too."""
    configuration = folder / "build.cfg"
    configuration.write_text(f"[build]\nbuild_base = {folder}\n[egg_info]\negg_base = {folder}\n")
    made = run_pip(
        python,
        ["wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)],
        DIST_EXTRA_CONFIG=str(configuration),
    )
    if made.returncode:
        sys.exit(f"no wheel can be built\n{made.stdout}{made.stderr}")
    return next(folder.glob("*.whl"))


def extras(project: Path) -> list[str]:
    """The names of a wheel's extras."""
    found = next(iter(distributions(path=[str(project)])))
    return found.metadata.get_all("Provides-Extra") or []


def resolve(requirements: Sequence[str], python: str) -> Answer:
    """What pip would install for these into an empty environment."""
    with tempfile.NamedTemporaryFile() as report:
        # Of a wheel that the index has no metadata of, fast-deps reads the end alone.
        options = ["--dry-run", "--ignore-installed", "--use-feature", "fast-deps"]
        asked = run_pip(python, ["install", *options, "--report", report.name, *requirements])
        if asked.returncode:
            _, at, reasons = asked.stdout.partition("\nThe conflict is caused by:")
            return Answer(False, f"cannot be installed\n{asked.stderr}{at}{reasons}")
        packages: list[dict[str, Any]] = json.load(report)["install"]
    versions = {package["metadata"]["name"]: package["metadata"]["version"] for package in packages}
    shown = [f"{name} {versions[name]}" for name in SHOWN if name in versions]
    return Answer(True, ", ".join([f"{len(versions)} packages", *shown]))


def run_pip(
    python: str, arguments: Sequence[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run pip for ``python`` as if it were configured nowhere."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PIP_") or name in HOW_TO_CONNECT
    }
    return subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "--no-color", *arguments],
        env={**inherited, **variables, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


if __name__ == "__main__":
    main()
