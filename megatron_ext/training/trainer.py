"""The loop: per global batch the teacher's schedule, the student's, then the update."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import LossError
from megatron_ext.losses import ChunkCompletions, TeacherTargets
from megatron_ext.teachers import Teacher
from megatron_ext.training import rank_phase
from megatron_ext.training.config import DistillConfig
from megatron_ext.training.cross_tokenizer.packing.sample import PackedSample
from megatron_ext.training.data.global_batches import GlobalBatches, Replica
from megatron_ext.training.data.held_out import HeldOut
from megatron_ext.training.data.microbatch import Microbatch
from megatron_ext.training.data.quarantine import log_refused
from megatron_ext.training.data.run_data import RunData
from megatron_ext.training.fault_counts import FaultCounts
from megatron_ext.training.forward_step import GlobalCounts, StudentStep, reduce_reports
from megatron_ext.training.inputs import TEACHER
from megatron_ext.training.metrics import MetricsLog, plot_loss_curve, progress_bar
from megatron_ext.training.non_finite import DivergedError, NonFinitePolicy, finite_only
from megatron_ext.training.saved_run import SavedRun
from megatron_ext.training.student import Student
from megatron_ext.training.validation import BitsPerByte, measure_bits_per_byte
from megatron_ext.training.vocabulary_layout import BatchPlaces


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

    counts: FaultCounts = field(default_factory=FaultCounts)
    """What the run has survived."""

    def train(self) -> None:
        """Resume where the run stands, train to ``train_iters``, leave a checkpoint and a plot.

        Raises:
            LossError: A model predicts NaN or infinity; on every rank, before anything is saved.
            DivergedError: The loss or its gradient is not finite; likewise.
            CheckpointError: Saving has failed for good.
        """
        saved = self._saved()
        try:
            self._train(saved)
        except (DivergedError, LossError):
            # All ranks are here, and what they saved before is good.
            saved.finish()
            raise
        except BaseException:
            saved.abandon()
            raise
        finally:
            self.batches.close()

    def _train(self, saved: SavedRun) -> None:
        rank_phase.enter("loading")
        done = saved.load()
        total = self.config.training.train_iters
        if not self.groups.is_main:
            self._loop(saved, done, total, None, None)
            return
        if done >= total:
            print(f"the run in {self.run_dir} is finished: {done} iterations are done", flush=True)
            self._plot()
            return
        with (
            MetricsLog(self.run_dir, last_iteration=done) as log,
            progress_bar("distil" if self.teacher else "train", total=total, done=done) as bar,
        ):
            self._loop(saved, done, total, log, bar)
        self._plot()

    def _loop(
        self, saved: SavedRun, done: int, total: int, log: MetricsLog | None, bar: Any
    ) -> None:
        training, held_out = self.config.training, self.data.held_out
        for iteration in range(done + 1, total + 1):
            started = time.perf_counter()
            metrics = self._iterate(iteration)
            saved.poll()
            seconds = time.perf_counter() - started
            is_last = iteration == total
            if held_out and (is_last or iteration % training.eval_interval == 0):
                rank_phase.enter("measuring on held-out text")
                measured = self._validate(held_out)
                metrics["student_bits_per_byte"] = measured.student
                metrics["teacher_bits_per_byte"] = measured.teacher
            if log is not None:
                log.write(iteration=iteration, seconds=seconds, **metrics)
                bar.set_postfix({"loss": f"{metrics.get('loss', math.nan):.4f}"}, refresh=False)
                bar.update()
                if "student_bits_per_byte" in metrics:
                    self._plot()
            if is_last or iteration % training.save_interval == 0:
                saved.save(iteration, is_last=is_last)

    def _iterate(self, iteration: int) -> dict[str, Any]:
        """One optimizer step; the last stage returns what it measured, the others only a little."""
        policy = NonFinitePolicy(self.config.training, self.groups, self.counts)
        rank_phase.enter("reading data", iteration=iteration)
        batches = self._microbatches()
        rank_phase.enter("training")
        counts = GlobalCounts.of(batches, self.groups, compared=self.step.compared)
        learning_rate = self.student.learning_rate
        reports = self.student.forward_backward(
            dataclasses.replace(self.step, counts=counts),
            list(zip(batches, self._targets(batches), strict=True)),
        )
        metrics, finite = reduce_reports(reports, self.groups)
        if policy.check_loss(metrics.get("loss", 0.0), finite, iteration=iteration):
            rank_phase.enter("updating")
            metrics["grad_norm"] = self.student.update()
            policy.check_gradient(metrics["grad_norm"], iteration=iteration)
        return finite_only(metrics) | {
            "learning_rate": learning_rate,
            "tokens": counts.tokens,
            "chunks": counts.chunks,
            **self.counts.metrics(),
            **({"compared": counts.compared} if self.teacher else {}),
            **(dataclasses.asdict(counts.chunk_counts) if self.teacher else {}),
        }

    def _microbatches(self) -> list[Microbatch]:
        """This replica's part of the next global batch, on its device."""
        microbatches = [self._collate(rows) for rows in self.batches.take()]
        refused = self.batches.refused()
        for document in refused if self.groups.is_replica_main else ():
            log_refused(self.run_dir, document, iteration=self.batches.iteration)
        if self.config.data.num_workers or self.config.data.bad_documents == "skip":
            self.counts.add_data_faults(
                refused=len(refused) * self.groups.is_replica_main,
                restarts=self.batches.restarts_since_asked(),
                device=self.groups.device,
            )
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

    def _saved(self) -> SavedRun:
        return SavedRun(
            self.config,
            groups=self.groups,
            student=self.student,
            batches=self.batches,
            record=self.run_record,
            counts=self.counts,
        )

    def _plot(self) -> None:
        plot_loss_curve(self.run_dir, title=self.run_dir.name)
