"""Segments of main memory without a name, between processes of one user on one machine.

The kernel frees such memory with the last descriptor and mapping of it. So nothing stays behind,
however either process ends; nor does the size of ``/dev/shm`` matter, which containers keep small.
The other process opens it through the descriptor of its owner.

Source: memfd_create(2), proc(5) on ``/proc/pid/fd``.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from megatron_ext.teachers.serving.channels.segment import Segment


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
