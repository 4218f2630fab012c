"""What spawned ranks run in the tests of what a run leaves and says: TP2."""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from megatron_ext.training.config import LossConfig
from megatron_ext.training.learning_step import learned_projection_file
from megatron_ext.training.metrics import read_metrics
from tests.training.rank_functions import _train_teacher, _trainer
from tests.training.tiny_run import changed, objective_run, student_run

TP2 = {"tensor_model_parallel_size": 2}
TILE_ROWS = 7


def leave_results(rank, folder):
    """Runs that learn a projection, measure by tiles, and read ids; what each came to."""
    _train_teacher(folder)
    return {
        "learned": _learn_projection(folder),
        "measured": _measure(folder),
        "ids": _read_ids(folder),
    }


def _learn_projection(folder):
    """Shares after two steps, and those that a run from their file begins with."""
    loss = LossConfig(learned_projection=True, kd_weight=30.0)
    config = changed(objective_run(folder, "learned", loss, **TP2), training={"save_interval": 1})
    trainer = _trainer(config)
    start = _shares(trainer)
    trainer.train()
    file = Path(config.run_dir) / learned_projection_file("teacher")
    _of(trainer).to_projection().save(folder / f"trained-{dist.get_rank()}.safetensors")
    again = _trainer(changed(config, run_dir=str(folder / "again"), projection=str(file)))
    return {"start": start, "trained": _shares(trainer), "again": _shares(again)}


def _of(trainer):
    return trainer.step.term.constants["teacher"].learned


def _shares(trainer):
    return _of(trainer)._shares().detach().clone()


class _Watched:
    """Cross-entropy that notes of how many positions it has seen logits at once."""

    def __init__(self, objective):
        self._objective = objective
        self.rows = []

    def __call__(self, inputs):
        self.rows.append(inputs.student_logits[..., 0].numel())
        return self._objective(inputs)


def _measure(folder):
    """Held-out bits per byte of one student from whole logits and from tiles; with sequences cut
    over the ranks, too."""
    config = changed(
        student_run(folder, "measured"),
        loss={"linear": True, "linear_tile_rows": TILE_ROWS},
        student={"seq_length": 42},
        teacher={"model": {"seq_length": 54}},
        parallel={**TP2, "sequence_parallel": True},
    )
    trainer = _trainer(config)
    found = {}
    for name, linear in (("tiles", trainer.step.linear), ("whole", None)):
        watched = _Watched(trainer.step.next_token)
        step = replace(trainer.step, linear=linear, next_token=watched)
        measured = replace(trainer, step=step)._validate(trainer.data.held_out)
        found[name] = (measured, watched.rows)
    return found


def _read_ids(folder):
    """The log of a run on the ids at ``ids``, of which some are no text or not the tokenizer's."""
    config = objective_run(folder, "on-ids", LossConfig(objective="next_token"), **TP2)
    _trainer(changed(config, data=on_ids(folder), teacher=None)).train()
    return read_metrics(Path(config.run_dir))


def on_ids(folder):
    """The section ``data`` of that run."""
    train = (str(folder / "ids"),)
    return {"train": train, "indexed_tokenizer": "student", "bad_documents": "skip"}
