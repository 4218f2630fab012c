"""Record the predictions of a run's teacher once, for runs that read them from files.

    torchrun --nproc-per-node 4 -m megatron_ext cache-teacher --config run.yaml --output cache

The teacher of the run's configuration reads the run's training text. The same command resumes a
recording that was stopped. A run reads the files with teacher.cache: cache, in any layout, without
the teacher's model.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import get_args

from megatron_ext.cli.output import named_teacher, quiet_libraries
from megatron_ext.distributed.layout import launched_processes
from megatron_ext.errors import ConfigError
from megatron_ext.training.arguments import (
    add_config_arguments,
    config_from_arguments,
    is_given,
)
from megatron_ext.training.inputs import read_inputs, write_warnings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb."""
    from megatron_ext.teachers.target_form import NUMBER_BYTES, FormKind

    parser.usage = "%(prog)s --config FILE --output FOLDER [options]"
    recording = parser.add_argument_group("recording")
    recording.add_argument("--output", type=Path, required=True, help="folder of the cache")
    recording.add_argument(
        "--teacher",
        metavar="NAME",
        help="which of several teachers; the one there is when left out",
    )
    recording.add_argument(
        "--targets",
        choices=get_args(FormKind),
        help="what is kept: the least that the teacher's objective can use when left out",
    )
    recording.add_argument(
        "--top-k", type=int, default=64, metavar="INT", help="tokens of topk (default: 64)"
    )
    recording.add_argument(
        "--target-precision",
        choices=tuple(NUMBER_BYTES),
        help="of the numbers of topk (fp16 when left out) and hidden (bf16)",
    )
    recording.add_argument(
        "--file-mib",
        type=float,
        default=256,
        metavar="NUMBER",
        help="size of a file (default: 256)",
    )
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Record, and print the size of the files."""
    if not arguments.file_mib > 0:
        raise ConfigError("--file-mib must be positive", got=arguments.file_mib)
    given = config_from_arguments(arguments)
    name = named_teacher(given, arguments.teacher, what_for="cache")
    world_size = launched_processes()
    quiet_libraries()
    from megatron_ext.teachers.target_form import TargetForm
    from megatron_ext.training.cpu_megatron import announce_device, in_precision_of_device
    from megatron_ext.training.objective import teacher_objective
    from megatron_ext.training.run_plan import TeacherPlan
    from megatron_ext.training.teachers.recording import Recording, record_teacher, recording_config

    announce_device(require_gpu=given.training.require_gpu)
    has_precision = is_given(arguments, "training", "precision")
    training = in_precision_of_device(given.training, is_given=has_precision)
    given = replace(given, training=training)
    config = recording_config(given, arguments.output, world_size=world_size)
    inputs = read_inputs(config, world_size=world_size)
    write_warnings(inputs.warnings)
    teacher = TeacherPlan.of(config, name)
    form = TargetForm.of(
        arguments.targets or teacher_objective(teacher).target_forms[0],
        precision=arguments.target_precision,
        top_k=arguments.top_k,
        hidden_size=teacher.config.model.hidden_size,
        vocab_size=inputs.teachers[name].tokenizer.vocab_size,
    )
    is_shown = os.environ.get("RANK", "0") == "0"
    if is_shown:
        parts = " + ".join(f"{width} {part}" for part, width in form.parts.items())
        print(f"{form}: {form.bytes_per_token:,} bytes a token = {parts}", flush=True)
    recording = Recording(
        teacher=name,
        form=form,
        folder=arguments.output,
        file_bytes=int(arguments.file_mib * (1 << 20)),
    )
    manifest = record_teacher(config, inputs, recording)
    if is_shown:
        print(
            f"{manifest.tokens:,} tokens in {manifest.windows:,} windows: {manifest.size:,} bytes "
            f"in {len(manifest.shards):,} files = {form.bytes_per_token:,} a token + 24 a window + "
            "64 a file",
            flush=True,
        )
