"""Completion of a global batch's prompts with what the student samples, and metrics of the samples.

Rows of prompts are dealt, resumed and counted as rows of any text; just before they are trained
they get the student's own completion, sampled with the weights of that moment. So a run that is
resumed samples the same again, and nothing is sampled that is not trained.

Servers may be asked for the next steps while one trains. Their weights change with checkpoints
alone, and no step beyond the next of them is asked for: so every sample is the one that the step
itself would have asked for, and what a run learns does not depend on how far ahead it asks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from megatron_ext.data.aligner import PackedSample
from megatron_ext.data.prompts import PromptSample
from megatron_ext.data.sampled_text import SampleCounts, SampledTexts
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.engines.engine import Answers, AskedPrompt, Completion, Engine
from megatron_ext.errors import DataError
from megatron_ext.files import append_lines
from megatron_ext.training.metrics import warn_of_disk
from megatron_ext.training.run_folder import ROLLOUTS_FILE
from megatron_ext.training.surprise import Surprise, surprise_record

_REPEATED: Final = 4
"""Tokens of a run whose second occurrence in a completion counts as repetition."""

_SUMS: Final = ("completions", "nats", "entropy", "repeated", "runs", *SampleCounts._fields)

Step = tuple[int, Sequence[Sequence[PackedSample]]]
"""Iteration of a global batch, and this replica's microbatches of it."""


class _Asked(NamedTuple):
    """Prompts of a step that the engine was asked to complete."""

    rows: list[PromptSample]
    prompts: list[AskedPrompt]
    answers: Answers


class _Logged(NamedTuple):
    """The completion that a step logs."""

    row: PromptSample
    answer: Completion
    counts: SampleCounts


@dataclass(slots=True, kw_only=True)
class Rollouts:
    """Completes rows of prompts on the ranks of a replica, which have the same rows."""

    engine: Engine
    texts: SampledTexts
    groups: ProcessGroups

    run_dir: Path
    """Folder of the run, whose ``rollouts.jsonl`` gets one completion a step."""

    ahead: int = 0
    """Steps ahead for which an engine with weights of its own samples."""

    update_interval: int = 1
    """Steps between two updates of such an engine's weights."""

    synced: int | None = None
    """Iteration whose weights the engine has; None where it shares the student's."""

    staleness: int = 0
    """Updates of the student since the weights that sampled the completions of a step."""

    asked: dict[int, _Asked] = field(default_factory=dict)
    """By iteration, prompts whose completions were not taken yet."""

    logged: _Logged | None = None
    """Of the step whose prompts were completed last; None where it had none."""

    logged_place: tuple[int, int] | None = None
    """Microbatch and row of it; None where nothing of it is trained."""

    has_warned: bool = False
    """Whether it was said that a line could not be written."""

    sums: list[float] = field(default_factory=lambda: [0.0] * len(_SUMS))
    """Sums of ``_SUMS`` over this replica's completions of a step."""

    def sync(self, iteration: int, checkpoint: Path) -> None:
        """Have an engine with weights of its own take those of a checkpoint.

        Collectives: those of ``Engine.load``.
        """
        assert not self.asked, "an engine's weights change while it samples"
        if not self.engine.shares_weights:
            self.engine.load(checkpoint)
            self.synced = iteration

    def completed(self, steps: Sequence[Step]) -> list[list[PackedSample]]:
        """The rows of a step's microbatches with their prompts completed; one with nothing to train
        is blank.

        Args:
            steps: The step, and those behind it that are read already, of which some are asked for.

        Collectives: those of the engine, for one step.

        Raises:
            DataError: The engine has answered nonsense.
        """
        iteration, microbatches = steps[0]
        self._ask(steps)
        self.staleness = 0 if self.synced is None else iteration - 1 - self.synced
        prompts, asked, answers_of = self.asked.pop(iteration)
        answers = answers_of()
        self.sums = [0.0] * len(_SUMS)
        self.logged = self.logged_place = None
        done: dict[int, PackedSample] = {}
        for row, prompt, answer in zip(prompts, asked, answers, strict=True):
            check_completion(prompt, answer, vocab_size=self.texts.vocab_size)
            text, counts = self.texts.aligned(row.prompt, answer.ids, answer.log_probs)
            pieces = () if text is None else (text,)
            done[id(row)] = PackedSample(pieces, source=row.source)
            self._count(answer, counts)
            if self.logged is None:
                self.logged = _Logged(row, answer, counts)
                self.logged_place = None if text is None else _place(row, microbatches)
        return [[done.get(id(row), row) for row in rows] for rows in microbatches]

    def log(self, iteration: int, surprise: Surprise | None) -> None:
        """Write the logged completion of a step into the run's folder, on the main rank.

        Args:
            surprise: That at ``logged_place``; None where nothing of it is trained.
        """
        if self.logged is None or not self.groups.is_main:
            return
        row, answer, counts = self.logged
        line: dict[str, Any] = {
            "iteration": iteration,
            "prompt": self.texts.shown(row.prompt.ids),
            "completion": self.texts.shown(answer.ids),
            "tokens": len(answer.ids),
            "nats_per_token": round(-sum(answer.log_probs) / max(len(answer.ids), 1), 4),
        }
        if surprise is not None:
            line["surprise"] = surprise_record(
                surprise,
                self.texts.spelled(row.prompt, answer.ids),
                first=len(row.prompt.ids) - 1,
                stop=self.texts.shown(answer.ids[-1:]) if counts.stopped else None,
            )
        text = json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
        path = self.run_dir / ROLLOUTS_FILE
        try:
            append_lines(path, text.encode())
        except OSError as error:
            if not self.has_warned:
                warn_of_disk(path, error, "without lines that there is no room for")
            self.has_warned = True

    def metrics(self) -> dict[str, float]:
        """Means over the completions of the step, of all replicas; the same on every rank. One that
        is of nothing, as in a step without prompts, is left out.

        Collectives: one all-reduce over ``dp``.
        """
        sums = torch.tensor(self.sums, dtype=torch.float64, device=self.groups.device)
        if self.groups.dp_size > 1:
            dist.all_reduce(sums, group=self.groups.dp)
        total = dict(zip(_SUMS, sums.tolist(), strict=True))
        values = {
            "completions": total["completions"],
            "tokens": total["trained"],
            "length": _mean(total["sampled"], total["completions"]),
            "stop_rate": _mean(total["stopped"], total["completions"]),
            "nats": _mean(total["nats"], total["sampled"]),
            "entropy": _mean(total["entropy"], total["sampled"]),
            "repetition": _mean(total["repeated"], total["runs"]),
            "cut": total["cut"],
            "whitespace": total["blank"],
            "unaligned": total["unaligned"],
            "left_out": total["left_out"],
            "staleness": self.staleness,
        }
        # Not every engine says what it has sampled from.
        known = {name: value for name, value in values.items() if not math.isnan(value)}
        return {f"rollouts/{name}": value for name, value in known.items()}

    def close(self) -> None:
        """Drop what was asked ahead."""
        self.asked.clear()
        self.engine.close()

    def _ask(self, steps: Sequence[Step]) -> None:
        """Have the engine begin with the step and those behind it, up to the next update."""
        interval = (steps[0][0] - 1) // self.update_interval
        for iteration, microbatches in steps[: 1 + self.ahead]:
            if iteration in self.asked or (iteration - 1) // self.update_interval != interval:
                continue
            rows = [row for batch in microbatches for row in batch if isinstance(row, PromptSample)]
            prompts = [
                AskedPrompt(row.prompt.ids, self.texts.stop_ids(row.prompt), row.place)
                for row in rows
            ]
            self.asked[iteration] = _Asked(rows, prompts, self.engine.complete(prompts))

    def _count(self, answer: Completion, counts: SampleCounts) -> None:
        repeated, runs = _repetition(answer.ids)
        entropy = sum(answer.entropies) if answer.entropies else math.nan * bool(answer.ids)
        added = (1, -sum(answer.log_probs), entropy, repeated, runs, *counts)
        self.sums = [before + more for before, more in zip(self.sums, added, strict=True)]


