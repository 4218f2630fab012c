"""Channels for targets: a GPU's memory, main memory, or the connection.

Which one a student and a server have in common is tried with a few bytes, not guessed. Between two
processes that see one GPU the handles are those that torch's own multiprocessing passes on, as
plain values. A segment is described once and used for many answers, so opening it costs nothing
later.

Source: torch/multiprocessing/reductions.py; CUDA's documentation of cudaIpcGetMemHandle.

Memory that two processes share: segments, and how they go to and fro between server and student.

Segments of main memory have no name, between processes of one user on one machine. The kernel frees
such memory with the last descriptor and mapping of it. So nothing stays behind, however either
process ends; nor does the size of ``/dev/shm`` matter, which containers keep small. The other
process opens it through the descriptor of its owner.

Source: memfd_create(2), proc(5) on ``/proc/pid/fd``.
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
    """As its owner has it; it lives as long as anybody's tensor over it."""

    memory: torch.Tensor
    """uint8 [n]"""

    description: Mapping[str, Any]
    """Plain values by which another process opens it."""


def use_device(device: torch.device) -> None:
    """Make it the calling thread's: a new one would open the first GPU, beside the one in use."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class Channel(Protocol):
    """A kind of shared memory."""

    def create(self, size: int, device: torch.device) -> Segment:
        """A segment of this process.

        Raises:
            OSError: There is no memory for it.
            RuntimeError: There is none on the device.
        """

    def open(self, description: Mapping[str, Any], device: torch.device) -> torch.Tensor:
        """uint8 [n] the memory of another process's segment.

        Raises:
            OSError: This process cannot see it.
            RuntimeError: Its device cannot.
            KeyError, ValueError: It is described otherwise.
        """


_MOST_SEGMENTS: Final = 2
"""One is filled while the other is read."""

_GRAIN: Final = 1 << 20


class LentSegment(NamedTuple):
    """One to fill."""

    number: int
    segment: Segment


class SegmentRing:
    """The server's side; the student gives each segment back when it has read it.

    Args:
        channel: Of the segments.
        device: The server's.
        timeout_s: How long a student may keep one.
    """

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
        """Of all segments that there are; the student forgets others."""
        return list(self._segments)

    def take(self, size: int) -> LentSegment:
        """One of at least ``size`` bytes; waits until one is there.

        Raises:
            OSError: The student is gone or keeps them all, or there is no memory.
        """
        with self._changed:
            can_have = self._changed.wait_for(
                lambda: self._is_closed or self._free or len(self._segments) < _MOST_SEGMENTS,
                self._timeout_s,
            )
            if self._is_closed or not can_have:
                raise OSError("a student does not give memory back")
            for number in sorted(self._free):
                if self._segments[number].memory.numel() >= size:
                    self._free.remove(number)
                    return LentSegment(number, self._segments[number])
            if len(self._segments) == _MOST_SEGMENTS:
                # All that are free are too small: one makes room for a larger one.
                del self._segments[self._free.pop()]
            return self._created(size)

    def give_back(self, number: int) -> None:
        """What the student has read."""
        with self._changed:
            if number in self._segments:
                self._free.add(number)
                self._changed.notify_all()

    def close(self) -> None:
        """The student is gone: let go of all memory, and wake who waits."""
        with self._changed:
            self._is_closed = True
            self._segments.clear()
            self._free.clear()
            self._changed.notify_all()

    def _created(self, size: int) -> LentSegment:
        # Rows of another length come next: room for a little more.
        room = -(-(size + size // 4) // _GRAIN) * _GRAIN
        number, self._next = self._next, self._next + 1
        self._segments[number] = self._channel.create(room, self._device)
        return LentSegment(number, self._segments[number])


class OpenSegments:
    """The student's side: segments stay open for as long as the server uses them."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self._channel = channel
        self._device = device
        self._open: dict[int, torch.Tensor] = {}

    def close(self) -> None:
        """Let go of all memory."""
        self._open = {}

    def memory(self, number: int, values: Mapping[str, Any]) -> torch.Tensor:
        """uint8 [n] of a segment.

        Args:
            values: Its ``description``, and the ``numbers`` of all that there are.

        Raises:
            OSError, RuntimeError, KeyError, ValueError: As of ``Channel.open``.
        """
        self._open = {n: memory for n, memory in self._open.items() if n in values["numbers"]}
        if number not in self._open:
            self._open[number] = self._channel.open(values["description"], self._device)
        return self._open[number]


class SharedMemoryChannel:
    """Linux only; elsewhere ``create`` raises an ``OSError``."""

    def create(self, size: int, device: torch.device) -> Segment:
        """See ``Channel``; the pages are taken now, not when they are written."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory without a name")
        descriptor = os.memfd_create("megatron-ext-teacher")
        try:
            os.posix_fallocate(descriptor, 0, size)
            memory = _mapped(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        # Others open it for as long as it is in use.
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
    # The tensor holds the mapping, which ends with it.
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


class CudaIpcChannel:
    """Needs CUDA on both sides."""

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
        """See ``Channel``; the memory is on its owner's device, which may be another than ours."""
        # Processes number their GPUs each in its own way.
        visible = range(torch.cuda.device_count())
        found = [index for index in visible if _identity(index) == description["device"]]
        if not found:
            raise OSError("this process does not see the device")
        memory: torch.Tensor = rebuild_cuda_tensor(
            torch.Tensor,
            (int(description["size"]),),
            (1,),
            0,
            torch.storage.TypedStorage,
            torch.uint8,
            found[0],
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
"""What is there without any channel: targets go through the connection."""

CHANNELS: Final[Mapping[str, Channel]] = {
    "cuda_ipc": CudaIpcChannel(),
    "shared_memory": SharedMemoryChannel(),
}
"""The best first."""

_PROBE_BYTES: Final = 64


class ChannelOffers:
    """A server's: a segment of each channel with random bytes in it, until a student has chosen.

    Args:
        device: The server's.
    """

    def __init__(self, form: TargetForm, device: torch.device) -> None:
        self._probes: dict[str, Segment] = {}
        self.values: dict[str, Any] = {}
        for name, channel in CHANNELS.items():
            # Other forms than hidden states are records, which are made in main memory.
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
    """The best channel that works from here; ``FLIGHT`` where none does.

    Args:
        offers: ``ChannelOffers.values``.
        device: Where targets are needed.
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
