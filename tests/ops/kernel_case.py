"""How a kernel is compared: on a GPU or interpreted, over memory full of NaN, with a fair rule."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import product
from math import lcm
from typing import Any

import pytest
import torch

from megatron_ext.ops.divergence import DivergenceOptions

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

EVERY_COMBINATION = DEVICE.type == "cuda" or bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))
"""Whether to run the whole product of ``combinations``: interpreted kernels are slow."""


def combinations(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Values to run a kernel with, one of each axis: a diagonal, or every combination.

    The diagonal has every value of every axis, and every pair of two axes whose lengths have no
    common divisor.
    """
    if EVERY_COMBINATION:
        return list(product(*axes))
    count = lcm(*map(len, axes))
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(count)]


def sampled(values: Sequence[Any]) -> Sequence[Any]:
    """All values where every combination is run, else the first."""
    return values if EVERY_COMBINATION else values[:1]


def packed(options: Mapping[str, Any], kind: type[Any] = DivergenceOptions) -> dict[str, Any]:
    """The options of a divergence as one ``kind`` of them, by the name ``options``; and others."""
    names = {field.name for field in fields(kind)}
    own = {name: value for name, value in options.items() if name in names}
    others = {name: value for name, value in options.items() if name not in names}
    return {"options": kind(**own), **others}


def rounding(dtype: torch.dtype) -> float:
    """Largest relative error of storing a value: half a unit in the last place.

    Interpreted kernels cut bf16 values off instead of rounding them, so there it is a whole one.
    """
    cut_off = dtype == torch.bfloat16 and DEVICE.type == "cpu"
    return torch.finfo(dtype).eps * (1.0 if cut_off else 0.5)


@pytest.fixture
def nan_filled() -> Iterator[None]:
    """New memory holds NaN, and the largest integer, until something is written to it."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


def assert_as_exact(
    got: torch.Tensor, same_dtype: torch.Tensor, truth: torch.Tensor, *, slack: float
) -> None:
    """``got`` is no further from ``truth`` than torch in the same dtype is, plus a slack.

    Args:
        got: What the kernel made.
        same_dtype: What plain torch makes of the same inputs in their dtype.
        truth: The reference in fp64.
        slack: Share of the truth's largest entry.
    """
    assert got.shape == truth.shape
    assert got.isfinite().all() == truth.isfinite().all()
    error = _worst(got, truth)
    allowed = _worst(same_dtype, truth) + slack * float(truth.abs().max() if truth.numel() else 0)
    assert error <= allowed, f"{error:.3e} from the truth, {allowed:.3e} allowed"


def _worst(values: torch.Tensor, truth: torch.Tensor) -> float:
    return float((values.double() - truth.double()).abs().max()) if truth.numel() else 0.0
