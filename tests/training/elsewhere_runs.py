"""Two steps of a student whose teachers are in different places."""

import dataclasses
from pathlib import Path
from unittest.mock import patch

import yaml

from megatron_ext.training.config import DataConfig, LossConfig, ParallelConfig, TrainingConfig
from megatron_ext.training.run_folder import config_values
from megatron_ext.training.saved_run import SavedRun
from megatron_ext.training.teacher_config import ServingConfig
from tests.training.rank_functions import _train_teacher, _trainer
from tests.training.tiny_run import student_run

ITERATIONS = 2


def elsewhere_run(folder, name, teachers, *, iterations=ITERATIONS, loss=None, **parallel):
    """A run from the first weights in ``folder``, with teachers of one checkpoint.

    Args:
        teachers: By name the fields of each; ``serving`` as a mapping.
    """
    config = student_run(folder, name)
    assert config.teacher is not None
    return dataclasses.replace(
        config,
        teacher=None,
        teachers={key: _teacher(config.teacher, **fields) for key, fields in teachers.items()},
        data=DataConfig(train=config.data.train),
        loss=loss or LossConfig(temperature=1.5, ce_weight=0.5),
        # So that the first steps of a run are the same however many follow.
        optimizer=dataclasses.replace(config.optimizer, lr_decay_style="constant"),
        training=TrainingConfig(
            train_iters=iterations, micro_batch_size=2, global_batch_size=4, save_interval=1000
        ),
        parallel=ParallelConfig(**{"distributed_timeout_minutes": 2} | parallel),
        initial_checkpoint=str(folder / "start" / "checkpoints"),
    )


def write_config(config):
    """The configuration as a file beside the run's folder; its path."""
    path = Path(f"{config.run_dir}.yaml")
    path.write_text(yaml.safe_dump(config_values(config), sort_keys=False))
    return str(path)


def train_beside(rank, folder, runs):
    """A teacher, first weights, and runs with all teachers on the student's ranks."""
    _train_teacher(folder)
    for name, (teachers, loss) in runs.items():
        with patch.object(SavedRun, "save"):
            _trainer(elsewhere_run(folder, name, teachers, loss=loss)).train()


def _teacher(teacher, serving=None, **fields):
    return dataclasses.replace(teacher, serving=ServingConfig(**serving or {}), **fields)
