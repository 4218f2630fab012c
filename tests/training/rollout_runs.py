"""What spawned ranks run: students that learn from what they sample."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ext.engines.engine import EngineConfig
from megatron_ext.errors import DistributedError
from megatron_ext.evaluation.student_engine import engine_of
from megatron_ext.losses import TeacherTargets
from megatron_ext.tokenizers import build_tokenizer
from megatron_ext.training.configuration.config import LossConfig
from megatron_ext.training.configuration.rollouts import RolloutConfig
from megatron_ext.training.distill import rollouts_of
from megatron_ext.training.metrics import read_metrics
from megatron_ext.training.run_folder import ROLLOUTS_FILE
from megatron_ext.training.surprise import row_surprise
from tests.training.rank_functions import _train_teacher, _trainer, go_back, train_unsaved
from tests.training.tiny_run import changed, objective_run

ROLLOUTS = RolloutConfig(share=0.5, prompt_characters=12, max_new_tokens=9, micro_batch_size=2)


def config_of(folder, name, objective="projected_kl", rollouts=ROLLOUTS, **parallel):
    """Two steps from the same first weights, half of the rows sampled."""
    loss = LossConfig(objective=objective, ce_weight=0.5)
    config = objective_run(folder, name, loss, micro_batch_size=1, **parallel)
    return changed(config, data={"rollouts": rollouts}, training={"save_interval": 1})


def trainer_of(config):
    """A trainer with the engine of the run's rollouts."""
    trainer = _trainer(config)
    engine = engine_of(
        config.data.rollouts, seed=config.training.seed, run_dir=Path(config.run_dir)
    )
    trainer.rollouts = rollouts_of(trainer, engine, build_tokenizer(config.tokenizer))
    return trainer


def train(config):
    """Train, with the run's own student as the engine."""
    trainer_of(config).train()


def train_alone(rank, folder):
    """A teacher, first weights, and runs of one process, one of which is done again in part;
    ``surprises``."""
    _train_teacher(folder)
    train(config_of(folder, "alone"))
    alm = RolloutConfig(share=1.0, prompt_characters=9, max_new_tokens=5)
    train_unsaved(trainer_of(config_of(folder, "alm", "alm", alm)))
    linear = changed(
        config_of(folder, "linear"),
        loss={"linear": True, "ce_weight": 0.0},
        training={"train_iters": 1},
    )
    train_unsaved(trainer_of(linear))
    go_back(rank, folder, "again", 1, of="alone")
    train(config_of(folder, "again"))
    return surprises(folder)


def train_layouts(rank, folder, layouts):
    """The same run under layouts."""
    for name, parallel in layouts.items():
        train(changed(config_of(folder, name, **parallel), training={"save_interval": 2}))
        dist.barrier()


def train_served(rank, folder, layouts, url):
    """Runs whose samples a server gives, the same under every layout."""
    engine = EngineConfig(kind="vllm", url=(url,), model="m")
    rollouts = RolloutConfig(share=0.5, prompt_characters=12, max_new_tokens=9, engine=engine)
    for name, parallel in layouts.items():
        train(config_of(folder, name, "sampled_kl", rollouts, **parallel))
        dist.barrier()


def ahead_run(folder, name, url, ahead, **parallel):
    """Five steps whose samples a server gives, with its weights changed behind the third."""
    engine = EngineConfig(kind="vllm", url=(url,), model="m", retries=0)
    rollouts = RolloutConfig(
        share=0.5, prompt_characters=12, max_new_tokens=9, engine=engine, ahead=ahead
    )
    config = config_of(folder, name, "sampled_kl", rollouts, **parallel)
    return changed(config, training={"train_iters": 5, "save_interval": 3})


def train_ahead(rank, folder, runs, url):
    """Runs of ``ahead_run`` by name, steps ahead and layout: what ended each of them, or None, and
    its metrics by then."""
    ends = []
    for name, ahead, parallel in runs:
        end = None
        try:
            train(ahead_run(folder, name, url, ahead, **parallel))
        except DistributedError as error:
            end = str(error)
        dist.barrier()
        ends.append((end, read_metrics(folder / name)))
    return ends


def surprises(folder):
    """Of a sampled row: surprise by each form of predictions, and logits and labels that they are
    of."""
    trainer = trainer_of(config_of(folder, "surprises"))
    micro = next(m for m in trainer.with_targets(trainer.microbatches()) if m.batch.logged_row == 0)
    batch, targets, shard = micro.batch, micro.targets["teacher"], trainer.step.shard
    draw = torch.Generator().manual_seed(0)
    states = [
        torch.randn(*tokens.shape, 8, generator=draw)
        for tokens in (batch.student.tokens, batch.teachers["teacher"].tokens)
    ]
    heads = [torch.randn(s.width, 8, generator=draw) for s in (shard, targets.shard)]
    logits = [state @ head.t() for state, head in zip(states, heads, strict=True)]
    labels = [batch.student.labels, batch.teachers["teacher"].labels]
    forms = {
        "logits": {"logits": logits[1]},
        "hidden": {"hidden": states[1], "head_weight": heads[1]},
        "label": {"label_log_probs": torch.full(labels[1].shape, -2.0)},
        "topk": {
            "topk_ids": labels[1][..., None].clamp(min=0),
            "topk_logits": logits[1][..., :1],
            "log_normaliser": logits[1][..., 0],
        },
    }
    found = {}
    for kind, fields in forms.items():
        given = TeacherTargets(kind=kind, shard=targets.shard, **fields)
        found[kind] = row_surprise(
            micro._replace(targets={"teacher": given}),
            states[0] if kind == "hidden" else logits[0],
            shard,
            teachers=["teacher"],
            head_weight=heads[0] if kind == "hidden" else None,
        )
    vocabularies = shard.vocab_size, targets.shard.vocab_size
    rows = [one[0, :, :size] for one, size in zip(logits, vocabularies, strict=True)]
    return found, rows, [one[0] for one in labels]


def lines_of(folder, name):
    """The logged completions of a run."""
    return [json.loads(line) for line in Path(folder / name / ROLLOUTS_FILE).open(encoding="utf-8")]


def parts_of(value):
    """Numbers and texts of nested plain values, in order."""
    if isinstance(value, (dict, list)):
        inner = value.values() if isinstance(value, dict) else value
        parts = [parts_of(one) for one in inner]
        return [n for numbers, _ in parts for n in numbers], [t for _, ts in parts for t in ts]
    return ([value], []) if isinstance(value, float) else ([], [value])
