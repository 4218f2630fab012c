"""Run the part of the suite that touches megatron-core under several versions of what it needs.

    pip install uv
    python .ci/check_versions.py [--only TEXT] [--write]

Each cell of ``CELLS`` gets a fresh environment in a temporary folder, one after the other, with an
interpreter that uv finds or gets; the folder is removed afterwards. ``--write`` keeps what came of
each in ``benchmarks/results/versions.json``, with at most ten names of failed tests;
``docs/generate_megatron_core.py`` makes a table of it. Exits with 1 if a test failed anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results" / "versions.json"
NEWEST: Final = "newest"
SHOWN: Final = ("megatron-core", "torch", "transformers", "numpy")
EXTRAS: Final = ("huggingface", "sentencepiece", "tiktoken", "fast", "train", "audit", "data")
# Not the extra `test`: its triton, which interprets kernels, goes with few releases of torch.
TOOLS: Final = ("pytest", "pytest-xdist", "hypothesis", "mistral-common>=1.8", "requests>=2.32")

CORE: Final = (
    "tests/training/test_cpu_megatron.py",
    "tests/training/test_megatron_parts.py",
    "tests/training/test_layouts.py",
    "tests/training/test_faults.py",
    "tests/training/test_linear_attention.py",
    "tests/training/test_masked_gpt_dataset.py",
    "tests/training/test_megatron_lm_pretrain.py",
    "tests/training/test_huggingface_teacher_runs.py",
    "tests/huggingface/test_logits.py",
    "tests/distributed/test_sharding.py",
    "tests/ops/test_binary_divergence.py",
    "tests/losses/test_every_objective.py",
    "tests/tokenizers/test_megatron_core_datasets.py",
    "tests/tokenizers/test_megatron_core_abc.py",
)
"""Runs, checkpoints, datasets, tokenizers and models over megatron-core; gradients of torch."""


class Cell(NamedTuple):
    """Versions to test together; each is a release, or ``NEWEST``."""

    python: str
    megatron_core: str
    torch: str
    transformers: str

    @property
    def name(self) -> str:
        """One line for a person."""
        return (
            f"Python {self.python}, megatron-core {self.megatron_core}, torch {self.torch}, "
            f"transformers {self.transformers}"
        )


# Every pair of versions that can be installed together is in a cell; megatron-core needs Python
# 3.12 from 0.17 on.
CELLS: Final = (
    Cell("3.12", "0.19", NEWEST, NEWEST),
    Cell("3.10", "0.16", "2.8", "4.57"),
    Cell("3.12", "0.17", NEWEST, "4.57"),
    Cell("3.13", "0.18", NEWEST, NEWEST),
    Cell("3.13", "0.19", NEWEST, "4.57"),
    Cell("3.12", "0.16", NEWEST, NEWEST),
    Cell("3.12", "0.18", "2.8", "4.57"),
    Cell("3.13", "0.17", "2.8", NEWEST),
    Cell("3.13", "0.16", NEWEST, "4.57"),
    Cell("3.10", "0.16", NEWEST, NEWEST),
)


def main() -> None:
    """Test the cells, print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="only cells whose line contains this")
    parser.add_argument("--write", action="store_true", help="keep the results")
    arguments = parser.parse_args()
    fails = False
    for cell in CELLS:
        if arguments.only not in cell.name:
            continue
        result = tested(cell)
        fails |= bool(result["failed"]) or not result["passed"]
        print(f"{cell.name}: {said(result)}", *result["first_failed"], sep="\n  ", flush=True)
        if arguments.write:
            known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            RESULTS.write_text(json.dumps({**known, cell.name: result}, indent=1) + "\n")
    sys.exit(fails)


def tested(cell: Cell) -> dict[str, Any]:
    """What came of the tests in an environment of their own."""
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        python = f"{folder}/bin/python"
        uv("venv", "--quiet", "--clear", "--python", cell.python, folder)
        asked = [
            f"{package}=={release}.*" if release != NEWEST else package
            for package, release in zip(
                ("megatron-core", "torch", "transformers"), cell[1:], strict=True
            )
        ]
        extras = [word for extra in EXTRAS for word in ("--extra", extra)]
        installing = ("pip", "install", "--quiet", "--python", python)
        uv(*installing, "--requirements", str(ROOT / "pyproject.toml"), *extras, *asked, *TOOLS)
        listed = json.loads(uv("pip", "list", "--python", python, "--format", "json"))
        versions = {package["name"]: package["version"] for package in listed}
        began = time.monotonic()
        report = Path(folder, "report.xml")
        options = ("-q", "-p", "no:cacheprovider", f"--junitxml={report}")
        subprocess.run(
            [python, "-m", "pytest", *options, *CORE],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        return {
            "versions": {name: versions[name] for name in SHOWN},
            **outcomes(report),
            "seconds": round(time.monotonic() - began),
        }


def uv(*words: str) -> str:
    """The output of uv; ends the program where it fails."""
    finished = subprocess.run(
        ["uv", *words], cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8", check=False
    )
    if finished.returncode:
        sys.exit(f"uv {words[0]} failed")
    return finished.stdout


def outcomes(report: Path) -> dict[str, Any]:
    """Counts of a pytest report, and the names of what failed."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(failed) - skipped,
        "skipped": skipped,
        "failed": len(failed),
        "first_failed": failed[:10],
    }


def said(result: dict[str, Any]) -> str:
    """Outcomes in a few words."""
    words = f"{result['passed']} passed, {result['failed']} failed"
    return words + (f", {result['skipped']} skipped" if result["skipped"] else "")


if __name__ == "__main__":
    main()
