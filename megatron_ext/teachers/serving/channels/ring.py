"""Segments that go to and fro between a server and one student."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from megatron_ext.teachers.serving.channels.segment import Channel, Segment

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
