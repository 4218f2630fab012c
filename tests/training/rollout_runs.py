"""What spawned ranks run: students that learn from what they sample."""

from pathlib import Path

import torch.distributed as dist

from megatron_ext.engines.engine_config import EngineConfig
from megatron_ext.errors import DistributedError
from megatron_ext.evaluation.student_engine import engine_of
from megatron_ext.tokenizers import build_tokenizer
from megatron_ext.training.config import LossConfig
from megatron_ext.training.distill import rollouts_of
from megatron_ext.training.rollout_config import RolloutConfig
from tests.training.rank_functions import _train_teacher, _trainer, go_back
from tests.training.tiny_run import changed, objective_run

ROLLOUTS = RolloutConfig(share=0.5, prompt_characters=12, max_new_tokens=9, micro_batch_size=2)


def config_of(folder, name, objective="projected_kl", rollouts=ROLLOUTS, **parallel):
    """Two steps from the same first weights, half of the rows sampled."""
    loss = LossConfig(objective=objective, ce_weight=0.5)
    config = objective_run(folder, name, loss, micro_batch_size=1, **parallel)
    return changed(config, data={"rollouts": rollouts}, training={"save_interval": 1})


def train(config):
    """Train, with the run's own student as the engine."""
    trainer = _trainer(config)
    engine = engine_of(
        config.data.rollouts, seed=config.training.seed, run_dir=Path(config.run_dir)
    )
    trainer.rollouts = rollouts_of(trainer, engine, build_tokenizer(config.tokenizer))
    trainer.train()


def train_alone(rank, folder):
    """A teacher, first weights, and runs of one process, one of which is done again in part."""
    _train_teacher(folder)
    train(config_of(folder, "alone"))
    train(
        config_of(
            folder, "alm", "alm", RolloutConfig(share=1.0, prompt_characters=9, max_new_tokens=5)
        )
    )
    go_back(rank, folder, "again", 1, of="alone")
    train(config_of(folder, "again"))


def train_layouts(rank, folder, layouts):
    """The same run under layouts."""
    for name, parallel in layouts.items():
        train(config_of(folder, name, **parallel))
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
    """Runs of ``ahead_run`` by name, steps ahead and layout; what ended each of them, or None."""
    ends = []
    for name, ahead, parallel in runs:
        try:
            train(ahead_run(folder, name, url, ahead, **parallel))
            ends.append(None)
        except DistributedError as error:
            ends.append(str(error))
        dist.barrier()
    return ends


def lines_of(folder, name):
    """The logged completions of a run."""
    return Path(folder / name / "rollouts.jsonl").read_text().splitlines()
