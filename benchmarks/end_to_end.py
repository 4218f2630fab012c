"""What a distillation step costs over the student's plain step and the teacher's forward pass.

    python -m benchmarks.end_to_end --output benchmarks/results/end_to_end.json

One process, one student, one text. In turn, so that a machine that slows down slows all of them
down, it makes

- a plain step: the student's next-token step, of a run without a teacher;
- the teacher's forward pass alone, logits included, as the model itself computes them;
- a distillation step: everything that an iteration of ``megatron-ext distill`` does, the loader
  included.

The ratio is the median distillation step over the sum of the other two medians. Then it makes
distillation steps alone, one behind the other, for the share of time in which no sample was at
hand: between other work, the loader would be given time that it does not have.

The vocabularies are whole published ones, 131,072 tokens for the student and 32,768 for the
teacher. The default sizes are such that the head is a third of the student's multiplications. In
models that are distilled in earnest it is a tenth or a fifth: here what the loss costs shows more
than there, and yet it is not all that is measured. The weights are random: no time depends on them.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import pstats
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.loss_cost.machine import commit, machine, write_results
from megatron_ext.cli.demo.corpus import write_corpus
from megatron_ext.distributed import process_groups
from megatron_ext.distributed.layout import Layout, launched_processes
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.teachers.megatron_teacher import MegatronTeacher
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.training.checkpoints.checkpoint import save_checkpoint
from megatron_ext.training.configuration.config import (
    DataConfig,
    DistillConfig,
    LossConfig,
    ModelConfig,
    ParallelConfig,
    TeacherConfig,
    TrainingConfig,
)
from megatron_ext.training.distill import build_trainer
from megatron_ext.training.inputs import read_inputs
from megatron_ext.training.megatron_models import cpu_megatron
from megatron_ext.training.megatron_models.models import build_model_chunks, sharded_weights
from megatron_ext.training.run_plan import RunPlan
from megatron_ext.training.step_clock import StepWatch, peak_memory_bytes
from megatron_ext.training.trainer import Trainer

TARGETS = {"cpu": 1.15, "cuda": 1.05}
WAITING_TARGET = 0.02
_TOKENIZERS = {
    "student": "tekken_240911.json",
    "teacher": "mistral_instruct_tokenizer_240323.model.v3",
}


def main() -> None:
    """Measure, print, and write what was found."""
    arguments = parse()
    found = measure(arguments)
    process_groups.finalize()
    _print(found)
    if arguments.output:
        write_results(arguments.output, found)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """What there is to write, from one process that is in no process group or alone in one."""
    if not torch.cuda.is_available():
        cpu_megatron.install()
    with tempfile.TemporaryDirectory() as folder:
        distil, plain = _trainers(Path(folder), arguments)
        try:
            return _measured(distil, plain, arguments)
        finally:
            distil.batches.close()
            plain.batches.close()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags; of the command line when not given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=3, help="of the three, one after the other")
    parser.add_argument("--steps", type=int, default=2, help="distillation steps alone")
    parser.add_argument("--layers", type=int, default=16, help="of the student")
    parser.add_argument("--hidden", type=int, default=1024, help="of the student")
    parser.add_argument("--teacher-layers", type=int, default=20)
    parser.add_argument("--teacher-hidden", type=int, default=1280)
    parser.add_argument("--seq-length", type=int, default=256, help="of the student")
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--global-batch-size", type=int, default=2)
    parser.add_argument("--objective", default="projected_kl")
    parser.add_argument("--linear", action="store_true", help="the loss without logits")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--num-workers", type=int, default=1, help="of the loader")
    parser.add_argument("--profile", type=Path, help="cProfile of one distillation step, to a file")
    return parser.parse_args(words)


def _config(folder: Path, arguments: argparse.Namespace) -> DistillConfig:
    data = Path(str(files("mistral_common") / "data"))
    tokenizers = {
        name: TokenizerConfig(model=str(data / file)) for name, file in _TOKENIZERS.items()
    }
    write_corpus(folder / "data")
    return DistillConfig(
        run_dir=str(folder / "run"),
        tokenizer=tokenizers["student"],
        student=_model(arguments.hidden, arguments.layers, arguments.seq_length),
        teacher=TeacherConfig(
            tokenizer=tokenizers["teacher"],
            # A smaller vocabulary needs more tokens for the same text.
            model=_model(
                arguments.teacher_hidden,
                arguments.teacher_layers,
                arguments.seq_length * 5 // 4,
                untie_embeddings_and_output_weights=True,
            ),
            checkpoint=str(folder / "teacher"),
        ),
        data=DataConfig(
            train=(str(folder / "data" / "train.jsonl"),),
            packing=True,
            num_workers=arguments.num_workers,
        ),
        loss=LossConfig(objective=arguments.objective, linear=arguments.linear),
        training=TrainingConfig(
            train_iters=1 + arguments.rounds + arguments.steps,
            micro_batch_size=arguments.micro_batch_size,
            global_batch_size=arguments.global_batch_size,
            precision=arguments.precision,
        ),
        parallel=ParallelConfig(),
    )


def _model(hidden: int, layers: int, length: int, **options: bool) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=max(1, hidden // 64),
        ffn_hidden_size=4 * hidden,
        seq_length=length,
        **options,
    )


def _trainers(folder: Path, arguments: argparse.Namespace) -> tuple[Trainer, Trainer]:
    """The run, and the one of the same student without a teacher."""
    config = _config(folder, arguments)
    groups = process_groups.initialize(Layout())
    _save_teacher(config, groups)
    inputs = read_inputs(config, world_size=launched_processes())
    distil = build_trainer(config, groups, inputs)
    alone = dataclasses.replace(
        config, teacher=None, loss=LossConfig(objective="next_token"), run_dir=f"{folder}/alone"
    )
    data = read_inputs(alone, world_size=launched_processes()).data
    plain = dataclasses.replace(
        distil,
        plan=RunPlan.of(alone),
        step=dataclasses.replace(distil.step, term=None, linear=None, hidden=None),
        teachers={},
        data=data,
        batches=data.batches(distil.replica),
    )
    return distil, plain


def _save_teacher(config: DistillConfig, groups: ProcessGroups) -> None:
    """Random weights as the checkpoint that the run asks for."""
    assert config.teacher is not None
    model = config.teacher.model
    tokenizer = build_tokenizer(config.teacher.tokenizer)
    ids, ranks = tokenizer.vocab_size, config.parallel.tensor_model_parallel_size
    rows = model.head_rows(ids, tensor_ranks=ranks)
    shard = groups.vocab_shard(vocab_size=ids, padded_vocab_size=rows)
    chunks = build_model_chunks(
        model,
        padded_vocab_size=shard.width,
        parallel=config.parallel,
        training=config.training,
        groups=groups,
    )
    save_checkpoint(
        Path(config.teacher.checkpoint), 0, sharded_weights(chunks), groups=groups, keep=1
    )


def _measured(distil: Trainer, plain: Trainer, arguments: argparse.Namespace) -> dict[str, Any]:
    iteration = iter(range(1, 1_000_000))
    forward = _teacher_forward(distil)
    kinds: dict[str, Callable[[], object]] = {
        "plain": lambda: plain._iterate(next(iteration)),
        "teacher": forward,
        "distil": lambda: distil._iterate(next(iteration)),
    }
    for make in kinds.values():
        make()
    distil.clock.read()
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(arguments.rounds):
        for name, make in kinds.items():
            times[name].append(_seconds(make))
    if arguments.profile:
        _profile(kinds["distil"], arguments.profile)
    alone = _alone(distil, kinds["distil"], arguments.steps)
    medians = {name: median(values) for name, values in times.items()}
    tokens = distil.plan.training.global_batch_size * distil.plan.student.seq_length
    return {
        "machine": machine(),
        "commit": commit(),
        "threads": torch.get_num_threads(),
        "precision": distil.plan.training.precision,
        "setting": {
            name: value
            for name, value in vars(arguments).items()
            if name not in ("output", "profile")
        },
        **_sizes(distil),
        **{f"{name}_seconds": value for name, value in medians.items()},
        "ratio": medians["distil"] / (medians["plain"] + medians["teacher"]),
        "target": TARGETS[distil.groups.device.type],
        "tokens_per_second": tokens / medians["distil"],
        **alone,
        "memory_bytes": peak_memory_bytes(),
        "samples": [{"kind": name, "seconds": values} for name, values in times.items()],
    }


def _teacher_forward(trainer: Trainer) -> Callable[[], None]:
    """The teacher's own forward pass over one global batch, which is read before."""
    teacher = trainer.teachers["teacher"]
    assert isinstance(teacher, MegatronTeacher)
    batches = [batch.teachers["teacher"] for batch in trainer.microbatches()]

    def forward() -> None:
        with torch.no_grad():
            for batch in batches:
                teacher.chunks[-1](batch.tokens, batch.position_ids, batch.attention_mask)

    return forward


