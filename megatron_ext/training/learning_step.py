"""The forward step with the objectives of a run, their projections and their trained parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_ext.data.sampled_text import stop_tokens_of
from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.errors import ProjectionError
from megatron_ext.huggingface.checkpoint_files import generation_stops
from megatron_ext.losses import LearnedProjection, Objective, StopSet
from megatron_ext.losses.objective import ModelPair
from megatron_ext.projection import SparseProjection
from megatron_ext.teachers.megatron_teacher import head_weight
from megatron_ext.training.checkpoints.folder import latest_checkpoint, newest_checkpoint
from megatron_ext.training.configuration.config import TEACHER
from megatron_ext.training.configuration.rollouts import RolloutConfig
from megatron_ext.training.forward_step import StudentStep
from megatron_ext.training.megatron_models.models import DTYPES
from megatron_ext.training.megatron_models.student_head import StudentHidden, linear_forms
from megatron_ext.training.objective import (
    RunConstants,
    lower_layers,
    next_token_beside,
    teacher_objective,
    with_projectors,
)
from megatron_ext.training.run_folder import CHECKPOINTS, projection_file
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.teacher_term import TeacherTerm, make_aggregator
from megatron_ext.training.teachers.live_teacher import LoadedTeacher, StudentParts
from megatron_ext.training.validation import same_tokens

PROJECTORS = "distillation_projectors"
"""Submodule of the student with an objective's projectors, so that DDP, optimizer and checkpoint
include them. With several teachers, an underscore and the teacher's name follow."""

PROJECTION = "distillation_projection"
"""Submodule of the student with the shares of a learned projection, likewise."""


def learning_step(
    run: StudentParts, teachers: Sequence[LoadedTeacher], *, scales_losses: bool = False
) -> StudentStep:
    """The forward step of a run, with its objectives and the constants that they read.

    Parameters of objectives become submodules of the student.

    Args:
        scales_losses: Whether the loop multiplies losses before the backward pass. Otherwise the
            linear form adds the head's gradient to DDP's buffer as it computes it, in fp32.

    Collectives: on the last stage those of ``Objective.make_projectors``.
    """
    loss, is_last = run.plan.loss, run.groups.is_last_stage
    objectives: dict[str, Objective] = {}
    constants: dict[str, RunConstants] = {}
    for teacher in teachers:
        name = teacher.plan.name
        objective = teacher_objective(teacher.plan)
        if is_last:
            constants[name] = _constants(run, teacher, objective)
            if objective.projector_starts:
                pair = _pair(run, teacher, constants[name])
                objective, projectors = with_projectors(objective, teacher.plan, pair)
                _add(run, PROJECTORS, teacher.plan, projectors)
        objectives[name] = objective
    reads_hidden = any(objective.needs.hidden for objective in objectives.values())
    layers = {n for teacher in teachers for n in lower_layers(teacher.plan, of_student=True)}
    next_token = next_token_beside(loss, objectives.values())
    term = linear = None
    if loss.linear:
        linear = linear_forms(
            next_token,
            objectives,
            tile_rows=loss.linear_tile_rows,
            into_main_grad=not scales_losses and _head_learns(run),
        )
    if teachers:
        plans = {teacher.plan.name: teacher.plan for teacher in teachers}
        term = TeacherTerm(
            aggregator=make_aggregator(loss, plans, objectives),
            constants=constants,
            is_single=teachers[0].plan.is_only,
            context=ContextRank.of(run.groups.cp),
            routes=run.inputs.data.routes,
        )
    return StudentStep(
        shard=run.shard,
        next_token=next_token,
        term=term,
        hidden=StudentHidden(run.chunks[-1], layers) if reads_hidden and is_last else None,
        linear=linear,
        sampling_temperature=_compared_temperature(run.plan.data.rollouts),
    )


def _compared_temperature(rollouts: RolloutConfig | None) -> float | None:
    """Temperature at which the student is compared with the servers that sample; None without any,
    and where they leave tokens out, so that their numbers are of other distributions."""
    if rollouts is None or rollouts.engine is None or rollouts.top_p < 1:
        return None
    return rollouts.temperature or None


def _head_learns(run: StudentParts) -> bool:
    """Whether this rank has a head whose weights learn, to which DDP gives a buffer."""
    return run.groups.is_last_stage and head_weight(run.chunks[-1]).requires_grad


