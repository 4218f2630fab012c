"""Numbers that travel as int64: a logit with its column, and two fp32 numbers side by side."""

from __future__ import annotations

from typing import Final

import torch

NO_KEY: Final = torch.iinfo(torch.int64).min
"""Below the key of every logit, -inf included."""

_BITS: Final = 32
_LOW: Final = (1 << _BITS) - 1


def key_columns(keys: torch.Tensor) -> torch.Tensor:
    """int64: the columns that ``sort_keys`` was given."""
    return _LOW - (keys & _LOW)


def key_values(keys: torch.Tensor) -> torch.Tensor:
    """fp32: the values that ``sort_keys`` was given."""
    ordered = (keys >> _BITS).to(torch.int32)
    # As ``sort_keys`` turned the bits of negative numbers around.
    return torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32)


def pack_pair(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """int64 of two fp32 tensors, bit for bit."""
    high, low = (part.contiguous().view(torch.int32).to(torch.int64) for part in (first, second))
    return (high << _BITS) | (low & _LOW)


def unpack_pair(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two fp32 tensors of ``pack_pair``."""
    low = packed & _LOW
    # int64 to int32 by value: the upper half of the range is the negative numbers.
    low = torch.where(low > 0x7FFFFFFF, low - (1 << _BITS), low)
    high = packed >> _BITS
    return high.to(torch.int32).view(torch.float32), low.to(torch.int32).view(torch.float32)
