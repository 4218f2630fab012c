"""Weights in MXFP4, as gpt-oss is published: groups of 32 numbers of four bits and one exponent.

A number is a sign, two bits of exponent and one of mantissa (E2M1); two numbers are in a byte, the
first in its lower half. The exponent of a group is a byte that 127 is subtracted from (E8M0). From
"OCP Microscaling Formats (MX) Specification", version 1.0.
"""

from __future__ import annotations

from typing import Final

import torch

GROUP: Final = 32
"""Numbers of a group."""

_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS: Final = 127


def decoded(packed: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Numbers in bf16, which has all of them: none is rounded.

    Args:
        packed: [rows, groups, 16] uint8
        exponents: [rows, groups] uint8

    Returns:
        [rows, groups x 32] bf16
    """
    values = torch.tensor(_MAGNITUDES + tuple(-value for value in _MAGNITUDES))
    # Two numbers of each byte, the lower half first.
    halves = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    scale = exponents.to(torch.int32).unsqueeze(-1) - _BIAS
    return torch.ldexp(values[halves.long()], scale).flatten(-2).to(torch.bfloat16)
