"""The training loop: for each global batch the teachers, the student and the update."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ext.data.aligner import PackedSample
from megatron_ext.data.global_batches import GlobalBatches, ReadAhead, Replica
from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import LossError
from megatron_ext.losses import LossWeighting, TeacherTargets
from megatron_ext.losses.diagnostics import ONE_TEACHER
from megatron_ext.teachers import Teacher
from megatron_ext.teachers.remote_teacher import leave, remote_teachers
from megatron_ext.training import watchdog
from megatron_ext.training.checkpoints.folder import (
    find_checkpoint,
    iteration_of,
    latest_checkpoint,
)
from megatron_ext.training.checkpoints.saved_run import SavedRun
from megatron_ext.training.faults import (
    DivergedError,
    FaultCounts,
    NonFinitePolicy,
    RunStoppedError,
    StopRequest,
    finite_only,
    log_refused,
)
from megatron_ext.training.forward_step import GlobalCounts, StudentStep, reduce_reports
from megatron_ext.training.learning_step import write_learned_projections
from megatron_ext.training.megatron_models.experts import begin_step, loads, update_biases
from megatron_ext.training.megatron_models.student_head import cut_into_tiles
from megatron_ext.training.metrics import (
    MetricsLog,
    open_writers,
    progress_bar,
    result_lines,
)
from megatron_ext.training.microbatch import Microbatch, MicrobatchWithTargets
from megatron_ext.training.rollouts import Rollouts
from megatron_ext.training.run_data import HeldOut, RunData
from megatron_ext.training.run_folder import CHECKPOINTS, disown_run_folder
from megatron_ext.training.run_loss import layer_gradients, observe
from megatron_ext.training.run_plan import RunPlan
from megatron_ext.training.step_clock import StepClock, StepWatch, TeacherWatch
from megatron_ext.training.student import Student
from megatron_ext.training.teachers.cached_teacher import CachedTeacher
from megatron_ext.training.validation import HeldOutScores, KeptScores, measure_held_out
from megatron_ext.training.vocabulary_layout import BatchPlaces

Measurement = Callable[[], Mapping[str, float]]
"""Metrics of the student as it stands; called on every rank."""


@dataclass(slots=True, kw_only=True)
class Trainer:
    """Training on one rank; ``train`` runs it to the end."""

    plan: RunPlan
    groups: ProcessGroups
    student: Student
    step: StudentStep
    """Template of the forward step; its counts are set for each global batch."""

    teachers: Mapping[str, Teacher]
    """By name, those whose model runs, here or remotely; none in a run that does not distil."""

    weighting: LossWeighting
    """Weights of the terms of the loss, by step."""

    data: RunData
    places: BatchPlaces | None
    """Maps the ids of batches to the rows of permuted heads; None where rows are in id order."""

    run_record: dict[str, Any]
    """Description of the run, saved with every checkpoint."""

    replica: Replica
    """This rank's part of every global batch."""

    batches: GlobalBatches
    """Training rows from the current position of the run on."""

    cached_teachers: Mapping[str, CachedTeacher] = field(default_factory=dict)
    """By name, those whose targets are read from a cache."""

    counts: FaultCounts = field(default_factory=FaultCounts)
    """Faults that the run has survived."""

    clock: StepClock = field(default_factory=StepClock)
    """Time of each phase of a step."""

    stop: StopRequest | None = None
    """Signals that end the run between two iterations."""

    rollouts: Rollouts | None = None
    """Completes prompts; None in a run without any."""

    reader: ReadAhead[list[Microbatch | list[PackedSample]]] = field(init=False)
    """Microbatches of ``batches`` on the host, one step ahead; further for remote teachers that
    prefetch, and for servers that sample ahead. Rows with prompts are not completed yet."""

    held_out_scores: KeptScores = field(init=False)
    """Those of the teachers that never change, which read the held-out text once."""

    def __post_init__(self) -> None:
        frozen = (n for n in self.teachers if self.plan.teachers[n].config.ema_decay is None)
        self.held_out_scores = {name: [] for name in frozen}
        rollouts = self.plan.data.rollouts
        depths = [teacher.prefetch for teacher in remote_teachers(self.teachers).values()]
        self.reader = ReadAhead(
            self.batches,
            lambda microbatches: [self._read(rows) for rows in microbatches],
            depth=max([0 if rollouts is None else rollouts.steps_ahead, *depths]),
            total=self.plan.training.train_iters,
        )

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return self.plan.run_dir

    def train(self, measure: Measurement | None = None) -> None:
        """Resume from the latest checkpoint and train to ``train_iters``; write a loss plot.

        Args:
            measure: Measures the student by tasks between steps; None where the run has no tasks.

        Raises:
            LossError: A model predicts NaN or infinity; on every rank, before anything is saved.
            DivergedError: The loss or its gradient is not finite; likewise.
            CheckpointError: Saving has failed for good.
            RunStoppedError: A signal has ended the run, whose state is saved.
        """
        saved, is_finished = self._saved(), False
        try:
            self._train(saved, measure)
            is_finished = True
        except (DivergedError, LossError, RunStoppedError):
            # Raised on all ranks alike, so a save in the background can be finished.
            saved.finish()
            raise
        except BaseException:
            saved.abandon()
            raise
        finally:
            self.batches.close()
            if self.rollouts is not None:
                self.rollouts.close()
            leave(remote_teachers(self.teachers), is_finished=is_finished)
            disown_run_folder(self.run_dir)

    def _train(self, saved: SavedRun, measure: Measurement | None) -> None:
        watchdog.enter("loading")
        done = saved.load()
        total = self.plan.training.train_iters
        if not self.groups.is_main:
            self._loop(saved, done, measure, None, None)
            return
        if done >= total:
            with MetricsLog(self.run_dir, last_iteration=done) as log:
                log.draw()
            self._print_result(done)
            return
        writers = open_writers(self.plan, last_iteration=done)
        with (
            MetricsLog(self.run_dir, last_iteration=done, writers=writers) as log,
            progress_bar("distill" if self.step.term else "train", total=total, done=done) as bar,
        ):
            self._loop(saved, done, measure, log, bar)
            log.draw()
        self._print_result(total)

    def _loop(
        self,
        saved: SavedRun,
        done: int,
        measure: Measurement | None,
        log: MetricsLog | None,
        bar: Any,
    ) -> None:
        training, held_out = self.plan.training, self.data.held_out
        total = training.train_iters
        watch = StepWatch(self.clock, self.batches)
        teacher_watch = TeacherWatch(remote_teachers(self.teachers))
        saved_at = done
        self._sync_engine(saved)
        for iteration in range(done + 1, total + 1):
            self._end_if_asked(saved, iteration - 1, is_saved=saved_at == iteration - 1)
            started = time.perf_counter()
            teacher_watch.begin()
            metrics = self._iterate(iteration)
            saved.poll()
            seconds = time.perf_counter() - started
            metrics |= teacher_watch.row(seconds=seconds)
            is_last = iteration == total
            if held_out and (is_last or iteration % training.eval_interval == 0):
                watchdog.enter("measuring on held-out text")
                with self.clock.phase("evaluation"):
                    metrics |= self._validate(held_out).metrics()
            if measure and (is_last or iteration % self.plan.evaluation.interval == 0):
                watchdog.enter("measuring by tasks")
                with self.clock.phase("evaluation"):
                    metrics |= measure()
            measured = watch.row(metrics, seconds=seconds)
            if log is not None:
                log.write(iteration=iteration, seconds=seconds, **measured, **metrics)
                shown = {"loss": f"{metrics.get('loss', math.nan):.4f}"}
                shown |= teacher_watch.shown(metrics)
                bar.set_postfix(shown, refresh=False)
                bar.update()
                if "student_bits_per_byte" in metrics:
                    log.draw()
            if is_last or iteration % training.save_interval == 0:
                with self.clock.phase("checkpoint"):
                    saved.save(iteration, is_last=is_last)
                saved_at = iteration
                if not is_last:
                    self._sync_engine(saved)

    def _sync_engine(self, saved: SavedRun) -> None:
        """Give an engine with weights of its own those of the newest checkpoint."""
        if self.rollouts is None or self.rollouts.engine.shares_weights:
            return
        saved.finish()
        folder = self.run_dir / CHECKPOINTS
        # The newest one may be older than this iteration, where saving it has failed.
        checkpoint = latest_checkpoint(folder)
        if checkpoint is None:
            assert self.plan.initial_checkpoint is not None, "an exclusion"
            where = "initial_checkpoint"
            checkpoint = find_checkpoint(self.plan.initial_checkpoint, where=where)
        with self.clock.phase("rollouts"):
            is_own = checkpoint.parent == folder
            self.rollouts.sync(iteration_of(checkpoint) if is_own else 0, checkpoint)

    def _end_if_asked(self, saved: SavedRun, iteration: int, *, is_saved: bool) -> None:
        """End the run after ``iteration`` if a signal asks for it; on every rank alike."""
        number = self.stop.number(iteration + 1) if self.stop else None
        if number is None:
            return
        if not is_saved:
            saved.save(iteration, is_last=True)
        saved.finish()
        raise RunStoppedError(number, iteration=iteration, run_dir=self.run_dir)

    def _iterate(self, iteration: int) -> dict[str, Any]:
        """One optimizer step; its metrics, of which only the last stage has those of the loss."""
        policy = NonFinitePolicy(
            self.plan.training, self.groups, self.counts, self._teacher_names()
        )
        watchdog.enter("reading data", iteration=iteration)
        with self.clock.phase("data"):
            batches = self.microbatches()
        watchdog.enter("training")
        # Before the teachers' work is queued, behind which the host would wait for it.
        counts_ahead = GlobalCounts.ahead(batches, self.groups)
        with self.clock.phase("teacher"):
            microbatches = self.with_targets(batches)
        step = self.step_of(microbatches, iteration, counts_ahead)
        counts, learning_rate = step.counts, self.student.learning_rate
        begin_step(self.student.chunks, batches, self.groups)
        with self.clock.phase("student"):
            reports = self.student.forward_backward(self.clock.with_timed_loss(step), microbatches)
        with self.clock.phase("data"):
            # A GPU has the passes of this step in its queue: the host reads meanwhile.
            self.reader.read_next()
        metrics, finite = reduce_reports(reports, self.groups)
        metrics |= loads(self.student.chunks, self.plan.student.num_layers)
        if self.rollouts is not None:
            surprises = (report.surprise for report in reports if report.surprise is not None)
            self.rollouts.log(iteration, next(surprises, None))
        if policy.check_loss(metrics.get("loss", 0.0), finite, iteration=iteration):
            watchdog.enter("updating")
            with self.clock.phase("optimizer"):
                metrics["grad_norm"] = self.student.update()
            if policy.check_gradient(metrics["grad_norm"], iteration=iteration):
                update_biases(self.student.chunks)
                for average in self.student.averages:
                    average.update()
                has_both = counts.tokens > 0 and counts.compared > 0
                observe(self.weighting, metrics, step.gradients, self.groups, has_both=has_both)
        return finite_only(metrics) | {
            "learning_rate": learning_rate,
            "tokens": counts.tokens,
            "chunks": counts.chunks,
            **self.counts.metrics(),
            **self._counts_of_teachers(counts),
            **self._weights_of_terms(step),
            **(self.rollouts.metrics() if self.rollouts else {}),
            **(dataclasses.asdict(counts.chunk_counts) if self.step.term else {}),
        }

    def _teacher_names(self) -> tuple[str, ...]:
        """Names of the teachers for errors, in the order of their terms."""
        term = self.step.term
        if term is None or term.is_single:
            return ONE_TEACHER
        return tuple(f"teacher {name}" for name in term.names)

    def with_targets(self, batches: list[Microbatch]) -> list[MicrobatchWithTargets]:
        """Add to each microbatch the teachers' targets, which the last stage has."""
        if self.step.term is None:
            return [MicrobatchWithTargets(batch, {}, {}) for batch in batches]
        return self.step.term.with_targets(batches, self._targets(batches))

    def step_of(
        self,
        microbatches: list[MicrobatchWithTargets],
        iteration: int,
        counts: GlobalCounts | None = None,
    ) -> StudentStep:
        """The forward step of one global batch, with its counts and weights.

        Args:
            counts: The result of ``GlobalCounts.ahead``.
        """
        term, is_last = self.step.term, self.groups.is_last_stage
        if counts is None:
            assert term is not None, "without teachers the data gives all counts"
            counts = GlobalCounts.of(microbatches, self.groups, term)
        gradients = None
        if self.weighting.observes == "gradient_norms" and is_last:
            gradients = layer_gradients(self.student.chunks[-1], self.groups)
        return dataclasses.replace(
            self.step,
            counts=counts,
            term_weights=self.weighting.weights(iteration - 1),
            teacher_weights=term.weights(microbatches, self.groups) if term and is_last else None,
            gradients=gradients,
        )

    def _counts_of_teachers(self, counts: GlobalCounts) -> dict[str, int]:
        if self.step.term is None:
            return {}
        of_each = {
            f"compared/{name.removeprefix('kd/')}": count
            for name, count in counts.of_parts.items()
            if name.startswith("kd/") and not self.step.term.is_single
        }
        return {"compared": counts.compared, **of_each}

    def _weights_of_terms(self, step: StudentStep) -> dict[str, float]:
        """Current weights of the terms, where they are not fixed."""
        if self.plan.loss.weighting == "fixed":
            return {}
        return {f"{name}_weight": weight for name, weight in step.term_weights.items()}

    def microbatches(self) -> list[Microbatch]:
        """This replica's part of the next global batch, on its device.

        Remote teachers are sent it and the batches that are read ahead.
        """
        reader = self.reader
        on_host = self._completed(reader.take())
        known = [(reader.iteration, on_host)]
        for iteration, rows in reader.ahead():
            ready = [batch for batch in rows if isinstance(batch, Microbatch)]
            if len(ready) == len(rows):
                known.append((iteration, ready))
        for name, teacher in remote_teachers(self.teachers).items():
            teacher.ask_ahead(
                [
                    (iteration, [batch.teachers[name] for batch in batches])
                    for iteration, batches in known
                ]
            )
        microbatches = [self._on_device(batch) for batch in on_host]
        faults = reader.faults_since_asked()
        for document in faults.refused if self.groups.is_replica_main else ():
            log_refused(self.run_dir, document, iteration=reader.iteration)
        data = self.plan.data
        skips = data.bad_documents == "skip" or data.conversations
        if data.num_workers or skips or self.data.has_student_ids:
            self.counts.add_data_faults(
                refused=len(faults.refused) * self.groups.is_replica_main,
                retokenized=faults.retokenized * self.groups.is_replica_main,
                restarts=faults.restarts,
                device=self.groups.device,
            )
        return microbatches

    def _read(self, samples: list[PackedSample]) -> Microbatch | list[PackedSample]:
        """Rows as a microbatch on the host, unless prompts among them are to be completed."""
        return samples if self.rollouts is not None else self._on_host(samples)

    def _completed(self, batches: list[Microbatch | list[PackedSample]]) -> list[Microbatch]:
        """Microbatches on the host, with all prompts completed by the student as it stands."""
        if self.rollouts is None:
            return [batch for batch in batches if isinstance(batch, Microbatch)]
        watchdog.enter("sampling")
        with self.clock.phase("rollouts"):
            steps = [(self.reader.iteration, _rows(batches))]
            steps += [(iteration, _rows(ahead)) for iteration, ahead in self.reader.ahead()]
            completed = self.rollouts.completed(steps)
        ready = [self._on_host(rows) for rows in completed]
        if (place := self.rollouts.logged_place) is not None:
            ready[place[0]] = dataclasses.replace(ready[place[0]], logged_row=place[1])
        return ready

    def collate(
        self, samples: list[PackedSample], *, held_out: HeldOut | None = None
    ) -> Microbatch:
        """Rows as a microbatch of this run, on its device.

        Args:
            held_out: Held-out text that the rows are from; None for training text.
        """
        return self._on_device(self._on_host(samples, held_out=held_out))

    def _on_host(
        self, samples: list[PackedSample], *, held_out: HeldOut | None = None
    ) -> Microbatch:
        sides = (held_out.dataset.collator if held_out else self.data.collator)(samples)
        term, context = self.step.term, ContextRank.of(self.groups.cp)
        plans = term.plans(sides) if term else {}
        completions, tiles = {}, None
        if self.step.linear is not None and self.groups.is_last_stage:
            tiles = cut_into_tiles(self.step.linear, sides, term.tables if term else {})
        elif term is not None:
            completions = term.completions(sides, plans)
        batch = Microbatch.of(sides, completions, tiles, context=context, plans=plans)
        batch = dataclasses.replace(batch, compared=term.compared(batch) if term else {})
        if self.groups.is_last_stage:
            recorded = {
                name: teacher.recorded(samples, self.data.collator, context)
                for name, teacher in self.cached_teachers.items()
            }
            batch = dataclasses.replace(batch, recorded=recorded)
        return batch

    def _on_device(self, batch: Microbatch) -> Microbatch:
        batch = batch.to(self.groups.device)
        return self.places(batch) if self.places else batch

    def _targets(self, batches: list[Microbatch]) -> list[dict[str, TeacherTargets]]:
        """Targets by teacher for each microbatch; empty except on the last stage."""
        by_microbatch: list[dict[str, TeacherTargets]] = [{} for _ in batches]
        of_models: dict[int, list[TeacherTargets]] = {}
        for name, teacher in self.teachers.items():
            targets = of_models.get(id(teacher))
            if targets is None:
                # A model that is several teachers reads the same tokens as each of them.
                targets = teacher.targets([batch.teachers[name] for batch in batches])
                of_models[id(teacher)] = targets
            for by_teacher, target in zip(by_microbatch, targets, strict=False):
                by_teacher[name] = target
        for name, cached in self.cached_teachers.items() if self.groups.is_last_stage else ():
            for by_teacher, batch in zip(by_microbatch, batches, strict=True):
                by_teacher[name] = cached.targets(batch.recorded[name])
        return by_microbatch

    def _validate(self, data: HeldOut) -> HeldOutScores:
        global_batches = (
            [self.held_out_microbatch(data, rows) for rows in microbatches]
            for microbatches in data.global_batches(self.replica)
        )
        return measure_held_out(
            global_batches,
            student=self.student.ddp,
            student_shard=self.step.shard,
            teachers=self.teachers,
            next_token=self.step.next_token,
            groups=self.groups,
            tile_rows=self.plan.loss.linear_tile_rows if self.step.linear is not None else None,
            same_tokens=self.step.term.same_tokens(self.teachers) if self.step.term else None,
            kept=self.held_out_scores,
        )

    def held_out_microbatch(self, data: HeldOut, rows: list[PackedSample]) -> Microbatch:
        """Held-out rows of this replica as a microbatch on its device."""
        watchdog.tick()
        context = ContextRank.of(self.groups.cp)
        return self._on_device(Microbatch.of(data.dataset.collator(rows), {}, context=context))

    def _saved(self) -> SavedRun:
        term = self.step.term
        write_learned = None
        if term is not None and self.plan.loss.learned_projection:
            write_learned = partial(write_learned_projections, self.run_dir, term)
        return SavedRun(
            self.plan,
            groups=self.groups,
            student=self.student,
            batches=self.reader,
            record=self.run_record,
            counts=self.counts,
            parts={"weighting": self.weighting},
            write_learned=write_learned,
        )

    def _print_result(self, done: int) -> None:
        print(*result_lines(self.run_dir, done=done), sep="\n", flush=True)


def _rows(batches: list[Microbatch | list[PackedSample]]) -> list[list[PackedSample]]:
    return [batch for batch in batches if not isinstance(batch, Microbatch)]
