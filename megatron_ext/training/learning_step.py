"""The forward step with the objectives of a run, their projections and their trained parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel

from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import DskdProjectors, LearnedProjection, Objective
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.speller import ProjectionMethod
from megatron_ext.teachers.megatron_teacher import head_weight
from megatron_ext.training.checkpoint_folder import latest_checkpoint
from megatron_ext.training.config import TEACHER, LossConfig
from megatron_ext.training.forward_step import StudentStep
from megatron_ext.training.inputs import Inputs
from megatron_ext.training.models import DTYPES
from megatron_ext.training.objective import RunConstants, projector_start, teacher_objective
from megatron_ext.training.run_folder import CHECKPOINTS, projection_file
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.student_head import StudentHidden, linear_forms
from megatron_ext.training.teacher_term import TeacherTerm, make_aggregator
from megatron_ext.training.teachers.live_teacher import LoadedTeacher
from megatron_ext.training.validation import same_tokens

PROJECTORS = "distillation_projectors"
"""Submodule of the student with the projectors of ``dskd``, so that DDP, optimizer and checkpoint
include them. With several teachers, an underscore and the teacher's name follow."""

PROJECTION = "distillation_projection"
"""Submodule of the student with the shares of a learned projection, likewise."""


def learning_step(
    step: StudentStep,
    teachers: Sequence[LoadedTeacher],
    *,
    student: GPTModel,
    loss: LossConfig,
    inputs: Inputs,
    groups: ProcessGroups,
) -> StudentStep:
    """``step`` with the objectives of a run and the constants that they read.

    Parameters of objectives become submodules of ``student``, which is not wrapped yet.

    Collectives: on the last stage those of ``DskdProjectors.from_heads``, where ``dskd`` starts
    from the heads.
    """
    objectives: dict[str, Objective] = {}
    constants: dict[str, RunConstants] = {}
    for teacher in teachers:
        name = teacher.plan.name
        objective = teacher_objective(teacher.plan)
        if groups.is_last_stage:
            constants[name] = _constants(inputs, step, teacher, objective, student, groups)
            if objective.needs.hidden:
                projectors = _projectors(student, teacher, step.shard, constants[name])
                _add(student, PROJECTORS, teacher.plan, projectors, groups)
                objective = teacher_objective(teacher.plan, projectors)
        objectives[name] = objective
    reads_hidden = any(objective.needs.hidden for objective in objectives.values())
    step = dataclasses.replace(
        step, hidden=StudentHidden(student) if reads_hidden and groups.is_last_stage else None
    )
    if loss.linear:
        forms = linear_forms(step.next_token, objectives, tile_rows=loss.linear_tile_rows)
        step = dataclasses.replace(step, linear=forms)
    if not objectives:
        return step
    term = TeacherTerm(
        aggregator=make_aggregator(
            loss, {teacher.plan.name: teacher.plan for teacher in teachers}, objectives
        ),
        constants=constants,
        is_single=teachers[0].plan.is_only,
        context=ContextRank.of(groups.cp),
    )
    return dataclasses.replace(step, term=term)


def run_projection(
    teacher: TeacherPlan, inputs: Inputs, run_dir: Path, groups: ProcessGroups
) -> SparseProjection | None:
    """A teacher's configured projection, or the run's own where its objective needs one.

    Collectives: that of ``ProcessGroups.on_main``, where the run builds its projection.
    """
    method = teacher_objective(teacher).needs.projection
    configured = inputs.teachers[teacher.name].projection
    if configured is not None or method is None:
        return configured
    return _built_projection(inputs, run_dir, teacher.name, method, groups)


def _constants(
    inputs: Inputs,
    step: StudentStep,
    teacher: LoadedTeacher,
    objective: Objective,
    student: GPTModel,
    groups: ProcessGroups,
) -> RunConstants:
    needs, tokenizer = objective.needs, inputs.teachers[teacher.plan.name].tokenizer
    layout = teacher.laid_out and teacher.laid_out.layout
    is_learned = teacher.plan.loss.learned_projection and objective.learns_projection
    constants = RunConstants.of(
        dataclasses.replace(needs, shard=needs.shard and not is_learned),
        tokenizers=(inputs.tokenizer, tokenizer),
        shards=(step.shard, teacher.shard),
        projection=teacher.projection,
        layout=layout,
        device=groups.device,
    )
    if inputs.data.held_out:
        table = same_tokens(inputs.tokenizer, tokenizer, layout=layout, device=groups.device)
        constants = dataclasses.replace(constants, same_tokens=table)
    if not is_learned:
        return constants
    assert teacher.projection is not None
    learned = LearnedProjection(
        teacher.projection,
        student_shard=step.shard,
        teacher_shard=teacher.shard,
        device=groups.device,
    )
    _add(student, PROJECTION, teacher.plan, learned, groups)
    return dataclasses.replace(constants, learned=learned)


def _add(
    student: GPTModel,
    submodule: str,
    teacher: TeacherPlan,
    module: torch.nn.Module,
    groups: ProcessGroups,
) -> None:
    """Make ``module`` a submodule of the student, in the student's precision.

    megatron-core's optimizers keep fp32 copies, and cannot save parameters of two dtypes.
    """
    name = submodule if teacher.name == TEACHER else f"{submodule}_{teacher.name}"
    dtype = DTYPES[teacher.training.precision]
    student.add_module(name, module.to(device=groups.device, dtype=dtype))


def _projectors(
    student: GPTModel, teacher: LoadedTeacher, shard: VocabShard, constants: RunConstants
) -> DskdProjectors:
    if projector_start(teacher.plan.loss) == "heads":
        assert constants.match is not None
        assert teacher.head is not None, "checked before"
        return DskdProjectors.from_heads(
            head_weight(student),
            teacher.head,
            constants.match,
            student_shard=shard,
            teacher_shard=teacher.shard,
        )
    return DskdProjectors(
        student_hidden=student.config.hidden_size,
        teacher_hidden=teacher.plan.config.model.hidden_size,
        seed=teacher.plan.training.seed,
    )


def _built_projection(
    inputs: Inputs,
    run_dir: Path,
    name: str,
    method: ProjectionMethod,
    groups: ProcessGroups,
) -> SparseProjection:
    """The projection that the run builds itself, once, on the main rank.

    A file left by a start without a checkpoint is built again: it may be of another pair.
    """
    tokenizer, teacher = inputs.tokenizer, inputs.teachers[name].tokenizer
    path = run_dir / projection_file(name)

    def build() -> None:
        is_resumed = latest_checkpoint(run_dir / CHECKPOINTS) is not None
        if not (is_resumed and path.exists()):
            run_dir.mkdir(parents=True, exist_ok=True)
            SparseProjection.from_tokenizers(tokenizer, teacher, method).save(path)

    groups.on_main(build)
    return SparseProjection.load(path, student=tokenizer, teacher=teacher)


def learned_projection_file(teacher: str) -> str:
    """File name of a run's learned projection to a teacher's vocabulary."""
    suffix = "" if teacher == TEACHER else f"-{teacher}"
    return f"learned_projection{suffix}.safetensors"


def write_learned_projections(run_dir: Path, term: TeacherTerm) -> None:
    """Write the current shares as files that another run can start from.

    One rank of the last stage calls it, which has the projections.

    Raises:
        ProjectionError: A file cannot be written.
    """
    for name, constants in term.constants.items():
        if constants.learned is not None:
            path = run_dir / learned_projection_file(name)
            constants.learned.to_projection().save(path)
