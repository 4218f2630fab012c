"""Compile every kernel with each release of Triton that goes with a supported torch.

    python .ci/check_triton.py [RELEASE ...]

The suite compiles them with the one release that it is installed with; this gets the others into a
temporary folder and runs the same tests on each, every variant of a kernel included. Exits with 1
if one does not compile.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
RELEASES: Final = ("3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.*", "3.9.*")
"""From that of torch 2.8 on."""

TESTS: Final = "tests/ops/test_kernels_compile.py"


def check(release: str) -> str:
    """What the tests of one release ended with, and its output where they failed."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        subprocess.run([*pip, f"triton=={release}"], check=True)
        environment = {
            **os.environ,
            "MEGATRON_EXT_ALL_TEXT": "1",
            "PYTHONPATH": folder,
            "TRITON_CACHE_DIR": str(Path(folder, "cache")),
            # The tests' process compiles as well; the interpreter of some releases fails.
            "TRITON_INTERPRET": "0",
        }
        command = [sys.executable, "-m", "pytest", TESTS]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.stdout.splitlines()[-1] if done.returncode == 0 else done.stdout + done.stderr


def main() -> None:
    """Check the releases named, or all."""
    outcomes = {}
    for release in sys.argv[1:] or RELEASES:
        outcomes[release] = check(release)
        print(f"triton {release}: {outcomes[release]}", flush=True)
    # A run that skipped its tests has compiled nothing.
    sys.exit(any("failed" in text or "passed" not in text for text in outcomes.values()))


if __name__ == "__main__":
    main()
