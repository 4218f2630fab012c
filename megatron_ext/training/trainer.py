"""The loop: per global batch the teacher's schedule, the student's, then the update."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import MegatronExtError
from megatron_ext.losses import TeacherTargets
from megatron_ext.losses.checks.finite_check import FiniteCheck
from megatron_ext.teachers import Teacher
from megatron_ext.training.checkpoint import check_tokenizer, load_checkpoint, save_checkpoint
from megatron_ext.training.checkpoint_folder import latest_checkpoint
from megatron_ext.training.collator import Batch, collate
from megatron_ext.training.config import DistillConfig
from megatron_ext.training.datasets import WindowDataset
from megatron_ext.training.forward_step import GlobalCounts, StudentStep, reduce_reports
from megatron_ext.training.metrics import MetricsLog, plot_loss_curve, progress_bar
from megatron_ext.training.run_folder import CHECKPOINTS, TOKENIZER_FOLDER
from megatron_ext.training.sampler import BatchSampler
from megatron_ext.training.student import Student
from megatron_ext.training.validation import BitsPerByte, measure_bits_per_byte
from megatron_ext.training.vocabulary_layout import BatchPlaces


class DivergedError(MegatronExtError, RuntimeError):
    """The loss or the gradient is not a finite number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Everything one rank needs to train; ``train`` runs it to the end."""

    config: DistillConfig
    groups: ProcessGroups
    run_dir: Path
    student: Student
    step: StudentStep
    """Template of the forward step; its counts are set for each global batch."""

    teacher: Teacher | None
    train_data: WindowDataset
    validation_data: WindowDataset | None
    places: BatchPlaces | None
    """Looks up batches for permuted heads; None where heads are in the order of ids."""

    run_record: dict[str, Any]
    """Saved with every checkpoint: what one needs to know to use it."""

    def train(self) -> None:
        """Resume where the run stands, train to ``train_iters``, leave a checkpoint and a plot.

        Raises:
            LossError: A model predicts NaN or infinity; on every rank, before anything is saved.
            DivergedError: The loss or its gradient is not finite; likewise.
        """
        done = self._resume()
        total = self.config.training.train_iters
        if not self.groups.is_main:
            self._loop(done, total, None, None)
            return
        if done >= total:
            print(f"the run in {self.run_dir} is finished: {done} iterations are done", flush=True)
            self._plot()
            return
        with (
            MetricsLog(self.run_dir, last_iteration=done) as log,
            progress_bar("distil" if self.teacher else "train", total=total, done=done) as bar,
        ):
            self._loop(done, total, log, bar)
        self._plot()

    def _loop(self, done: int, total: int, log: MetricsLog | None, bar: Any) -> None:
        training = self.config.training
        for iteration in range(done + 1, total + 1):
            started = time.perf_counter()
            metrics = self._iterate(iteration)
            seconds = time.perf_counter() - started
            is_last = iteration == total
            if self.validation_data and (is_last or iteration % training.eval_interval == 0):
                measured = self._validate(self.validation_data)
                metrics["student_bits_per_byte"] = measured.student
                metrics["teacher_bits_per_byte"] = measured.teacher
            if log is not None:
                log.write(iteration=iteration, seconds=seconds, **metrics)
                bar.set_postfix({"loss": f"{metrics['loss']:.4f}"}, refresh=False)
                bar.update()
                if "student_bits_per_byte" in metrics:
                    self._plot()
            if is_last or iteration % training.save_interval == 0:
                self._save(iteration)

    def _iterate(self, iteration: int) -> dict[str, Any]:
        """One optimizer step; the last stage returns what it measured, the others only a little."""
        batches = self._batches(iteration)
        counts = GlobalCounts.of(batches, self.groups, compared=self.step.compared)
        learning_rate = self.student.learning_rate
        reports = self.student.forward_backward(
            dataclasses.replace(self.step, counts=counts),
            list(zip(batches, self._targets(batches), strict=True)),
        )
        metrics, finite = reduce_reports(reports, self.groups)
        self._check_finite("loss", metrics.get("loss", 0.0), iteration, finite)
        grad_norm = self.student.update()
        self._check_finite("gradient norm", grad_norm, iteration)
        return metrics | {
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "tokens": counts.tokens,
            "chunks": counts.chunks,
            **({"compared": counts.compared} if self.teacher else {}),
            **(dataclasses.asdict(counts.chunk_counts) if self.teacher else {}),
        }

    def _batches(self, iteration: int) -> list[Batch]:
        training = self.config.training
        sampler = BatchSampler(
            sample_count=len(self.train_data),
            global_batch_size=training.global_batch_size,
            micro_batch_size=training.micro_batch_size,
            dp_rank=self.groups.dp_rank,
            dp_size=self.groups.dp_size,
            seed=training.seed,
        )
        return [
            self._collate([self.train_data[index] for index in indices])
            for indices in sampler.microbatches(iteration - 1)
        ]

    def _collate(self, windows: list[Any], *, text_only: bool = False) -> Batch:
        teacher = self.config.teacher
        batch = collate(
            windows,
            student_length=self.config.student.seq_length,
            teacher_length=teacher.model.seq_length if teacher and self.teacher else None,
            text_only=text_only,
            completion_table=None if text_only else self.step.constants.completion_table,
        ).to(self.groups.device)
        return self.places(batch) if self.places else batch

    def _targets(self, batches: list[Batch]) -> list[TeacherTargets | None]:
        """Targets per microbatch on the last stage; None for each elsewhere."""
        if self.teacher is None:
            return [None] * len(batches)
        targets = self.teacher.targets([b.teacher for b in batches if b.teacher is not None])
        return list(targets) or [None] * len(batches)

    def _validate(self, data: WindowDataset) -> BitsPerByte:
        size, whole = self.config.training.micro_batch_size, self.config.training.global_batch_size
        rows = data.padded_to_multiple(whole)
        global_batches = (
            [
                self._collate(rows[start : start + size], text_only=True)
                for start in range(first, first + whole, size)
                if start // size % self.groups.dp_size == self.groups.dp_rank
            ]
            for first in range(0, len(rows), whole)
        )
        return measure_bits_per_byte(
            global_batches,
            student=self.student.ddp,
            student_shard=self.step.shard,
            teacher=self.teacher,
            next_token=self.step.next_token,
            groups=self.groups,
        )

    def _check_finite(
        self, what: str, value: float, iteration: int, predictions: FiniteCheck | None = None
    ) -> None:
        """Raise on every rank when something of the last stage is not finite; one broadcast."""
        shared = torch.tensor([value, 0.0, 0.0], dtype=torch.float64, device=self.groups.device)
        if predictions is not None:
            shared[1:] = predictions.bad
        self.groups.broadcast_from_last_stage(shared)
        FiniteCheck(shared[1:]).raise_if_bad(where=f"iteration {iteration}")
        if not math.isfinite(shared[0].item()):
            raise DivergedError(
                f"the {what} is not finite at iteration {iteration}",
                got=shared[0].item(),
                fix="start another run with a lower optimizer.lr; initial_checkpoint may name a "
                "checkpoint of this one",
            )

    def _save(self, iteration: int) -> None:
        save_checkpoint(
            self.run_dir / CHECKPOINTS,
            iteration,
            {
                **self.student.sharded_state(),
                "iteration": iteration,
                "run": self.run_record,
            },
            groups=self.groups,
            keep=self.config.training.keep_checkpoints,
            tokenizer=self.run_dir / TOKENIZER_FOLDER,
        )

    def _plot(self) -> None:
        plot_loss_curve(self.run_dir, title=self.run_dir.name)

    def _resume(self) -> int:
        """Load the newest checkpoint of the run, if any; iterations done."""
        checkpoint = latest_checkpoint(self.run_dir / CHECKPOINTS)
        if checkpoint is None:
            return 0
        state = load_checkpoint(
            checkpoint, {**self.student.sharded_state(is_loading=True), "iteration": 0}
        )
        check_tokenizer(checkpoint, state, fingerprint=self.run_record["tokenizer_fingerprint"])
        self.student.load_state(state)
        return int(state["iteration"])