def _alone(trainer: Trainer, step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Distillation steps without anything between them: shares of their time."""
    trainer.clock.read()
    watch = StepWatch(trainer.clock, trainer.batches)
    started = time.perf_counter()
    metrics = [step() for _ in range(steps)]
    seconds = _since(started)
    row = watch.row(metrics[-1], seconds=seconds)
    phases = {name: value for name, value in row.items() if name.startswith("seconds/")}
    return {
        "alone_seconds": seconds / max(steps, 1),
        "waiting_share": phases.pop("seconds/waiting") / seconds,
        "waiting_target": WAITING_TARGET,
        "shares": {
            name.removeprefix("seconds/"): value / seconds for name, value in phases.items()
        },
    }


def _sizes(trainer: Trainer) -> dict[str, Any]:
    """Parameters, and the head's share of the student's multiplications."""
    student = trainer.student.chunks[-1]
    head = student.shared_embedding_or_output_weight().numel()
    layers = sum(parameter.numel() for parameter in student.decoder.parameters())
    teacher = trainer.teachers["teacher"]
    assert isinstance(teacher, MegatronTeacher)
    return {
        "student_parameters": sum(parameter.numel() for parameter in student.parameters()),
        "teacher_parameters": sum(p.numel() for p in teacher.chunks[-1].parameters()),
        "head_share": head / (head + layers),
    }


def _profile(step: Callable[[], object], path: Path) -> None:
    profile = cProfile.Profile()
    profile.runcall(step)
    profile.dump_stats(path)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def _seconds(make: Callable[[], object]) -> float:
    started = time.perf_counter()
    make()
    return _since(started)


def _since(started: float) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _print(found: dict[str, Any]) -> None:
    for name in ("plain", "teacher", "distil"):
        print(f"{name:<10}{found[f'{name}_seconds']:>10.3f} s")
    print(f"{'ratio':<10}{found['ratio']:>10.3f}   target at most {found['target']}")
    print(f"{'waiting':<10}{found['waiting_share']:>10.2%}   target under {WAITING_TARGET:.0%}")
    for name, share in found["shares"].items():
        print(f"  {name:<12}{share:>6.1%}")


if __name__ == "__main__":
    main()
