"""What spawned ranks run in the training tests."""

import dataclasses
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import yaml
from megatron.core import parallel_state

from megatron_ext.distributed import process_groups
from megatron_ext.distributed.layout import Layout
from megatron_ext.errors import MegatronExtError
from megatron_ext.losses import CompletionTable
from megatron_ext.projection import SparseProjection
from megatron_ext.teachers.megatron_teacher import MegatronTeacher
from megatron_ext.tokenizers import build_tokenizer
from megatron_ext.tokenizers.assets import METADATA_FILE
from megatron_ext.tokenizers.saved_tokenizer import load_saved
from megatron_ext.training import cpu_megatron
from megatron_ext.training.checkpoint import save_checkpoint
from megatron_ext.training.checkpoint_folder import checkpoint_path, set_latest_checkpoint
from megatron_ext.training.config import LossConfig
from megatron_ext.training.distill import build_trainer
from megatron_ext.training.inputs import read_inputs
from megatron_ext.training.metrics import read_metrics
from megatron_ext.training.models import build_gpt_model, sharded_weights
from megatron_ext.training.saved_run import SavedRun
from tests.training.added_objective import register
from tests.training.tiny_run import ITERATIONS, objective_run, student_run, teacher_run


def train_alone(rank, folder):
    """A teacher, the student's first weights, and the unsharded run that others are compared to."""
    _train_teacher(folder)
    train_layouts(rank, folder, [("alone", {})])


def _train_teacher(folder):
    """A teacher, and the student's first weights as a checkpoint."""
    _trainer(teacher_run(folder)).train()
    start = _trainer(student_run(folder, "start"))
    save_checkpoint(
        Path(start.run_dir) / "checkpoints",
        0,
        {**sharded_weights(start.student.chunks), "run": start.run_record},
        groups=start.groups,
        keep=1,
    )


def train_layouts(rank, folder, layouts):
    """One run per layout, one after the other, all from the same first weights."""
    for name, parallel in layouts:
        config = student_run(folder, name, **parallel)
        start = str(folder / "start" / "checkpoints")
        _trainer(dataclasses.replace(config, initial_checkpoint=start)).train()


SAVED = ("next_token", "dskd", "gold")
"""Objectives whose runs are read again; only ``dskd`` saves more than the student."""


def train_objectives(rank, folder, objectives, layouts):
    """Two steps by each objective under each layout, from the same first weights and teacher."""
    register()
    if not (folder / "teacher").exists():
        _train_teacher(folder)
    for layout, parallel in layouts:
        for name, (objective, options) in objectives.items():
            loss = LossConfig(objective=objective, options=options, ce_weight=0.5)
            config = objective_run(folder, f"{name}-{layout}", loss, **parallel)
            with nullcontext() if objective in SAVED else patch.object(SavedRun, "save"):
                _trainer(config).train()


def train_with_broken_teacher(rank, folder, parallel):
    """The error of a run whose teacher predicts NaN."""
    config = objective_run(folder, "broken", LossConfig(objective="strict_topk"), **parallel)
    trainer = _trainer(config)
    if trainer.groups.is_last_stage:
        assert isinstance(trainer.teacher, MegatronTeacher)
        with torch.no_grad():
            trainer.teacher.chunks[-1].decoder.final_layernorm.weight[0] = torch.nan
    try:
        trainer.train()
    except MegatronExtError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def resume_dskd_in_bf16(rank, folder):
    """Metrics of a run by ``dskd``, whole and with its last step done again."""
    loss = LossConfig(objective="dskd")
    config = objective_run(folder, "dskd-bf16", loss, use_distributed_optimizer=True)
    training = dataclasses.replace(config.training, precision="bf16", save_interval=1)
    config = dataclasses.replace(config, training=training)
    _trainer(config).train()
    whole = read_metrics(Path(config.run_dir))
    set_latest_checkpoint(checkpoint_path(Path(config.run_dir) / "checkpoints", 1), keep=2)
    _trainer(config).train()
    return whole, read_metrics(Path(config.run_dir))


def repeat_last_iteration(rank, folder, name, parallel):
    """Resume a finished run from the checkpoint before its last one."""
    config = student_run(folder, name, **parallel)
    if rank == 0:
        before_last = checkpoint_path(Path(config.run_dir) / "checkpoints", ITERATIONS - 1)
        set_latest_checkpoint(before_last, keep=2)
    dist.barrier()
    start = str(folder / "start" / "checkpoints")
    _trainer(dataclasses.replace(config, initial_checkpoint=start)).train()


def first_layer(rank, folder):
    """What this rank's stage draws for its first layer under two pipeline stages."""
    config = student_run(folder, "stages", pipeline_model_parallel_size=2)
    cpu_megatron.install()
    groups = process_groups.initialize(Layout(pipeline_model_parallel_size=2))
    gpt = build_gpt_model(
        config.student,
        padded_vocab_size=64,
        parallel=config.parallel,
        training=config.training,
        groups=groups,
    )
    return gpt.decoder.layers[0].mlp.linear_fc1.weight.detach()


def _trainer(config):
    """A trainer in a fresh layout over the ranks that are there."""
    cpu_megatron.install()
    parallel_state.destroy_model_parallel()
    groups = process_groups.initialize(config.parallel.layout)
    # To draw a run takes longer than a step of it; tests/cli/test_resume.py looks for the picture.
    patch("megatron_ext.training.trainer.plot_loss_curve").start()
    with ExitStack() as stack:
        for patched in _ONCE:
            stack.enter_context(patched())
        return build_trainer(config, groups, read_inputs(config, world_size=dist.get_world_size()))


def _load_saved(kind, folder):
    """Check a saved tokenizer, unless it is one that was checked before."""
    metadata = (folder / METADATA_FILE).read_bytes()
    if metadata not in _checked:
        load_saved(kind, folder)
        _checked.add(metadata)
    return None


_checked = set()
_tokenizer = cache(build_tokenizer)
_ONCE = (
    partial(patch, "megatron_ext.training.run_tokenizer.build_tokenizer", _tokenizer),
    partial(patch, "megatron_ext.tokenizers.text_tokenizer.load_saved", _load_saved),
    *(
        partial(patch.object, kind, "from_tokenizers", cache(kind.from_tokenizers))
        for kind in (SparseProjection, CompletionTable)
    ),
    # The same text, by libyaml.
    partial(patch, "yaml.SafeDumper", yaml.CSafeDumper),
)
"""What a rank that makes many runs does once: it reads each vocabulary, compares each pair."""
