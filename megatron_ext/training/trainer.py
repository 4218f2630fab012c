"""The loop: per global batch the teacher's schedule, the student's, then the update."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import MegatronExtError
from megatron_ext.losses import ChunkCompletions, TeacherTargets
from megatron_ext.losses.checks.finite_check import FiniteCheck
from megatron_ext.teachers import Teacher
from megatron_ext.training.checkpoint import check_tokenizer, load_checkpoint, save_checkpoint
from megatron_ext.training.checkpoint_folder import latest_checkpoint
from megatron_ext.training.config import DistillConfig
from megatron_ext.training.cross_tokenizer.packing.sample import PackedSample
from megatron_ext.training.data.global_batches import GlobalBatches, Replica
from megatron_ext.training.data.held_out import HeldOut
from megatron_ext.training.data.microbatch import Microbatch
from megatron_ext.training.data.quarantine import log_refused
from megatron_ext.training.data.run_data import RunData
from megatron_ext.training.forward_step import GlobalCounts, StudentStep, reduce_reports
from megatron_ext.training.inputs import TEACHER
from megatron_ext.training.metrics import MetricsLog, plot_loss_curve, progress_bar
from megatron_ext.training.run_folder import CHECKPOINTS, TOKENIZER_FOLDER
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
    data: RunData
    places: BatchPlaces | None
    """Looks up batches for permuted heads; None where heads are in the order of ids."""

    run_record: dict[str, Any]
    """Saved with every checkpoint: what one needs to know to use it."""

    replica: Replica
    """This rank's part of every global batch."""

    batches: GlobalBatches
    """What it trains on, from where the run stands."""

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
        training, held_out = self.config.training, self.data.held_out
        for iteration in range(done + 1, total + 1):
            started = time.perf_counter()
            metrics = self._iterate(iteration)
            seconds = time.perf_counter() - started
            is_last = iteration == total
            if held_out and (is_last or iteration % training.eval_interval == 0):
                measured = self._validate(held_out)
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
        batches = self._microbatches()
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

    def _microbatches(self) -> list[Microbatch]:
        """This replica's part of the next global batch, on its device."""
        microbatches = [self._collate(rows) for rows in self.batches.take()]
        for document in self.batches.refused():
            log_refused(self.run_dir, document, iteration=self.batches.iteration)
        return microbatches

    def _collate(self, samples: list[PackedSample]) -> Microbatch:
        sides = self.data.collator(samples)
        table = self.step.constants.completion_table
        completions = {}
        if table is not None:
            completions[TEACHER] = ChunkCompletions.of(
                sides.alignments[TEACHER],
                sides.student.labels,
                sides.teachers[TEACHER].labels,
                table,
            )
        batch = Microbatch.of(sides, completions).to(self.groups.device)
        return self.places(batch) if self.places else batch

    def _targets(self, batches: list[Microbatch]) -> list[TeacherTargets | None]:
        """Targets per microbatch on the last stage; None for each elsewhere."""
        if self.teacher is None:
            return [None] * len(batches)
        targets = self.teacher.targets([batch.teachers[TEACHER] for batch in batches])
        return list(targets) or [None] * len(batches)

    def _validate(self, data: HeldOut) -> BitsPerByte:
        global_batches = (
            [self._held_out(data, rows) for rows in microbatches]
            for microbatches in data.global_batches(self.replica)
        )
        return measure_bits_per_byte(
            global_batches,
            student=self.student.ddp,
            student_shard=self.step.shard,
            teacher=self.teacher,
            next_token=self.step.next_token,
            groups=self.groups,
        )

    def _held_out(self, data: HeldOut, rows: list[PackedSample]) -> Microbatch:
        batch = Microbatch.of(data.dataset.collator(rows), {}).to(self.groups.device)
        return self.places(batch) if self.places else batch

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
                "data": self._data_state(),
                "run": self.run_record,
            },
            groups=self.groups,
            keep=self.config.training.keep_checkpoints,
            tokenizer=self.run_dir / TOKENIZER_FOLDER,
        )

    def _data_state(self) -> dict[str, Any]:
        """Where the data goes on, under any layout; one all-gather of objects over ``dp``."""
        everywhere: list[Any] = [None] * self.groups.dp_size
        dist.all_gather_object(everywhere, self.batches.positions(), group=self.groups.dp)
        return self.batches.state(everywhere)

    def _plot(self) -> None:
        plot_loss_curve(self.run_dir, title=self.run_dir.name)

    def _resume(self) -> int:
        """Load the newest checkpoint of the run, if any; iterations done."""
        checkpoint = latest_checkpoint(self.run_dir / CHECKPOINTS)
        if checkpoint is None:
            return 0
        state = load_checkpoint(
            checkpoint, {**self.student.sharded_state(is_loading=True), "iteration": 0, "data": {}}
        )
        check_tokenizer(checkpoint, state, fingerprint=self.run_record["tokenizer_fingerprint"])
        self.student.load_state(state)
        self.batches.load_state(state["data"])
        return int(state["iteration"])
