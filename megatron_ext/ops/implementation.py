"""Which code runs an operation: the Triton kernels or the torch that they are compared with."""

from __future__ import annotations

import importlib.util
import os
from typing import Final, Literal, get_args

import torch

from megatron_ext.errors import LossError
from megatron_ext.extras import missing_package

Implementation = Literal["auto", "triton", "torch"]
"""``auto``: the kernels for fp32, bf16 and fp16 tensors on a GPU where Triton is installed, else
torch. ``triton``: the kernels, also on a CPU if ``TRITON_INTERPRET=1``. ``torch``: never."""

KERNEL_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def check_implementation(name: str, implementation: str) -> None:
    """Raise LossError where ``implementation`` of the objective ``name`` is none."""
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
    fits = all(tensor.dtype in KERNEL_DTYPES for tensor in logits)
    on_gpu = all(tensor.is_cuda for tensor in logits)
    installed = importlib.util.find_spec("triton") is not None
    if implementation == "torch":
        return False
    if implementation == "auto":
        if not (fits and on_gpu and installed):
            return False
        _check_memory(logits)
        return True
    if not installed:
        raise missing_package("triton", feature="implementation 'triton'")
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


def interpreted() -> bool:
    """Whether Triton runs kernels in Python on the CPU, which it decides as it is imported."""
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
