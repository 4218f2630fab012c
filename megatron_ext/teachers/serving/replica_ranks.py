"""The ranks of one served replica, of which one talks to students."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRanks:
    """Where this rank stands in its replica."""

    device: torch.device

    group: ProcessGroup | None = None
    """All ranks of the replica, over tensor and pipeline parallelism; None: this one alone."""

    main: int = 0
    """Rank in the default group that listens and answers: of the last stage, where targets are."""

    @property
    def is_main(self) -> bool:
        """Whether this is that rank."""
        return self.group is None or dist.get_rank() == self.main

    def broadcast(self, content: bytes | None) -> bytes:
        """``content`` of the main rank, on every rank.

        Collectives: one broadcast over the replica, and where there is content another.
        """
        if self.group is None:
            assert content is not None
            return content
        size = torch.tensor([len(content or b"")], device=self.device)
        dist.broadcast(size, src=self.main, group=self.group)
        length = int(size)
        if not length:
            return b""
        if content is None:
            buffer = torch.empty(length, dtype=torch.uint8, device=self.device)
        else:
            buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device)
        dist.broadcast(buffer, src=self.main, group=self.group)
        return content if content is not None else buffer.cpu().numpy().tobytes()
