"""What two processes say to one another: a line of JSON and tensors, never pickled objects.

A frame is one message of JSON, ``{"kind", "values", "tensors": [[name, dtype, shape], ...]}``, and
behind it the bytes of each tensor as they are. These are read into the tensor's memory: a message
of ``multiprocessing.connection`` would be copied twice more.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import torch

from megatron_ext.errors import DistributedError

_MOST_HEADER_BYTES: Final = 1 << 24

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


def send_frame(connection: Connection, frame: Frame) -> None:
    """Send all of it.

    Raises:
        OSError: The other side is gone.
    """
    connection.send_bytes(_header(frame))
    descriptor = connection.fileno()
    for tensor in frame.tensors.values():
        left = _view(bytes_of(tensor))
        while left:
            left = left[os.write(descriptor, left) :]


def receive_frame(
    connection: Connection,
    *,
    heard: Callable[[int], None] = lambda _: None,
    allocate: Callable[[int], torch.Tensor] | None = None,
) -> Frame:
    """The next frame; waits for it.

    Args:
        heard: Is told how many bytes have arrived, whenever some have.
        allocate: Makes the memory of a tensor's bytes, uint8.

    Raises:
        EOFError: The other side closed the connection.
        OSError: It is gone, or does not answer within the time-out of the socket.
        DistributedError: What arrived is no frame.
    """

    def fill(view: memoryview) -> None:
        descriptor = connection.fileno()
        while view:
            count = os.readv(descriptor, [view])
            if not count:
                raise EOFError
            heard(count)
            view = view[count:]

    header = connection.recv_bytes(_MOST_HEADER_BYTES)
    heard(len(header))
    return _read(header, fill, allocate or _empty)


def to_bytes(frame: Frame) -> bytes:
    """One run of bytes, for ``from_bytes``."""
    header = _header(frame)
    parts = [_view(bytes_of(tensor)) for tensor in frame.tensors.values()]
    return b"".join([len(header).to_bytes(8, "little"), header, *parts])


def from_bytes(content: bytes | bytearray) -> Frame:
    """The frame that ``to_bytes`` wrote."""
    size, place = int.from_bytes(content[:8], "little"), 8
    header, place = content[place : place + size], place + size

    def fill(view: memoryview) -> None:
        nonlocal place
        view[:] = content[place : place + len(view)]
        place += len(view)

    return _read(bytes(header), fill, _empty)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [n] the bytes of a tensor; a view where it is contiguous."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _header(frame: Frame) -> bytes:
    tensors = [[n, _NAMES[t.dtype], list(t.shape)] for n, t in frame.tensors.items()]
    header = {"kind": frame.kind, "values": dict(frame.values), "tensors": tensors}
    return json.dumps(header, separators=(",", ":")).encode()


def _view(content: torch.Tensor) -> memoryview:
    return memoryview(content.numpy().data)


def _read(
    header: bytes, fill: Callable[[memoryview], None], allocate: Callable[[int], torch.Tensor]
) -> Frame:
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


def _empty(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _no_frame(got: str) -> DistributedError:
    return DistributedError(
        "what arrived from the other side of a teacher's connection is no frame",
        got=got,
        fix="look whether something else listens at that address",
    )
