"""A piece of memory that two processes see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch


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
