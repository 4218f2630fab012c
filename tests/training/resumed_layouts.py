"""What spawned ranks run in the tests of resuming under another layout."""

import dataclasses
import random

import numpy as np
import torch

from megatron_ext.training.config import DataConfig, LossConfig
from tests.training.rank_functions import _trainer
from tests.training.tiny_run import student_run


def go_on(rank, folder, layouts):
    """One run, stretch by stretch: up to an iteration, under a layout; what each stretch saw."""
    return [_stretch(folder, iterations, parallel) for iterations, parallel in layouts]


def _stretch(folder, iterations, parallel):
    config = student_run(folder, "run", **parallel)
    config = dataclasses.replace(
        config,
        teacher=None,
        data=DataConfig(train=config.data.train, validation=config.data.validation),
        loss=LossConfig(objective="next_token"),
        training=dataclasses.replace(
            config.training, train_iters=iterations, micro_batch_size=1, global_batch_size=4
        ),
        # Of the iterations trained by then; the schedule would follow their number.
        optimizer=dataclasses.replace(config.optimizer, lr_decay_style="constant"),
    )
    trainer = _trainer(config)
    done = trainer._saved().load()
    found = {"done": done, "loaded": _held_out(trainer), "numbers": _numbers()}
    # It loads once more, the numbers drawn included.
    trainer.train()
    return found | {"trained": _held_out(trainer), "next_numbers": _numbers()}


def _held_out(trainer):
    assert trainer.data.held_out is not None
    return trainer._validate(trainer.data.held_out).student


def _numbers():
    """The next number of each generator."""
    return [random.random(), float(np.random.random()), float(torch.rand(()))]
