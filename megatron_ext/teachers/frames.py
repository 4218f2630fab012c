"""Messages between two processes: a line of JSON and tensors, never pickled objects.

A frame is a header of JSON, ``{"kind", "values", "tensors": [[name, dtype, shape], ...]}``, and
the bytes of each tensor as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch

from megatron_ext.errors import DistributedError

_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
    )
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


class Frame(NamedTuple):
    """One thing said."""

    kind: str

    values: Mapping[str, Any]
    """Plain values."""

    tensors: Mapping[str, torch.Tensor]
    """By name, in order; on the CPU."""


def to_bytes(frame: Frame) -> bytes:
    """One run of bytes, for ``from_bytes``."""
    header = header_of(frame)
    parts = [_view(bytes_of(tensor)) for tensor in frame.tensors.values()]
    return b"".join([len(header).to_bytes(8, "little"), header, *parts])


def from_bytes(content: bytes | bytearray) -> Frame:
    """The frame that ``to_bytes`` wrote.

    Raises:
        DistributedError: It did not.
    """
    size, place = int.from_bytes(content[:8], "little"), 8
    header, place = content[place : place + size], place + size

    def fill(view: memoryview) -> None:
        nonlocal place
        part = content[place : place + len(view)]
        if len(part) != len(view):
            raise _no_frame(f"{len(part)} of {len(view)} bytes of a tensor")
        view[:] = part
        place += len(view)

    return read_frame(bytes(header), fill, empty)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [n] the bytes of a tensor; a view where it is contiguous."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def header_of(frame: Frame) -> bytes:
    """The header alone."""
    tensors = [[n, _NAMES[t.dtype], list(t.shape)] for n, t in frame.tensors.items()]
    header = {"kind": frame.kind, "values": dict(frame.values), "tensors": tensors}
    return json.dumps(header, separators=(",", ":")).encode()


def _view(content: torch.Tensor) -> memoryview:
    return memoryview(content.numpy().data)


def read_frame(
    header: bytes, fill: Callable[[memoryview], None], allocate: Callable[[int], torch.Tensor]
) -> Frame:
    """The frame of a header.

    Args:
        fill: Reads the next bytes into memory, one tensor after the other.
        allocate: Makes the memory of a tensor's bytes, uint8.

    Raises:
        DistributedError: It is no header.
    """
    try:
        values = json.loads(header)
        described = [(str(n), _DTYPES[d], [int(x) for x in s]) for n, d, s in values["tensors"]]
        kind, said = str(values["kind"]), dict(values["values"])
    except (ValueError, KeyError, TypeError) as error:
        raise _no_frame(repr(bytes(header[:40]))) from error
    tensors = {}
    for name, dtype, shape in described:
        if min(shape, default=1) < 0:
            raise _no_frame(f"a tensor of shape {shape}")
        content = allocate(math.prod(shape) * dtype.itemsize)
        fill(_view(content))
        tensors[name] = content.view(dtype).view(shape)
    return Frame(kind, said, tensors)


def empty(size: int) -> torch.Tensor:
    """uint8 [size] in main memory."""
    return torch.empty(size, dtype=torch.uint8)


def _no_frame(got: str) -> DistributedError:
    return DistributedError(
        "what arrived from the other side of a teacher's connection is no frame",
        got=got,
        fix="look whether something else listens at that address",
    )
