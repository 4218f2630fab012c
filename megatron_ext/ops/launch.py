"""Choice between kernels and torch, and launch configurations of kernels. T rows, Vp columns."""

from __future__ import annotations

import importlib.util
import math
import os
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Final, Literal, NamedTuple, get_args

import torch

from megatron_ext.errors import LossError
from megatron_ext.imports import missing_package

Implementation = Literal["auto", "triton", "cpu", "torch"]
"""``auto``: the kernels for fp32, bf16 and fp16 tensors on a GPU where Triton is installed;
compiled loops for fp32 and bf16 tensors on a CPU where numba is installed and rows are wide; else
torch, with a warning where Triton is too old. ``triton``: the kernels, also on a CPU if
``TRITON_INTERPRET=1``. ``cpu``: the compiled loops. ``torch``: neither."""

KERNEL_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def check_implementation(name: str, implementation: str) -> None:
    """Raise LossError where ``implementation`` of the objective ``name`` is unknown."""
    if implementation not in get_args(Implementation):
        raise LossError(
            f"no such implementation of {name}",
            got=repr(implementation),
            expected=f"one of {', '.join(get_args(Implementation))}",
        )


def uses_triton(implementation: Implementation, *logits: torch.Tensor) -> bool:
    """Whether the kernels run on these logits of one device.

    Raises:
        MissingDependencyError: ``triton`` was asked for and is not installed.
        LossError: It was asked for and cannot run on them; or the kernels would, but their
            columns are not next to one another, or their GPU is not the current one.
    """
    if implementation in ("torch", "cpu"):
        return False
    fits = all(tensor.dtype in KERNEL_DTYPES for tensor in logits)
    on_gpu = all(tensor.is_cuda for tensor in logits)
    installed = importlib.util.find_spec("triton") is not None
    if implementation == "auto" and not (fits and on_gpu and installed):
        return False
    if not installed:
        raise missing_package("triton", feature="implementation 'triton'")
    if (too_old := _too_old_triton()) is not None:
        if implementation == "auto":
            warnings.warn(str(too_old), stacklevel=2)
            return False
        raise too_old
    if not fits:
        raise LossError(
            "the Triton kernels do not read these logits",
            got=", ".join(str(tensor.dtype) for tensor in logits),
            expected="float32, bfloat16 or float16",
            fix="take implementation 'torch' or 'auto'",
        )
    if not on_gpu and not interpreted():
        raise LossError(
            "the Triton kernels run on a GPU",
            got=f"logits on {', '.join(str(tensor.device) for tensor in logits)}",
            fix="take implementation 'torch' or 'auto', or set TRITON_INTERPRET=1 to test them",
        )
    _check_memory(logits)
    return True


COMPILED_WIDTH: Final = 1 << 14
"""Columns of a row from which on ``auto`` compiles: importing numba takes half a second."""


def uses_compiled(implementation: Implementation, *logits: torch.Tensor) -> bool:
    """Whether compiled loops run on these logits.

    Raises:
        MissingDependencyError: ``cpu`` was asked for, and ``numba`` is not installed.
        LossError: It was asked for and cannot run on them.
    """
    if implementation not in ("auto", "cpu"):
        return False
    fits = all(
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and (x.shape[-1] <= 1 or x.stride(-1) == 1)
        for x in logits
    )
    installed = importlib.util.find_spec("numba") is not None
    if implementation == "auto":
        is_wide = max(x.shape[-1] for x in logits) >= COMPILED_WIDTH
        return fits and is_wide and installed
    if not installed:
        raise missing_package("numba", feature="implementation 'cpu'")
    if not fits:
        raise LossError(
            "the compiled loops do not read these logits",
            got=", ".join(f"{x.dtype} on {x.device}, strides {x.stride()}" for x in logits),
            expected="float32 or bfloat16 on a CPU, with a last stride of 1",
            fix="take implementation 'torch' or 'auto'",
        )
    return True


def without_kernels(implementation: Implementation) -> Implementation:
    """The same choice where an operation has no kernels for what it is asked."""
    return "torch" if implementation == "triton" else implementation


OLDEST_TRITON: Final = (3, 4)
"""The first release that compiles every kernel; torch 2.8 has it."""


@cache
def _too_old_triton() -> LossError | None:
    """The error to raise where the installed Triton does not compile the kernels."""
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) >= OLDEST_TRITON:
        return None
    return LossError(
        "the installed Triton does not compile the kernels, which are much faster than torch",
        got=f"triton {triton.__version__}",
        expected=f"{'.'.join(map(str, OLDEST_TRITON))} or newer",
        fix="install torch 2.8 or newer, which brings it",
    )


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU, which it decides when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _check_memory(logits: tuple[torch.Tensor, ...]) -> None:
    """Kernels step from column to column by one element, on the device that is current."""
    strided = [x for x in logits if x.ndim and x.shape[-1] > 1 and x.stride(-1) != 1]
    if strided:
        raise LossError(
            "the Triton kernels read columns that are next to one another",
            got=", ".join(f"{tuple(x.shape)} with strides {x.stride()}" for x in strided),
            expected="a last stride of 1",
            fix="pass logits.contiguous()",
        )
    devices = {x.device for x in logits if x.is_cuda}
    if devices and devices != {torch.device("cuda", torch.cuda.current_device())}:
        raise LossError(
            "the Triton kernels run on the current device",
            got=f"logits on {', '.join(sorted(map(str, devices)))}",
            expected=f"cuda:{torch.cuda.current_device()}",
            fix="torch.cuda.set_device(logits.device) before the loss",
        )


