"""Train a student from a teacher with another tokenizer, on megatron-core.

    torchrun --nproc-per-node 4 -m megatron_ext distill --config run.yaml --lr 3e-4

The file holds the configuration; every key also has a flag, which takes precedence. A run whose
folder exists is resumed from its newest checkpoint. With --dry-run nothing is trained: all that
needs no model is checked, and memory, traffic and arithmetic of the run are estimated.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import yaml

from megatron_ext.cli.output import quiet_libraries
from megatron_ext.distributed import layout
from megatron_ext.distributed.layout import launched_processes
from megatron_ext.errors import ConfigError
from megatron_ext.evaluation.run_tasks import RunTasks
from megatron_ext.imports import large_imports
from megatron_ext.training.configuration.arguments import (
    add_config_arguments,
    config_from_arguments,
    is_given,
)
from megatron_ext.training.configuration.config import DistillConfig
from megatron_ext.training.inputs import read_inputs, read_served_teacher, write_warnings
from megatron_ext.training.run_folder import config_values
from megatron_ext.training.run_plan import TeacherPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb."""
    parser.usage = "%(prog)s --config FILE [options]"
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print every setting at the start; config.yaml in the run's folder has them too",
    )
    planning = parser.add_argument_group("dry run")
    planning.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything that needs no model, estimate what the run takes, start nothing",
    )
    planning.add_argument(
        "--world-size",
        type=int,
        metavar="INT",
        help="processes to plan a dry run for; as many as were started when not given",
    )
    planning.add_argument(
        "--layers",
        choices=("local", "transformer_engine"),
        help="layers to plan a dry run for; those that would run here when not given",
    )
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print what the run is, and train."""
    config = config_from_arguments(arguments)
    if arguments.dry_run:
        if arguments.print_config:
            print(yaml.safe_dump(config_values(config), sort_keys=False))
        _plan(config, arguments)
        return
    if arguments.world_size is not None or arguments.layers is not None:
        raise ConfigError("--world-size and --layers plan a run", fix="add --dry-run")
    # The device is the first line, so torch is loaded before inputs are checked.
    from megatron_ext.training.megatron_models.cpu_megatron import on_this_device

    has_precision = is_given(arguments, "training", "precision")
    training = on_this_device(config.training, has_precision=has_precision)
    config = replace(config, training=training)
    is_shown = os.environ.get("RANK", "0") == "0"
    if is_shown and arguments.print_config:
        print(yaml.safe_dump(config_values(config), sort_keys=False), flush=True)
    quiet_libraries()
    role = layout.take(config.teacher_ranks)
    if role is not None and role.teacher is not None:
        _serve(TeacherPlan.of(config, role.teacher))
        return
    evaluator = RunTasks(config.evaluation) if config.evaluation.tasks else None
    inputs = read_inputs(config, world_size=launched_processes())
    if is_shown:
        from megatron_ext.training.dry_run import start_summary

        print(start_summary(config, inputs, world_size=launched_processes()), flush=True)
    write_warnings(inputs.warnings)
    # Imported after all other checks: megatron-core takes seconds to load.
    with large_imports():
        from megatron_ext.evaluation.student_engine import engine_of
        from megatron_ext.training.distill import distill

    engine = engine_of(
        config.data.rollouts, seed=config.training.seed, run_dir=Path(config.run_dir)
    )
    distill(config, inputs, evaluator=evaluator, engine_of=engine)


def _serve(teacher: TeacherPlan) -> None:
    """Run as one of the ranks that serve a teacher."""
    tokenizer = read_served_teacher(teacher)
    from megatron_ext.training.teachers.own_ranks import serve_on_own_ranks

    serve_on_own_ranks(teacher, tokenizer)


def _plan(config: DistillConfig, arguments: argparse.Namespace) -> None:
    from megatron_ext.training.dry_run import dry_run

    world_size = arguments.world_size
    if world_size is None:
        world_size = launched_processes()
    elif world_size < 1:
        raise ConfigError("no run has so few processes", where="--world-size", got=world_size)
    # Reads and checks the files of the tasks.
    RunTasks(config.evaluation)
    has_flash = {"local": False, "transformer_engine": True}.get(arguments.layers)
    sys.stdout.write(dry_run(config, world_size=world_size, has_flash=has_flash))
