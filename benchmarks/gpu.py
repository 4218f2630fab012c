"""Check the kernels on this machine's GPU, and measure everything, within ten minutes.

    make bench-gpu
    python benchmarks/gpu.py           the same, without make and its environment

1. imports torch and triton, 2. runs ``tests/ops``, on the GPU, side by side where pytest-xdist is
installed, 3. runs ``benchmarks/losses.py``, which compares every kernel once more and writes
``benchmarks/results/losses.json``, each row when it is measured. A test or comparison that fails
ends it with nothing written. Tests that take too long are stopped, the rest is measured all the
same, and the exit status is not 0. megatron-core is not needed.

Without a GPU it says so, runs a part of the tests interpreted, and writes the counted bytes alone:
``benchmarks/results/losses_counted.json``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SECONDS = 600
TESTED_SHARE = 0.5
"""Most of the time that the tests may take, which time no launch configurations."""

TIMED_OUT = 124
"""In the place of an exit status, as timeout(1) has it."""

MEASURED_SHARE = 0.75
"""Of what is left after the tests; the rest is for compiling what is measured last."""

INTERPRETED_TESTS = ("tests/ops/test_softmax_statistics.py", "tests/ops/test_unit_gradient.py")
"""A few rows of every kernel are compared by ``losses.py`` as well."""

PROBE = "import torch, triton; print(int(torch.cuda.is_available()), torch.__version__)"


def run(*command: str, gpu: bool, timeout: float | None = None, times_launches: bool = True) -> int:
    """Exit status of a Python child with this checkout on its path, or ``TIMED_OUT``."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if not gpu:
        environment["TRITON_INTERPRET"] = "1"
    if not times_launches:
        environment["MEGATRON_EXT_AUTOTUNE"] = "0"
    try:
        finished = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"stopped after {timeout:.0f} s: {' '.join(command)}", file=sys.stderr)
        return TIMED_OUT
    return finished.returncode


def has_gpu() -> bool:
    """Whether torch sees one; ends the program where torch or triton is missing."""
    found = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"torch and triton are needed:\n{found.stderr.strip()}")
    return found.stdout.startswith("1")


def run_tests(tests: Sequence[str], *, gpu: bool, timeout: float | None = None) -> int:
    """Exit status of pytest on these files, or ``TIMED_OUT``."""
    aside: tuple[str, ...] = ()
    if gpu and importlib.util.find_spec("xdist") is not None:
        aside = ("-n", str(min(12, os.cpu_count() or 1)), "--dist", "loadfile")
    command = ("-m", "pytest", "-q", *aside, *tests)
    return run(*command, gpu=gpu, timeout=timeout, times_launches=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything, on a GPU")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write into")
    parser.add_argument(
        "--tests", nargs="*", help="other tests than tests/ops; none to leave them to losses.py"
    )
    arguments = parser.parse_args()
    start = time.monotonic()
    results = arguments.results.resolve()
    gpu = has_gpu()
    tests = arguments.tests
    if tests is None:
        tests = ["tests/ops"] if gpu else INTERPRETED_TESTS
    if not gpu:
        print("No GPU here: kernels are interpreted, bytes are counted, nothing is timed.")
    timeout = TESTED_SHARE * arguments.seconds if gpu else None
    tested = run_tests(tests, gpu=gpu, timeout=timeout) if tests else 0
    if tested == TIMED_OUT:
        print("Not all tests were run: what is measured now is checked by losses.py alone.")
    elif tested:
        print("Not all tests passed: nothing is measured, and nothing was written.")
        return 1
    if not gpu:
        counted = str(results / "losses_counted.json")
        return abs(run("benchmarks/losses.py", "--counted", counted, gpu=False) or tested)
    left = arguments.seconds - (time.monotonic() - start)
    measured = str(results / "losses.json")
    seconds = f"{MEASURED_SHARE * left:.0f}"
    command = ("benchmarks/losses.py", "--output", measured, "--seconds", seconds)
    # Neither a time-out here nor one of the tests is a success, though results are written.
    return abs(run(*command, gpu=True, timeout=left) or tested)


if __name__ == "__main__":
    sys.exit(main())
