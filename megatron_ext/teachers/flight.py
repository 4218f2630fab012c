"""Frames over Arrow Flight.

A student and a server exchange two streams of record batches: the header of a frame as metadata of
the first batch, and the bytes of its tensors, a few megabytes in each batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch

from megatron_ext.extras import needed_packages
from megatron_ext.teachers.frames import Frame, bytes_of, empty, header_of, read_frame

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
