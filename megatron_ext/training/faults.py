"""What becomes of an iteration whose loss or gradient is NaN or infinite; alike on every rank.

What a run has survived so far, in every row of its metrics and in every checkpoint.

Documents that a run left out, each with its place and the reason: ``quarantine.jsonl``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.data.packed_dataset import RefusedDocument
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import MegatronExtError
from megatron_ext.files import whole_lines, write_bytes
from megatron_ext.losses.diagnostics import FiniteCheck
from megatron_ext.training.config import TrainingConfig
from megatron_ext.training.run_folder import QUARANTINE_FILE


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


class DivergedError(MegatronExtError, RuntimeError):
    """The loss or the gradient is not a finite number."""


@dataclass(frozen=True, slots=True)
class NonFinitePolicy:
    """``training.nan_policy``: end the run, or leave the iteration out and count it.

    Args:
        config: The run's.
        groups: Of this rank.
        counts: Where skips are counted.
    """

    config: TrainingConfig
    groups: ProcessGroups
    counts: FaultCounts

    def check_loss(self, loss: float, predictions: FiniteCheck, *, iteration: int) -> bool:
        """Whether the iteration may go on; what the last stage knows holds on every rank.

        Collectives: one broadcast over ``pp``.

        Raises:
            LossError: A model predicts NaN or infinity, and that is one time too many.
            DivergedError: The loss is not finite; likewise.
        """
        shared = torch.tensor([loss, 0.0, 0.0], dtype=torch.float64, device=self.groups.device)
        shared[1:] = predictions.bad
        value, *bad = self.groups.broadcast_from_last_stage(shared).tolist()
        if not any(bad) and math.isfinite(value):
            return True
        if not self._skips():
            FiniteCheck(torch.tensor(bad)).raise_if_bad(where=f"iteration {iteration}")
            raise self._error("loss", value, iteration)
        return False

    def check_gradient(self, grad_norm: float, *, iteration: int) -> bool:
        """Whether the gradient, whose norm all ranks know, was applied; no collective.

        Raises:
            DivergedError: It is not finite, and that is one time too many.
        """
        if math.isfinite(grad_norm):
            self.counts.skips_in_a_row = 0
            return True
        if not self._skips():
            raise self._error("gradient norm", grad_norm, iteration)
        return False

    def _skips(self) -> bool:
        """Count a skip; whether it is allowed."""
        if self.config.nan_policy == "stop":
            return False
        self.counts.skipped_iterations += 1
        self.counts.skips_in_a_row += 1
        return self.counts.skips_in_a_row <= self.config.max_consecutive_skips

    def _error(self, what: str, value: float, iteration: int) -> DivergedError:
        in_a_row = self.counts.skips_in_a_row
        return DivergedError(
            f"the {what} is not finite at iteration {iteration}",
            got=f"{value}, {in_a_row} iterations in a row" if in_a_row else value,
            fix="start another run with a lower optimizer.lr; initial_checkpoint may name a "
            "checkpoint of this one",
        )


def finite_only(metrics: dict[str, Any]) -> dict[str, Any]:
    """Without what is no number, of which JSON has none."""
    return {
        name: value
        for name, value in metrics.items()
        if not isinstance(value, float) or math.isfinite(value)
    }


def log_refused(run_dir: Path, document: RefusedDocument, *, iteration: int) -> None:
    """Append a line; ranks append to one file, each line in one write."""
    line = json.dumps({"iteration": iteration, **document._asdict()}, ensure_ascii=False)
    with (run_dir / QUARANTINE_FILE).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def forget_refused(run_dir: Path, *, last_iteration: int) -> None:
    """Drop the lines of later iterations, and a line cut short: a resumed run does them again."""
    path = run_dir / QUARANTINE_FILE
    lines = whole_lines(path)
    kept = [line for line in lines if json.loads(line)["iteration"] <= last_iteration]
    content = b"".join(line + b"\n" for line in kept)
    if path.exists() and content != path.read_bytes():
        write_bytes(path, content)
