"""Frames over Arrow Flight.

A student and a server exchange two streams of record batches: the header of a frame as metadata of
the first batch, and the bytes of its tensors, a few megabytes in each batch.

Messages between two processes: a line of JSON and tensors, never pickled objects.

A frame is a header of JSON, ``{"kind", "values", "tensors": [[name, dtype, shape], ...]}``, and
the bytes of each tensor as they are.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from megatron_ext.errors import DistributedError
from megatron_ext.extras import needed_packages

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


# gRPC writes every stranger's failed handshake to standard error; what concerns a run is raised.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

with needed_packages("a remote teacher"):
    import pyarrow as pa
    import pyarrow.flight as fl

__all__ = ["CLIENT_OPTIONS", "SCHEMA", "fl", "receive", "to_chunks"]

SCHEMA: Final = pa.schema([("bytes", pa.uint8())])

CLIENT_OPTIONS: Final = [
    # The address is meant as it is given.
    ("grpc.enable_http_proxy", 0),
    # A client has a connection of its own, which ends with it.
    ("grpc.use_local_subchannel_pool", 1),
]

_CHUNK_BYTES: Final = 4 << 20
"""One batch is sent while the next is copied; larger ones are slower."""


def to_chunks(frame: Frame) -> Iterator[tuple[Any, bytes]]:
    """Record batches with their metadata, which share the memory of the frame's tensors."""
    metadata = header_of(frame)
    for tensor in frame.tensors.values():
        content = bytes_of(tensor).numpy()
        for start in range(0, len(content), _CHUNK_BYTES):
            yield _batch(content[start : start + _CHUNK_BYTES]), metadata
            metadata = b""
    if metadata:
        yield _batch(np.empty(0, np.uint8)), metadata


def receive(
    reader: Any,
    *,
    heard: Callable[[int], None] = lambda _: None,
    allocate: Callable[[int], torch.Tensor] = empty,
) -> Frame:
    """The next frame of a stream; waits for it.

    Args:
        reader: A ``FlightStreamReader``, or what a server has in its place.
        heard: Is told how many bytes have arrived, whenever some have.
        allocate: Makes the memory of a tensor's bytes, uint8.

    Raises:
        FlightError: The stream is broken.
        StopIteration: It has ended.
        DistributedError: What arrived is no frame.
    """
    chunk = reader.read_chunk()
    content = _content(chunk)
    header = chunk.app_metadata.to_pybytes()
    heard(len(header) + len(content))

    def fill(view: memoryview) -> None:
        nonlocal content
        room, place = np.frombuffer(view, np.uint8), 0
        while place < len(room):
            if not len(content):
                content = _content(reader.read_chunk())
                heard(len(content))
            part, content = content[: len(room) - place], content[len(room) - place :]
            room[place : place + len(part)] = part
            place += len(part)

    return read_frame(header, fill, allocate)


def _content(chunk: Any) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = chunk.data.column(0).to_numpy()
    return values


def _batch(content: np.ndarray[Any, Any]) -> Any:
    values = pa.Array.from_buffers(pa.uint8(), len(content), [None, pa.py_buffer(content)])
    return pa.RecordBatch.from_arrays([values], schema=SCHEMA)