def run_projection(teacher: TeacherPlan, run: StudentParts) -> SparseProjection | None:
    """A teacher's configured projection, or the run's own where its objective needs one.

    The run builds its own once, on the main rank. A file left by a start without a checkpoint is
    built again: it may be of another pair.

    Collectives: that of ``ProcessGroups.on_main``, where the run builds its projection.
    """
    method = teacher_objective(teacher).needs.projection
    read = run.inputs.teachers[teacher.name]
    if read.projection is not None or method is None:
        return read.projection
    tokenizer, run_dir = run.inputs.tokenizer, run.plan.run_dir
    path = run_dir / projection_file(teacher.name)

    def build() -> None:
        is_resumed = latest_checkpoint(run_dir / CHECKPOINTS) is not None
        if not (is_resumed and path.exists()):
            run_dir.mkdir(parents=True, exist_ok=True)
            SparseProjection.from_tokenizers(tokenizer, read.tokenizer, method).save(path)

    run.groups.on_main(build)
    try:
        return SparseProjection.load(path, student=tokenizer, teacher=read.tokenizer)
    except ProjectionError as error:
        # Of another pair only where the run was started with it: else it was built here.
        raise ProjectionError(
            f"the run was started with other tokenizers, or its projection is damaged: {error}; "
            "use another run_dir, or the tokenizers that the run was started with"
        ) from error


def _constants(run: StudentParts, teacher: LoadedTeacher, objective: Objective) -> RunConstants:
    needs, device = objective.needs, run.groups.device
    tokenizers = run.inputs.tokenizer, run.tokenizer(teacher.plan)
    layout = teacher.laid_out and teacher.laid_out.layout
    is_learned = teacher.plan.loss.learned_projection and objective.learns_projection
    constants = RunConstants.of(
        dataclasses.replace(needs, shard=needs.shard and not is_learned),
        tokenizers=tokenizers,
        shards=(run.shard, teacher.shard),
        projection=teacher.projection,
        layout=layout,
        device=device,
    )
    if run.inputs.data.held_out:
        table = same_tokens(*tokenizers, layout=layout, device=device)
        constants = dataclasses.replace(constants, same_tokens=table)
    if run.inputs.data.texts is not None:
        # The average of a student's weights has the student's files.
        of_model = teacher.plan.config.checkpoint or run.plan.run_dir
        stops = stop_tokens_of(tokenizers[1])
        stops |= generation_stops(newest_checkpoint(of_model) or of_model)
        if layout is not None:
            known = [token for token in stops if token < len(layout.teacher.places)]
            stops = frozenset(layout.teacher.places[known].tolist())
        constants = dataclasses.replace(constants, stops=StopSet.of(stops, teacher.shard, device))
    if not is_learned:
        return constants
    assert teacher.projection is not None
    learned = LearnedProjection(
        teacher.projection, student_shard=run.shard, teacher_shard=teacher.shard, device=device
    )
    _add(run, PROJECTION, teacher.plan, learned)
    return dataclasses.replace(constants, learned=learned)


def _add(run: StudentParts, submodule: str, teacher: TeacherPlan, module: torch.nn.Module) -> None:
    """Make ``module`` a submodule of the student, in the student's precision.

    megatron-core's optimizers keep fp32 copies, and cannot save parameters of two dtypes.
    """
    name = submodule if teacher.name == TEACHER else f"{submodule}_{teacher.name}"
    dtype = DTYPES[teacher.training.precision]
    run.chunks[-1].add_module(name, module.to(device=run.groups.device, dtype=dtype))


def _pair(run: StudentParts, teacher: LoadedTeacher, constants: RunConstants) -> ModelPair:
    return ModelPair(
        student_hidden=run.plan.student.hidden_size,
        teacher_hidden=teacher.plan.config.model.hidden_size,
        student_layers=run.plan.student.num_layers,
        teacher_layers=teacher.plan.config.model.num_layers,
        seed=teacher.plan.training.seed,
        student_shard=run.shard,
        teacher_shard=teacher.shard,
        student_head=head_weight(run.chunks[-1]),
        teacher_head=teacher.head,
        match=constants.match,
    )


def write_learned_projections(run_dir: Path, term: TeacherTerm) -> None:
    """Write the current shares as files that another run can start from.

    One rank of the last stage calls it, which has the projections.

    Raises:
        ProjectionError: A file cannot be written.
    """
    for name, constants in term.constants.items():
        if constants.learned is not None:
            path = run_dir / projection_file(name, is_learned=True)
            constants.learned.to_projection().save(path)
