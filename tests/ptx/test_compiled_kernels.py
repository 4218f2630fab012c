"""Kernels as they are compiled for a GPU, run by the machine.

``MEGATRON_EXT_PTX=90 pytest tests/ops`` runs all of them so, as ``make rehearse-gpu`` does.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

FEW = (
    "test_softmax_statistics.py::test_extreme_rows[triton]",
    "test_vocab_kl_kernels.py::test_equal_logits_have_no_loss_and_no_gradient[forward-triton]",
    "test_selected_tokens.py::test_the_top_columns_are_those_of_torch[triton-dtype1-64-1]",
)
"""With pipelined loads, sums of warps, and words of bits that are set atomically."""


def test_compiled_kernels_give_what_torch_does():
    """A process of its own, since Triton decides as it is imported whether it interprets."""
    if not list(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas*")):
        pytest.skip("this build of triton has no assembler for NVIDIA GPUs")
    root = Path(__file__).parents[2]
    tests = [str(root / "tests" / "ops" / name) for name in FEW]
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *tests],
        cwd=root,
        env={**os.environ, "MEGATRON_EXT_PTX": "80"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-1000:]
