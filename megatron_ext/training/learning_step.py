"""From a student and a teacher to the forward step that learns: everything an objective reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron.core.models.gpt import GPTModel

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import DskdProjectors
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.building.options import ProjectionMethod
from megatron_ext.projection.layout import VocabularyLayout
from megatron_ext.teachers.megatron_teacher import head_weight
from megatron_ext.training.checkpoint_folder import latest_checkpoint
from megatron_ext.training.config import DistillConfig
from megatron_ext.training.forward_step import StudentStep
from megatron_ext.training.inputs import Inputs
from megatron_ext.training.models import DTYPES
from megatron_ext.training.objective import make_objective, needs_of, projector_start
from megatron_ext.training.run_constants import RunConstants
from megatron_ext.training.run_folder import CHECKPOINTS, PROJECTION_FILE
from megatron_ext.training.student_hidden import StudentHidden

PROJECTORS = "distillation_projectors"
"""Where the student keeps the projectors of ``dskd``: DDP, optimizer and checkpoint find them."""


def learning_step(
    step: StudentStep,
    *,
    student: GPTModel,
    teacher: GPTModel,
    teacher_shard: VocabShard,
    config: DistillConfig,
    inputs: Inputs,
    projection: SparseProjection | None,
    layout: VocabularyLayout | None,
    groups: ProcessGroups,
) -> StudentStep:
    """``step`` with the run's objective and what it reads.

    An objective with parameters gives them to ``student``, which is not wrapped yet.

    Args:
        projection: What ``run_projection`` returned, by ids.
        layout: The order of both heads' rows; None: that of the ids.

    Collectives: on the last stage those of ``DskdProjectors.from_heads``, where ``dskd`` starts so.
    """
    assert inputs.teacher_tokenizer is not None
    needs = needs_of(make_objective(config.loss))
    if not groups.is_last_stage:
        return dataclasses.replace(step, distillation=make_objective(config.loss))
    constants = RunConstants.of(
        needs,
        tokenizers=(inputs.tokenizer, inputs.teacher_tokenizer),
        shards=(step.shard, teacher_shard),
        projection=projection,
        layout=layout,
        device=groups.device,
    )
    projectors = None
    if needs.hidden:
        projectors = _projectors(config, student, teacher, (step.shard, teacher_shard), constants)
        # In the student's own precision: megatron-core's optimizers keep fp32 copies, and cannot
        # save parameters of two dtypes.
        dtype = DTYPES[config.training.precision]
        student.add_module(PROJECTORS, projectors.to(device=groups.device, dtype=dtype))
    return dataclasses.replace(
        step,
        distillation=make_objective(config.loss, projectors),
        constants=constants,
        hidden=StudentHidden(student) if needs.hidden else None,
    )


def run_projection(
    config: DistillConfig, inputs: Inputs, groups: ProcessGroups
) -> SparseProjection | None:
    """The configured projection, or the run's own where its objective needs one.

    Collectives: that of ``ProcessGroups.on_main``, where the run builds its projection.
    """
    method = needs_of(make_objective(config.loss)).projection
    if inputs.projection is not None or method is None:
        return inputs.projection
    return _own_projection(config, inputs, method, groups)


def _projectors(
    config: DistillConfig,
    student: GPTModel,
    teacher: GPTModel,
    shards: tuple[VocabShard, VocabShard],
    constants: RunConstants,
) -> DskdProjectors:
    assert config.teacher is not None
    if projector_start(config.loss) == "heads":
        assert constants.match is not None
        return DskdProjectors.from_heads(
            head_weight(student),
            head_weight(teacher),
            constants.match,
            student_shard=shards[0],
            teacher_shard=shards[1],
        )
    return DskdProjectors(
        student_hidden=config.student.hidden_size,
        teacher_hidden=config.teacher.model.hidden_size,
        seed=config.training.seed,
    )


def _own_projection(
    config: DistillConfig, inputs: Inputs, method: ProjectionMethod, groups: ProcessGroups
) -> SparseProjection:
    """The run's own projection, built once by the main rank.

    One that a start without a checkpoint left is built again: it may be of another pair.
    """
    tokenizer, teacher = inputs.tokenizer, inputs.teacher_tokenizer
    assert teacher is not None
    run_dir = Path(config.run_dir)
    path = run_dir / PROJECTION_FILE

    def build() -> None:
        is_resumed = latest_checkpoint(run_dir / CHECKPOINTS) is not None
        if not (is_resumed and path.exists()):
            run_dir.mkdir(parents=True, exist_ok=True)
            SparseProjection.from_tokenizers(tokenizer, teacher, method).save(path)

    groups.on_main(build)
    return SparseProjection.load(path, student=tokenizer, teacher=teacher)
