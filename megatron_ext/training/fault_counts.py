"""What a run has survived so far, in every row of its metrics and in every checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(slots=True, kw_only=True)
class FaultCounts:
    """Since the run began, over all its starts; the same on every rank."""

    skipped_iterations: int = 0
    """Iterations without an update, because their loss or gradient was not finite."""

    skips_in_a_row: int = 0
    """Those of them since the last update."""

    refused_documents: int = 0
    """Documents that were left out, where ``data.bad_documents`` is ``skip``."""

    retokenized_documents: int = 0
    """Documents of a ``.bin`` of the student's vocabulary that were trained as other ids than they
    are kept as: those that its tokenizer gives their text."""

    worker_restarts: int = 0
    """How often data workers that had died were started again, where there are any."""

    failed_saves: int = 0
    """Checkpoints that could not be written."""

    def add_data_faults(
        self, *, refused: int, retokenized: int, restarts: int, device: torch.device
    ) -> None:
        """Add what each rank has found since it last said so; one all-reduce over all ranks.

        Args:
            refused: Documents, on one rank of each replica; 0 on the others, which read the same.
            retokenized: Likewise.
            restarts: Of this rank's own workers.
            device: Of the collective.
        """
        found = torch.tensor([refused, retokenized, restarts], device=device)
        dist.all_reduce(found)
        refused_everywhere, retokenized_everywhere, restarts_everywhere = found.tolist()
        self.refused_documents += refused_everywhere
        self.retokenized_documents += retokenized_everywhere
        self.worker_restarts += restarts_everywhere

    def state_dict(self) -> dict[str, int]:
        """Plain values for a checkpoint."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, int(state.get(field.name, 0)))

    def metrics(self) -> dict[str, int]:
        """The totals."""
        return {
            name: count for name, count in self.state_dict().items() if name != "skips_in_a_row"
        }
