"""What every kernel that the host launches asks of Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import triton

KERNEL_OPTIONS: Final = {"enable_fp_fusion": True}
"""Options of every launch: a product and the sum it goes into are one instruction.

Triton fuses them unasked up to 3.9, which warns of it, and from 3.10 on only where a launch asks;
the streaming kernels are bound by instructions (docs/performance.md).
"""


def kernel(
    *,
    do_not_specialize: Sequence[str] = (),
    do_not_specialize_on_alignment: Sequence[str] = (),
) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function as ``triton.jit`` does, for launches with ``KERNEL_OPTIONS``.

    Device functions are compiled into the kernels that call them and take ``triton.jit`` itself.

    Args:
        do_not_specialize: Names of integers whose values change from launch to launch: the kernel
            is not compiled anew where one is 1 or a multiple of 16.
        do_not_specialize_on_alignment: Names of pointers that are not always multiples of 16 bytes.
    """

    def made(function: Callable[..., Any]) -> Any:
        jitted = triton.jit(
            function,
            do_not_specialize=list(do_not_specialize),
            do_not_specialize_on_alignment=list(do_not_specialize_on_alignment),
        )
        # ``jitted[grid](...)`` calls it, with what the launch says of its own.
        jitted.run = partial(jitted.run, **KERNEL_OPTIONS)
        return jitted

    return made
