"""Frames, the messages between a student and a teacher's server, sent over Arrow Flight.

A frame is a header of JSON, ``{"kind", "values", "tensors": [[name, dtype, shape], ...]}``, and the
raw bytes of each tensor; nothing is pickled. Each direction is a stream of record batches: the
header is the metadata of a frame's first batch, and the tensors' bytes follow, a few megabytes in
each batch.
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
from megatron_ext.imports import needed_packages

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
_MOST_DIMENSIONS: Final = 8


class FrameLimits(NamedTuple):
    """Largest frame that is read."""

    header_bytes: int
    tensor_bytes: int
    """Of all tensors together."""
    tensors: int


class Frame(NamedTuple):
    """One message."""

    kind: str

    values: Mapping[str, Any]
    """Plain values."""

    tensors: Mapping[str, torch.Tensor]
    """Tensors by name, in order; on the CPU."""


def to_bytes(frame: Frame) -> bytes:
    """The frame as bytes, for ``from_bytes``."""
    header = header_of(frame)
    parts = [_view(bytes_of(tensor)) for tensor in frame.tensors.values()]
    return b"".join([len(header).to_bytes(8, "little"), header, *parts])


def from_bytes(content: bytes | bytearray) -> Frame:
    """The inverse of ``to_bytes``.

    Raises:
        DistributedError: ``content`` is no frame.
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
    """uint8 [n] bytes of a tensor; a view if it is contiguous."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def header_of(frame: Frame) -> bytes:
    """The header of a frame as JSON."""
    tensors = [[n, _NAMES[t.dtype], list(t.shape)] for n, t in frame.tensors.items()]
    header = {"kind": frame.kind, "values": dict(frame.values), "tensors": tensors}
    return json.dumps(header, separators=(",", ":")).encode()


def _view(content: torch.Tensor) -> memoryview:
    return memoryview(content.numpy().data)


def read_frame(
    header: bytes,
    fill: Callable[[memoryview], None],
    allocate: Callable[[int], torch.Tensor],
    limits: FrameLimits | None = None,
) -> Frame:
    """Read the tensors of a frame with a given header.

    Args:
        fill: Reads the next bytes into memory, one tensor after the other.
        allocate: Allocates uint8 memory for a tensor's bytes.
        limits: Checked before anything is allocated; None where the other side is trusted.

    Raises:
        DistributedError: The header is malformed, or describes more than ``limits``.
    """
    if limits is not None and len(header) > limits.header_bytes:
        raise _too_large("bytes of a header", len(header), limits.header_bytes)
    try:
        values = json.loads(header)
        described = [(str(n), _DTYPES[d], [int(x) for x in s]) for n, d, s in values["tensors"]]
        kind, plain = str(values["kind"]), dict(values["values"])
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise _no_frame(repr(bytes(header[:40]))) from error
    for _, _, shape in described:
        # torch has no sizes of 2^63, nor shapes without elements of such ones.
        is_long = len(shape) > _MOST_DIMENSIONS
        if is_long or min(shape, default=1) < 0 or math.prod(max(n, 1) for n in shape) >> 48:
            raise _no_frame(f"a tensor of shape {str(shape)[:80]}")
    if limits is not None:
        size = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in described)
        if size > limits.tensor_bytes:
            raise _too_large("bytes of tensors", size, limits.tensor_bytes)
        if len(described) > limits.tensors:
            raise _too_large("tensors", len(described), limits.tensors)
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype, shape in described:
        content = allocate(math.prod(shape) * dtype.itemsize)
        fill(_view(content))
        tensors[name] = content.view(dtype).view(shape)
    return Frame(kind, plain, tensors)


def _too_large(what: str, got: int, most: int) -> DistributedError:
    return DistributedError(
        f"a frame of a teacher's connection has too many {what}",
        got=got,
        expected=f"{most} at most",
    )


def empty(size: int) -> torch.Tensor:
    """uint8 [size] uninitialised main memory."""
    return torch.empty(size, dtype=torch.uint8)


def _no_frame(got: str) -> DistributedError:
    return DistributedError(
        "what arrived from the other side of a teacher's connection is not a frame",
        got=got,
        fix="look whether something else listens at that address",
    )


# gRPC logs every failed handshake to standard error; errors that concern a run are raised.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

with needed_packages("a remote teacher"):
    import pyarrow as pa
    import pyarrow.flight

fl: Final = pyarrow.flight

SCHEMA: Final = pa.schema([("bytes", pa.uint8())])

CLIENT_OPTIONS: Final = [
    # Connect to the address directly, not through a proxy.
    ("grpc.enable_http_proxy", 0),
    # One connection a client, closed with it.
    ("grpc.use_local_subchannel_pool", 1),
]

_CHUNK_BYTES: Final = 4 << 20
"""Bytes of a batch: one is sent while the next is copied; larger ones are slower."""


def to_chunks(frame: Frame) -> Iterator[tuple[Any, bytes]]:
    """Record batches with metadata; they share the memory of the frame's tensors."""
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
    on_bytes: Callable[[int], None] = lambda _: None,
    allocate: Callable[[int], torch.Tensor] = empty,
    limits: FrameLimits | None = None,
) -> Frame:
    """Wait for the next frame of a stream.

    Args:
        reader: A ``FlightStreamReader``, or a server's ``MetadataRecordBatchReader``.
        on_bytes: Called with the number of bytes received, whenever some have arrived.
        allocate: Allocates uint8 memory for a tensor's bytes.
        limits: See ``read_frame``.

    Raises:
        FlightError: The stream is broken.
        StopIteration: The stream has ended.
        DistributedError: The received bytes are no frame.
    """
    chunk = reader.read_chunk()
    content = _content(chunk)
    if chunk.app_metadata is None:
        raise _no_frame("a batch without a header")
    header = chunk.app_metadata.to_pybytes()
    on_bytes(len(header) + len(content))

    def fill(view: memoryview) -> None:
        nonlocal content
        room, place = np.frombuffer(view, np.uint8), 0
        while place < len(room):
            if not len(content):
                content = _content(reader.read_chunk())
                on_bytes(len(content))
            part, content = content[: len(room) - place], content[len(room) - place :]
            room[place : place + len(part)] = part
            place += len(part)

    return read_frame(header, fill, allocate, limits)


def _content(chunk: Any) -> np.ndarray[Any, Any]:
    if chunk.data is None or chunk.data.schema != SCHEMA or chunk.data.column(0).null_count:
        raise _no_frame("a batch that is not of bytes")
    values: np.ndarray[Any, Any] = chunk.data.column(0).to_numpy()
    return values


def _batch(content: np.ndarray[Any, Any]) -> Any:
    values = pa.Array.from_buffers(pa.uint8(), len(content), [None, pa.py_buffer(content)])
    return pa.RecordBatch.from_arrays([values], schema=SCHEMA)
