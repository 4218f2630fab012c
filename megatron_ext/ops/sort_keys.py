"""Keys that sort as a value and its column do: which of equal values come first does not depend on
the layout.

C rows, V columns.
"""

from __future__ import annotations

from typing import Final

import torch

NO_KEY: Final = torch.iinfo(torch.int64).min
"""Key below that of every value, -inf included."""

_BITS: Final = 32
_LOW: Final = (1 << _BITS) - 1


def sort_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Keys int64 that sort as (value, -id): values [..., V] in fp32, ids below 2^32 [..., V]."""
    # 0.0 and -0.0 are equal, but have other bits.
    bits = (values.detach().float() + 0.0).view(torch.int32)
    # The bits of negative numbers grow with their magnitude.
    ordered = bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF)).to(torch.int64)
    return ordered.bitwise_left_shift_(_BITS).bitwise_or_(_LOW - ids)


def key_columns(keys: torch.Tensor) -> torch.Tensor:
    """Columns int64 of keys from ``sort_keys``."""
    return _LOW - (keys & _LOW)


def key_values(keys: torch.Tensor) -> torch.Tensor:
    """Values fp32 of keys from ``sort_keys``."""
    ordered = (keys >> _BITS).to(torch.int32)
    # Undoes the inversion of the bits of negative numbers in ``sort_keys``.
    return torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32)


def pack_pair(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Pack two fp32 tensors into int64, bit for bit."""
    high, low = (part.contiguous().view(torch.int32).to(torch.int64) for part in (first, second))
    return (high << _BITS) | (low & _LOW)


def unpack_pair(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack the two fp32 tensors of ``pack_pair``."""
    low = packed & _LOW
    # int64 to int32 by value: the upper half of the range is the negative numbers.
    low = torch.where(low > 0x7FFFFFFF, low - (1 << _BITS), low)
    high = packed >> _BITS
    return high.to(torch.int32).view(torch.float32), low.to(torch.int32).view(torch.float32)


def largest_columns(
    values: torch.Tensor, count: int, excluded: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest ``count`` values of each row, descending, and their columns int64: [C, count] each.

    Args:
        values: [C, V], not negative.
        count: At most V.
        excluded: bool [V], columns that come last, with the value -1.

    Deterministic, on a GPU as well: fp32 values of fewer than all columns are chosen by a key that
    holds value and column; others by a stable sort.
    """
    if excluded is not None:
        values = values.masked_fill(excluded, -1.0)
    if values.dtype != torch.float32 or count == values.shape[1]:
        ordered, columns = values.sort(dim=-1, descending=True, stable=True)
        return ordered[:, :count], columns[:, :count]
    keys = sort_keys(values, torch.arange(values.shape[1], device=values.device))
    columns = key_columns(keys.topk(count, dim=-1).values)
    return values.gather(-1, columns), columns
