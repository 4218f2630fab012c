"""A run's start as far as it can be checked without a model, and an estimate of its resources.

No process group is joined, megatron-core is not imported, no model is built and no file is left:
the index of the text goes to a temporary folder.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec

import torch

from megatron_ext.distributed.layout import student_processes
from megatron_ext.projection import SparseProjection
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.training.checkpoints.folder import find_checkpoint, latest_checkpoint
from megatron_ext.training.checkpoints.model_check import check_model
from megatron_ext.training.configuration.config import DistillConfig
from megatron_ext.training.dry_run.plan import Plan, pair_cost
from megatron_ext.training.dry_run.report import report, summary
from megatron_ext.training.inputs import Inputs, read_inputs
from megatron_ext.training.objective import head_rows, state_layers, teacher_objective
from megatron_ext.training.run_folder import CHECKPOINTS
from megatron_ext.training.run_loss import with_linear_form, with_vocabulary_layout
from megatron_ext.training.run_plan import RunPlan, TeacherPlan


def dry_run(config: DistillConfig, *, world_size: int, has_flash: bool | None = None) -> str:
    """Make all checks of ``megatron-ext distill`` before a model is built, and estimate the run.

    Args:
        world_size: Number of processes, a teacher's own included.
        has_flash: Whether layers will be Transformer Engine's; None for whether it is installed.

    Returns:
        The report for the user.

    Raises:
        MegatronExtError: Anything that is wrong with the start.
    """
    if has_flash is None:
        has_flash = find_spec("transformer_engine") is not None
    world_size = student_processes(world_size, config.teacher_ranks)
    with tempfile.TemporaryDirectory() as folder:
        data = dataclasses.replace(config.data, index_cache=folder, alignment_cache=None)
        inputs = read_inputs(dataclasses.replace(config, data=data), world_size=world_size)
        data_summary = inputs.data.summary()
    plan = _plan(config, inputs, world_size=world_size, has_flash=has_flash)
    run = plan.run
    compared = _check_checkpoints(run, config.initial_checkpoint)
    pairs = {
        name: pair_cost(
            projection,
            plan.student,
            plan.teachers[name],
            is_laid_out=run.training.vocabulary_layout == "co_sharded",
        )
        for name, projection in _projections(run.teachers, inputs).items()
    }
    return report(dataclasses.replace(plan, pairs=pairs), data_summary, compared, inputs.doubts)


def start_summary(config: DistillConfig, inputs: Inputs, *, world_size: int) -> str:
    """The run that is about to start, in about ten lines.

    Args:
        world_size: Number of the student's processes.
    """
    has_flash = find_spec("transformer_engine") is not None
    plan = _plan(config, inputs, world_size=world_size, has_flash=has_flash)
    latest = latest_checkpoint(plan.run.run_dir / CHECKPOINTS)
    start = config.initial_checkpoint if latest is None else f"{latest}, to resume the run"
    return summary(plan, inputs.data.summary(), start=start)


def _plan(config: DistillConfig, inputs: Inputs, *, world_size: int, has_flash: bool) -> Plan:
    on_gpu, vocab_size = has_flash or torch.cuda.is_available(), inputs.tokenizer.vocab_size
    config = with_vocabulary_layout(config, on_gpu=on_gpu)
    config = with_linear_form(config, on_gpu=on_gpu, vocab_size=vocab_size)
    run = RunPlan.of(config)
    return Plan.of(
        run,
        world_size=world_size,
        vocab_size=inputs.tokenizer.vocab_size,
        teacher_rows={
            name: head_rows(teacher, inputs.teachers[name].tokenizer.vocab_size)
            for name, teacher in run.teachers.items()
        },
        forms=_forms(run.teachers, inputs),
        state_layers=state_layers(run.teachers),
        has_flash=has_flash,
    )


def _check_checkpoints(run: RunPlan, initial_checkpoint: str | None) -> dict[str, bool]:
    """Every checkpoint that the run would load, and whether it says which model it is of."""
    compared = {}
    latest = latest_checkpoint(run.run_dir / CHECKPOINTS)
    if latest is None and initial_checkpoint:
        latest = find_checkpoint(initial_checkpoint, where="initial_checkpoint")
    if latest is not None:
        compared[str(latest)] = check_model(latest, run.student, learns=True)
    for teacher in run.teachers.values():
        if teacher.config.ema_decay is not None:
            continue
        checkpoint = teacher.checkpoint
        if teacher.config.library == "huggingface":
            # Compared before, with the check of its files.
            compared[str(checkpoint)] = True
            continue
        compared[str(checkpoint)] = check_model(checkpoint, teacher.config.model)
    return compared


def _forms(teachers: Mapping[str, TeacherPlan], inputs: Inputs) -> dict[str, TargetForm]:
    """Forms of the targets of remote and cached teachers."""
    from megatron_ext.training.teachers.target_cache import TargetCache
    from megatron_ext.training.teachers.target_checks import served_form

    forms = {}
    for name, teacher in teachers.items():
        if teacher.config.cache is not None:
            forms[name] = TargetCache(teacher.config.cache).form
        elif teacher.config.is_remote:
            forms[name] = served_form(teacher, inputs.teachers[name].tokenizer)
    return forms


def _projections(plans: Mapping[str, TeacherPlan], inputs: Inputs) -> dict[str, SparseProjection]:
    """Configured projections, and those that the run would build, built in memory."""
    projections = {}
    for name, plan in plans.items():
        teacher, method = inputs.teachers[name], teacher_objective(plan).needs.projection
        if teacher.projection is not None:
            projections[name] = teacher.projection
        elif method is not None:
            projections[name] = SparseProjection.from_tokenizers(
                inputs.tokenizer, teacher.tokenizer, method
            )
    return projections
