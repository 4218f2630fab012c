"""Compile a kernel for a GPU that need not be there: ``python compile_kernel.py JSON``.

A process of its own, since Triton decides as it is imported whether it interprets.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HOPPER = ("cuda", 90, 32)


def compiles(module: str, variants: list[tuple[str, dict[str, str], dict[str, Any]]]) -> None:
    """Assert that kernels of a module compile to machine code.

    Args:
        module: As in ``megatron_ext.ops.<module>.triton_kernels``.
        variants: Name of the kernel, types of its arguments as Triton spells them, and values of
            those that are ``constexpr``.
    """
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = subprocess.run(
        [sys.executable, __file__, json.dumps([module, variants])],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if "CANNOT" in finished.stdout:
        pytest.skip(finished.stdout.strip())
    assert finished.returncode == 0, finished.stderr[-3000:]


def _main() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, variants = json.loads(sys.argv[1])
    if not list(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas*")):
        print("CANNOT: this build of triton has no assembler for NVIDIA GPUs")
        return
    kernels = importlib.import_module(f"megatron_ext.ops.{module}.triton_kernels")
    for name, types, constants in variants:
        kernel = getattr(kernels, name)
        signature = dict.fromkeys(kernel.arg_names, "constexpr") | types
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        assert triton.compile(source, target=GPUTarget(*HOPPER)).asm["cubin"]


if __name__ == "__main__":
    _main()
