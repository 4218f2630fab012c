"""Faults that a run may survive: non-finite iterations, unreadable documents, failed saves.

Counts are in every row of the metrics and in every checkpoint; documents that a run left out are in
``quarantine.jsonl``, each with its place and the reason.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from megatron_ext.data.packed_dataset import RefusedDocument
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import MegatronExtError
from megatron_ext.losses.diagnostics import ONE_TEACHER, FiniteCheck
from megatron_ext.training.configuration.config import TrainingConfig
from megatron_ext.training.run_folder import QUARANTINE_FILE, replace_first_lines


@dataclass(slots=True, kw_only=True)
class FaultCounts:
    """Faults since the run began, over all its starts; the same on every rank."""

    skipped_iterations: int = 0
    """Iterations without an update, because their loss or gradient was not finite."""

    skips_in_a_row: int = 0
    """Skipped iterations since the last update."""

    refused_documents: int = 0
    """Documents that were left out, where ``data.bad_documents`` is ``skip``."""

    retokenized_documents: int = 0
    """Documents of a ``.bin`` whose stored ids differ from those that the student's tokenizer gives
    their text; they were trained as the latter."""

    worker_restarts: int = 0
    """Restarts of data workers that had died."""

    failed_saves: int = 0
    """Checkpoints that could not be written."""

    def add_data_faults(
        self, *, refused: int, retokenized: int, restarts: int, device: torch.device
    ) -> None:
        """Add each rank's new faults; one all-reduce over all ranks.

        Args:
            refused: Documents, on one rank of each replica; 0 on the others, which read the same.
            retokenized: Likewise.
            restarts: Restarts of this rank's own workers.
            device: Device of the collective.
        """
        counts = torch.tensor([refused, retokenized, restarts], device=device)
        dist.all_reduce(counts)
        all_refused, all_retokenized, all_restarts = counts.tolist()
        self.refused_documents += all_refused
        self.retokenized_documents += all_retokenized
        self.worker_restarts += all_restarts

    def state_dict(self) -> dict[str, int]:
        """Plain values for a checkpoint."""
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, int(state.get(field.name, 0)))

    def metrics(self) -> dict[str, int]:
        """Totals for the log."""
        return {
            name: count for name, count in self.state_dict().items() if name != "skips_in_a_row"
        }


class DivergedError(MegatronExtError, RuntimeError):
    """The loss or the gradient is not a finite number."""


@dataclass(frozen=True, slots=True)
class NonFinitePolicy:
    """``training.nan_policy``: end the run, or skip the iteration and count it."""

    config: TrainingConfig
    groups: ProcessGroups

    counts: FaultCounts
    """Counts that a skip is added to."""

    teachers: tuple[str, ...] = ONE_TEACHER
    """Names of the teachers, in the order of the checks."""

    def check_loss(self, loss: float, predictions: FiniteCheck, *, iteration: int) -> bool:
        """Whether the iteration may go on, by the last stage's values, alike on every rank.

        Collectives: one broadcast over ``pp``, where there are several stages.

        Raises:
            LossError: A model predicts NaN or infinity, and no more skips are allowed.
            DivergedError: The loss is not finite; likewise.
        """
        shared = torch.zeros(1 + 2 * len(self.teachers), dtype=torch.float64)
        shared[0] = loss
        if self.groups.is_last_stage:
            shared[1:] = predictions.bad.flatten()
        if dist.get_world_size(self.groups.pp) > 1:
            on_device = shared.to(self.groups.device)
            shared = self.groups.broadcast_from_last_stage(on_device).cpu()
        value, bad = shared[0].item(), shared[1:].view(-1, 2)
        if not bad.any() and math.isfinite(value):
            return True
        if not self._skips():
            FiniteCheck(bad, self.teachers).raise_if_bad(where=f"iteration {iteration}")
            raise self._error("loss", value, iteration)
        return False

    def check_gradient(self, grad_norm: float, *, iteration: int) -> bool:
        """Whether the gradient, whose norm all ranks have, was finite and applied; no collective.

        Raises:
            DivergedError: It is not finite, and no more skips are allowed.
        """
        if math.isfinite(grad_norm):
            self.counts.skips_in_a_row = 0
            return True
        if not self._skips():
            raise self._error("gradient norm", grad_norm, iteration)
        return False

    def _skips(self) -> bool:
        """Count a skip and return whether it is allowed."""
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


class RunStoppedError(MegatronExtError, RuntimeError):
    """A run was ended by a signal, and can be resumed."""

    def __init__(self, number: int, *, iteration: int, run_dir: Path) -> None:
        super().__init__(
            f"the run was ended by {signal.Signals(number).name}",
            where=run_dir,
            got=f"{iteration} iterations done, and saved" if iteration else "no iteration done",
            fix="start it again with the same command to go on",
        )
        self.exit_code = 128 + number


_REQUESTS: Final = itertools.count()


class StopRequest:
    """SIGTERM and SIGINT as a request to end the run between two iterations, while entered.

    A second signal has its usual effect, at once. Signals are handled in the main thread alone;
    elsewhere, nothing is changed.

    Args:
        store: A store of all ranks, through which they agree on the last iteration.
    """

    def __init__(self, store: Store) -> None:
        # The store may outlive a run that was stopped.
        self._store = PrefixStore(f"megatron_ext/stop/{next(_REQUESTS)}", store)
        self._process = os.getpid()
        self._signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def number(self, next_iteration: int) -> int | None:
        """The signal after which ``next_iteration`` must not begin, the same on every rank.

        Call it on every rank before each iteration. The rank that has a signal names the iteration
        that it begins as the last one; as an iteration ends on no rank before it has begun on all,
        the others read that before they begin the next. No collective: one request to the store.
        """
        if not self._store.check(["last"]):
            if self._signal is not None:
                self._store.set("last", f"{next_iteration} {self._signal}")
            return None
        last, number = map(int, self._store.get("last").decode().split())
        return number if next_iteration > last else None

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None or os.getpid() != self._process:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
            return
        self._signal = number


def leave_signals_to_the_student() -> None:
    """Ignore SIGTERM and SIGINT in a process that serves a teacher until its student has ended."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def finite_only(metrics: dict[str, Any]) -> dict[str, Any]:
    """``metrics`` without NaN and infinity, which JSON does not have."""
    return {
        name: value
        for name, value in metrics.items()
        if not isinstance(value, float) or math.isfinite(value)
    }


def log_refused(run_dir: Path, document: RefusedDocument, *, iteration: int) -> None:
    """Append a document to ``quarantine.jsonl``, in one write since ranks share the file."""
    with (run_dir / QUARANTINE_FILE).open("a", encoding="utf-8") as file:
        file.write(_line(document, iteration) + "\n")


def log_left_out(run_dir: Path, documents: Sequence[RefusedDocument]) -> None:
    """Write what was left out before the first iteration; the main rank calls it at each start."""
    lines = [_line(document, 0) for document in documents]
    replace_first_lines(run_dir / QUARANTINE_FILE, lines)


def _line(document: RefusedDocument, iteration: int) -> str:
    return json.dumps({"iteration": iteration, **document._asdict()}, ensure_ascii=False)