class LaunchConfig(NamedTuple):
    """Columns that a program reads at once, and its number of warps."""

    block: int
    """Columns, a power of two."""

    num_warps: int


ROW_CONFIGS: Final = (
    LaunchConfig(4096, 8),
    LaunchConfig(4096, 16),
    LaunchConfig(8192, 8),
    LaunchConfig(8192, 16),
    LaunchConfig(16384, 16),
    LaunchConfig(16384, 32),
)
"""Candidates for kernels that stream rows of a vocabulary."""

LANE_CONFIGS: Final = (LaunchConfig(2048, 8), LaunchConfig(1024, 4), LaunchConfig(4096, 16))
"""Candidates for kernels with more to do for a column: a thread has 8 of each row, which leaves
room for half of a multiprocessor's warps, and two rows in fp32 take less shared memory than the
99 KiB of smaller GPUs."""

HALF_FULL: Final = {"maxnreg": 64} if torch.version.hip is None else {}
"""Compile option of kernels that wait for memory: so few registers a thread that half of the warps
that a multiprocessor holds run at once. Only NVIDIA's compiler has it."""

_COLUMNS_A_WARP: Final = 256
"""Columns that the threads of a warp load at once, 16 bytes each."""

_CHOSEN: dict[Hashable, LaunchConfig] = {}


def chosen_config(
    key: Hashable,
    candidates: Sequence[LaunchConfig],
    run: Callable[[LaunchConfig], object],
) -> LaunchConfig:
    """The fastest candidate for ``key``: kernel, dtypes, widths and flags, never a number of rows.

    Each is timed once a process, by ``run`` with tensors of its own or with outputs that may be
    written many times; one that asks for more than this GPU has is left out. The interpreter takes
    the first; so does a run that asks torch for deterministic algorithms, since another block size
    adds in another order, and one with ``MEGATRON_EXT_AUTOTUNE=0`` in its environment.

    Raises:
        LossError: No candidate fits this GPU.
    """
    is_off = os.environ.get("MEGATRON_EXT_AUTOTUNE") == "0"
    if is_off or interpreted() or torch.are_deterministic_algorithms_enabled():
        return candidates[0]
    if key not in _CHOSEN:
        times = [_milliseconds(run, config) for config in candidates]
        if min(times) == math.inf:
            raise LossError(
                "no launch configuration of a kernel fits this GPU",
                got=f"{key} in {', '.join(f'{c.block} x {c.num_warps} warps' for c in candidates)}",
                expected="99 KiB of shared memory a block, as GPUs of sm_80 and later have",
                fix="take implementation 'torch'",
            )
        _CHOSEN[key] = candidates[times.index(min(times))]
    return _CHOSEN[key]


def _milliseconds(run: Callable[[LaunchConfig], object], config: LaunchConfig) -> float:
    """Time of a launch, infinity where it needs more than the GPU has."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    try:
        return float(do_bench(lambda: run(config), warmup=5, rep=20))
    except OutOfResources:
        return math.inf


def small_block(width: int, block: int) -> int:
    """``block``, or the power of two that holds ``width`` where that is smaller; at least 16."""
    return max(16, min(block, power_of_two(width)))


def power_of_two(count: int) -> int:
    """The least power of two that holds ``count``, at least 16."""
    return max(16, 1 << max(count - 1, 0).bit_length())


def fitting_config(config: LaunchConfig, width: int) -> LaunchConfig:
    """``config`` for rows of ``width`` columns, the widest that the kernel reads.

    A narrow row gets so few warps that no two of them hold the same element: where a kernel
    overwrites its input, one warp could store what the other has yet to load.
    """
    block = small_block(width, config.block)
    return LaunchConfig(block, max(1, min(config.num_warps, block // _COLUMNS_A_WARP)))


_TIMED_ROWS: Final = 512


def launch_rows(
    key: Hashable,
    launch: Callable[[LaunchConfig, torch.Tensor], None],
    output: torch.Tensor,
    candidates: Sequence[LaunchConfig] = ROW_CONFIGS,
) -> None:
    """Run ``launch(config, output)`` with the fastest configuration, timed on a scratch output.

    Args:
        key: Key of the choice, besides the width.
        launch: Runs a program for each row of the given output.
        output: [T, Vp] that the kernel writes; it may also be its input.
    """
    rows, width = output.shape
    if not rows or not width:
        return

    def time(config: LaunchConfig) -> None:
        launch(fitting_config(config, width), torch.empty_like(output[:_TIMED_ROWS]))

    launch(fitting_config(chosen_config((key, width), candidates, time), width), output)
