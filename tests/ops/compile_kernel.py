"""Compile kernels for a GPU that need not be there: ``python compile_kernel.py``.

It reads a module and its variants from a line of JSON, and answers with a line: the error, or
nothing; or a module and sizes, and answers with the number of variants that they make. A process
of its own, since Triton decides as it is imported whether it interprets.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path

import pytest

HOPPER = ("cuda", 90, 32)


def arguments(text):
    """Types of arguments by name: ``width rows: i32; logits: *bf16``, with ``_ptr`` of pointers."""
    parts = (part.partition(":") for part in text.split(";"))
    return {
        name + "_ptr" * ("*" in kind): kind.strip()
        for names, _, kind in parts
        for name in names.split()
    }


def compiles(module, variants, *, containing=""):
    """Assert that kernels of a module compile to machine code.

    Each in the first of its variants, and by narrow blocks, which are compiled in less time; in all
    of them, as they are, with ``MEGATRON_EXT_ALL_TEXT``.

    Args:
        module: As in ``megatron_ext.ops.<module>``.
        variants: What to compile; a kernel may be there several times.
        containing: Regular expression of what their PTX must contain.
    """
    pytest.importorskip("triton")
    if not os.environ.get("MEGATRON_EXT_ALL_TEXT"):
        first = {variant[0]: variant for variant in reversed(variants)}
        variants = [_narrow(*variant) for variant in first.values()]
    compiler = _compiler()
    print(json.dumps([module, variants, containing]), file=compiler.stdin, flush=True)
    answer = compiler.stdout.readline()
    assert answer, f"the compiler died, exit status {compiler.wait()}"
    error = json.loads(answer)
    if error.startswith("CANNOT"):
        pytest.skip(error)
    assert not error, error[-3000:]


def _narrow(name, types, constants):
    block = {"BLOCK": min(constants["BLOCK"], 1024)} if "BLOCK" in constants else {}
    return name, types, constants | block


def compiled_variants(module, sizes):
    """By kernel of a module, how many variants calls with these counts and offsets compile."""
    pytest.importorskip("triton")
    compiler = _compiler()
    print(json.dumps([module, sizes]), file=compiler.stdin, flush=True)
    found = json.loads(compiler.stdout.readline())
    assert isinstance(found, dict), found
    return found


@cache
def _compiler():
    """One for all kernels: to import torch takes longer than to compile. Ends with its input."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _main():
    import triton

    # Whatever else is printed must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        error = ""
        request = json.loads(line)
        if len(request) == 2:
            print(json.dumps(_variants(*request)), file=answers, flush=True)
            continue
        if not list(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas*")):
            error = "CANNOT: this build of triton has no assembler for NVIDIA GPUs"
        else:
            try:
                _compile(*request)
            except Exception:
                error = traceback.format_exc()
        print(json.dumps(error), file=answers, flush=True)


COUNTS = ("rows", "chunks", "first_chunk", "count")
"""Arguments that are another number in each microbatch."""


def _variants(module, sizes):
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    backend, pointer = make_backend(GPUTarget(*HOPPER)), torch.empty(16)
    found = {}
    for name, kernel in vars(importlib.import_module(f"megatron_ext.ops.{module}")).items():
        is_launched = isinstance(kernel, JITFunction) and name.endswith("_kernel")
        if not is_launched or not {*COUNTS} & {*kernel.arg_names}:
            continue
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        keys = set()
        for size in sizes:
            given = {each: pointer if each.endswith("_ptr") else 48 for each in kernel.arg_names}
            given |= {each: size for each in COUNTS if each in given}
            keys.add(str(bind(**given)[1]))
        found[name] = len(keys)
    return found


def _compile(module, variants, containing):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_ext.ops.kernel import KERNEL_OPTIONS

    kernels = importlib.import_module(f"megatron_ext.ops.{module}")
    for name, types, constants in variants:
        kernel = getattr(kernels, name)
        plain = {argument: kind.removesuffix(":16") for argument, kind in types.items()}
        signature = dict.fromkeys(kernel.arg_names, "constexpr") | plain
        multiples = {
            (place,): [["tt.divisibility", 16]]
            for place, argument in enumerate(kernel.arg_names)
            if types.get(argument, "").endswith(":16")
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=multiples)
        compiled = triton.compile(source, target=GPUTarget(*HOPPER), options=KERNEL_OPTIONS)
        assert compiled.asm["cubin"]
        assert re.search(containing, compiled.asm["ptx"]), f"no {containing} in {name}"


if __name__ == "__main__":
    _main()
