"""Which channel a student and a server have in common: tried with a few bytes, not guessed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import torch

from megatron_ext.teachers.serving.channels.cuda_ipc import CudaIpcChannel
from megatron_ext.teachers.serving.channels.segment import Channel, Segment
from megatron_ext.teachers.serving.channels.shared_memory import SharedMemoryChannel
from megatron_ext.teachers.targets.form import TargetForm

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