def _place(row: PackedSample, microbatches: Sequence[Sequence[PackedSample]]) -> tuple[int, int]:
    """Numbers of the microbatch with a row, and of the row in it."""
    return next(
        (batch, number)
        for batch, rows in enumerate(microbatches)
        for number, other in enumerate(rows)
        if other is row
    )


def check_completion(prompt: AskedPrompt, answer: Completion, *, vocab_size: int) -> None:
    """Refuse an engine's answer that cannot be a sample of its prompt.

    Raises:
        DataError: No id or one outside the vocabulary, log-probabilities of another number or that
            are none, or ids behind a stop.
    """
    log_probs = answer.log_probs
    problem = None
    if not answer.ids:
        problem = "no id"
    elif len(log_probs) != len(answer.ids):
        problem = f"{len(log_probs)} log-probabilities of {len(answer.ids)} ids"
    elif not all(-math.inf < value <= 1e-6 for value in log_probs):
        problem = f"log-probabilities from {min(log_probs)} to {max(log_probs)}"
    elif not 0 <= min(answer.ids) <= max(answer.ids) < vocab_size:
        problem = f"ids from {min(answer.ids)} to {max(answer.ids)} of {vocab_size}"
    elif any(token in prompt.stop_ids for token in answer.ids[:-1]):
        problem = "ids behind a stop token"
    if problem is not None:
        raise DataError(
            "an engine's answer is not a sample of its prompt",
            got=problem,
            expected="sampled ids, each with its log-probability, up to a stop token",
        )


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


def _repetition(ids: list[int]) -> tuple[int, int]:
    """Runs of tokens that have occurred before in ``ids``, and all runs."""
    runs = [tuple(ids[at : at + _REPEATED]) for at in range(len(ids) - _REPEATED + 1)]
    return len(runs) - len(set(runs)), len(runs)
