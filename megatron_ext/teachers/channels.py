"""Channels for a remote teacher's targets: shared GPU memory, shared memory, or the connection.

The best channel that a student and a server have in common is found by a trial with a few bytes.
Segments of shared memory are described once and reused, so that later answers open nothing.

Main memory is shared by an anonymous ``memfd``, between processes of one user on one machine, which
the other process opens through its owner's descriptor. The kernel frees it with the last descriptor
and mapping, so nothing stays behind however a process ends, and the size of ``/dev/shm``, small in
containers, does not matter. GPU memory is shared by the handles of torch's multiprocessing.

Sources: memfd_create(2), proc(5) on ``/proc/pid/fd``; torch/multiprocessing/reductions.py; CUDA's
documentation of cudaIpcGetMemHandle.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megatron_ext.teachers.target_form import TargetForm


@dataclass(frozen=True, slots=True)
class Segment:
    """Shared memory as its owner sees it; lives as long as any process's tensor over it."""

    memory: torch.Tensor
    """uint8 [n]"""

    description: Mapping[str, Any]
    """Plain values with which another process opens it."""


def use_device(device: torch.device) -> None:
    """Select a CUDA device for the calling thread, which would otherwise initialise the first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class Channel(Protocol):
    """One kind of shared memory."""

    def create(self, size: int, device: torch.device) -> Segment:
        """Create a segment owned by this process.

        Raises:
            OSError: Main memory is exhausted.
            RuntimeError: Memory of the device is exhausted.
        """

    def open(self, description: Mapping[str, Any], device: torch.device) -> torch.Tensor:
        """uint8 [n] memory of another process's segment.

        Raises:
            OSError: This process cannot open it.
            RuntimeError: The device cannot open it.
            KeyError, ValueError: The description is of another kind.
        """


_MOST_SEGMENTS: Final = 2
"""Most segments of a ring: one is filled while the other is read."""

_GRAIN: Final = 1 << 20


class LentSegment(NamedTuple):
    """A segment to fill."""

    number: int
    segment: Segment


class SegmentRing:
    """The server's segments; the student returns each once it has read it, within ``timeout_s``."""

    def __init__(self, channel: Channel, device: torch.device, *, timeout_s: float) -> None:
        self._channel = channel
        self._device = device
        self._timeout_s = timeout_s
        self._segments: dict[int, Segment] = {}
        self._free: set[int] = set()
        self._next = 0
        self._is_closed = False
        self._changed = threading.Condition()

    @property
    def numbers(self) -> list[int]:
        """Numbers of the existing segments; the student closes all others."""
        return list(self._segments)

    @property
    def has_room(self) -> bool:
        """Whether ``take`` returns without waiting."""
        with self._changed:
            return self._has_room()

    def take(self, size: int) -> LentSegment:
        """A free segment of at least ``size`` bytes; waits for one.

        Raises:
            OSError: The student is gone or kept all segments too long, or memory is exhausted.
        """
        with self._changed:
            if not self._changed.wait_for(self._has_room, self._timeout_s) or self._is_closed:
                raise OSError("a student does not give memory back")
            for number in sorted(self._free):
                if self._segments[number].memory.numel() >= size:
                    self._free.remove(number)
                    return LentSegment(number, self._segments[number])
            if len(self._segments) == _MOST_SEGMENTS:
                # All free segments are too small: drop one for a larger one.
                del self._segments[self._free.pop()]
            return self._created(size)

    def give_back(self, number: int) -> None:
        """Take back a segment that the student has read."""
        with self._changed:
            if number in self._segments:
                self._free.add(number)
                self._changed.notify_all()

    def close(self) -> None:
        """Release all memory and wake waiting threads: the student is gone."""
        with self._changed:
            self._is_closed = True
            self._segments.clear()
            self._free.clear()
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return bool(self._is_closed or self._free or len(self._segments) < _MOST_SEGMENTS)

    def _created(self, size: int) -> LentSegment:
        # Some headroom for the longer rows that may come next.
        room = -(-(size + size // 4) // _GRAIN) * _GRAIN
        number, self._next = self._next, self._next + 1
        self._segments[number] = self._channel.create(room, self._device)
        return LentSegment(number, self._segments[number])


class OpenSegments:
    """The student's open segments, each for as long as the server uses it."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self._channel = channel
        self._device = device
        self._open: dict[int, torch.Tensor] = {}

    def close(self) -> None:
        """Release all memory."""
        self._open = {}

    def memory(self, number: int, values: Mapping[str, Any]) -> torch.Tensor:
        """uint8 [n] memory of a segment.

        Args:
            values: The segment's ``description``, and the ``numbers`` of all existing segments.

        Raises:
            OSError, RuntimeError, KeyError, ValueError: See ``Channel.open``.
        """
        self._open = {n: memory for n, memory in self._open.items() if n in values["numbers"]}
        if number not in self._open:
            self._open[number] = self._channel.open(values["description"], self._device)
        return self._open[number]


class SharedMemoryChannel:
    """Main memory shared on Linux; on other systems ``create`` raises an ``OSError``."""

    def create(self, size: int, device: torch.device) -> Segment:
        """See ``Channel``; pages are allocated now, not when they are written."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory without a name")
        descriptor = os.memfd_create("megatron-ext-teacher")
        try:
            os.posix_fallocate(descriptor, 0, size)
            memory = _mapped(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        # Kept open so that the student can open it as long as it is in use.
        weakref.finalize(memory, os.close, descriptor)
        description = {"process": os.getpid(), "descriptor": descriptor, "size": size}
        return Segment(memory, description)

    def open(self, description: Mapping[str, Any], device: torch.device) -> torch.Tensor:
        """See ``Channel``."""
        process, number = int(description["process"]), int(description["descriptor"])
        size = int(description["size"])
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
        try:
            if os.fstat(descriptor).st_size != size:
                raise ValueError("a segment of another size")
            return _mapped(descriptor, size)
        finally:
            os.close(descriptor)


def _mapped(descriptor: int, size: int) -> torch.Tensor:
    # The tensor owns the mapping.
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


class CudaIpcChannel:
    """GPU memory shared by CUDA IPC; needs CUDA on both sides."""

    def create(self, size: int, device: torch.device) -> Segment:
        """See ``Channel``."""
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        _, arguments = reduce_tensor(memory)
        handle, storage_bytes, storage_offset = arguments[7:10]
        counter, counter_offset, event, needs_event = arguments[11:15]
        description = {
            "device": _identity(device),
            "size": size,
            "handle": handle.hex(),
            "storage_bytes": storage_bytes,
            "storage_offset": storage_offset,
            "counter": counter.hex(),
            "counter_offset": counter_offset,
            "event": event.hex(),
            "needs_event": needs_event,
        }
        return Segment(memory, description)

    def open(self, description: Mapping[str, Any], device: torch.device) -> torch.Tensor:
        """See ``Channel``; the memory is on the owner's device, which may be another one."""
        # Processes may number GPUs differently.
        visible = range(torch.cuda.device_count())
        owners = [index for index in visible if _identity(index) == description["device"]]
        if not owners:
            raise OSError("this process does not see the device")
        memory: torch.Tensor = rebuild_cuda_tensor(
            torch.Tensor,
            (int(description["size"]),),
            (1,),
            0,
            torch.storage.TypedStorage,
            torch.uint8,
            owners[0],
            bytes.fromhex(description["handle"]),
            int(description["storage_bytes"]),
            int(description["storage_offset"]),
            False,
            bytes.fromhex(description["counter"]),
            int(description["counter_offset"]),
            bytes.fromhex(description["event"]),
            bool(description["needs_event"]),
        )
        return memory


def _identity(device: torch.device | int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


FLIGHT: Final = "flight"
"""Name of the fallback: targets go through the Arrow Flight connection."""

CHANNELS: Final[Mapping[str, Channel]] = {
    "cuda_ipc": CudaIpcChannel(),
    "shared_memory": SharedMemoryChannel(),
}
"""Channels by name, the best first."""

_PROBE_BYTES: Final = 64


class ChannelOffers:
    """The server's trial segments, one a channel with random bytes, until a student has chosen."""

    def __init__(self, form: TargetForm, device: torch.device) -> None:
        self._probes: dict[str, Segment] = {}
        self.values: dict[str, Any] = {}
        for name, channel in CHANNELS.items():
            # Forms other than hidden states are records, which are made in main memory.
            if name == "cuda_ipc" and (device.type != "cuda" or form.kind != "hidden"):
                continue
            try:
                probe = channel.create(_PROBE_BYTES, device)
            except (OSError, RuntimeError):
                continue
            content = os.urandom(_PROBE_BYTES)
            probe.memory.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self._probes[name] = probe
            self.values[name] = {"segment": dict(probe.description), "content": content.hex()}


def choose(offers: Mapping[str, Any], device: torch.device) -> str:
    """The best channel that works from this process; ``FLIGHT`` if none does.

    Args:
        offers: ``ChannelOffers.values``.
    """
    for name, channel in CHANNELS.items():
        if name not in offers or (name == "cuda_ipc" and device.type != "cuda"):
            continue
        try:
            memory = channel.open(offers[name]["segment"], device)
            if memory.cpu().numpy().tobytes().hex() == offers[name]["content"]:
                return name
        except (OSError, RuntimeError, KeyError, ValueError, TypeError):
            continue
    return FLIGHT
