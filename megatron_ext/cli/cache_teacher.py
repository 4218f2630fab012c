"""Record the predictions of a run's teacher once, for runs that read them from files.

    torchrun --nproc-per-node 4 -m megatron_ext cache-teacher --config run.yaml --output cache

The teacher of the run's configuration reads the run's training text. The same command resumes a
recording that was stopped. A run reads the files with teacher.cache: cache, in any layout, without
the teacher's model.

    megatron-ext cache-teacher --config run.yaml --output cache --import vllm answers.jsonl

With --import the targets are what another program has recorded of the teacher.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from megatron_ext.cli.output import named_teacher, quiet_libraries
from megatron_ext.distributed.layout import launched_processes
from megatron_ext.errors import ConfigError
from megatron_ext.training.configuration.arguments import (
    add_config_arguments,
    config_from_arguments,
    given_value,
    is_given,
    set_value,
)
from megatron_ext.training.inputs import read_inputs, write_warnings

if TYPE_CHECKING:
    from megatron_ext.teachers.target_form import TargetForm
    from megatron_ext.training.configuration.config import DistillConfig
    from megatron_ext.training.teachers.recording import Recording
    from megatron_ext.training.teachers.target_cache import Manifest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb."""
    from megatron_ext.teachers.target_form import NUMBER_BYTES, FormKind

    parser.usage = "%(prog)s --config FILE --output FOLDER [options]"
    recording = parser.add_argument_group("recording")
    recording.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FOLDER", help="folder of the cache"
    )
    recording.add_argument(
        "--teacher",
        metavar="NAME",
        help="name of one of several teachers; the only one when left out",
    )
    recording.add_argument(
        "--targets",
        choices=get_args(FormKind),
        help="targets that are stored; the smallest that the objective can use when left out",
    )
    recording.add_argument(
        "--top-k",
        type=int,
        metavar="INT",
        help="tokens of topk (64; of an import, all that are recorded)",
    )
    recording.add_argument(
        "--target-precision",
        choices=tuple(NUMBER_BYTES),
        help="precision of the stored numbers (topk: fp16, hidden: bf16)",
    )
    recording.add_argument(
        "--file-mib",
        type=float,
        default=256,
        metavar="NUMBER",
        help="size of a file; for an import, size of the recordings in a file (256)",
    )
    importing = parser.add_argument_group("import")
    importing.add_argument(
        "--import",
        dest="recordings",
        nargs="+",
        metavar=("FORMAT", "FILE"),
        help="make the cache from recordings of the teacher: vllm or distillkit, and the files",
    )
    importing.add_argument(
        "--prompts",
        action="store_true",
        help="make no cache, but write the ids of everything that has to be recorded to the file "
        "--output, as JSON lines with prompt_token_ids",
    )
    importing.add_argument(
        "--tail",
        choices=("exact", "renormalise"),
        default="exact",
        help="probability of the tokens that are not recorded: exact (default), what is missing to "
        "1; renormalise, none, with the recorded ones normalised to 1",
    )
    importing.add_argument(
        "--compression-config",
        type=Path,
        metavar="FILE",
        help="DistillKit's description of a capture (default: compression_config.yaml beside it)",
    )
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Record or import, and print the size of the files."""
    if not arguments.file_mib > 0:
        raise ConfigError("--file-mib must be positive", got=arguments.file_mib)
    if given_value(arguments, "run_dir") is None:
        # Nothing of the run is written.
        set_value(arguments, str(arguments.output), "run_dir")
    given = config_from_arguments(arguments)
    name = named_teacher(given, arguments.teacher, what_for="cache")
    world_size = launched_processes()
    quiet_libraries()
    from megatron_ext.training.megatron_models.cpu_megatron import on_this_device

    has_precision = is_given(arguments, "training", "precision")
    training = on_this_device(given.training, has_precision=has_precision)
    given = replace(given, training=training)
    if arguments.prompts:
        _write_prompts(arguments, given, name)
        return
    make = _record if arguments.recordings is None else _import
    manifest = make(arguments, given, name, world_size)
    if _is_shown():
        print(
            f"{manifest.tokens:,} tokens in {manifest.windows:,} windows: {manifest.size:,} bytes "
            f"in {len(manifest.shards):,} files = {manifest.form.bytes_per_token:,} a token + 24 a "
            "window + 64 a file",
            flush=True,
        )


def _record(
    arguments: argparse.Namespace, given: DistillConfig, name: str, world_size: int
) -> Manifest:
    """Record the teacher itself."""
    from megatron_ext.teachers.target_form import TargetForm
    from megatron_ext.training.objective import teacher_objective
    from megatron_ext.training.run_plan import TeacherPlan
    from megatron_ext.training.teachers.recording import record_teacher, recording_config

    config = recording_config(given, arguments.output, world_size=world_size)
    inputs = read_inputs(config, world_size=world_size)
    write_warnings(inputs.warnings)
    teacher = TeacherPlan.of(config, name)
    form = TargetForm.of(
        arguments.targets or teacher_objective(teacher).target_forms[0],
        precision=arguments.target_precision,
        top_k=64 if arguments.top_k is None else arguments.top_k,
        hidden_size=teacher.config.model.hidden_size,
        vocab_size=inputs.teachers[name].tokenizer.vocab_size,
    )
    return record_teacher(config, inputs, _recording(arguments, name, form))


def _import(
    arguments: argparse.Namespace, given: DistillConfig, name: str, world_size: int
) -> Manifest:
    """Make a cache of recordings."""
    from megatron_ext.teachers.target_form import TargetForm
    from megatron_ext.training.teachers.import_recording import import_config, import_recording
    from megatron_ext.training.teachers.recorded_files import RecordedFiles

    if world_size > 1:
        raise ConfigError(
            "recordings are imported in one process",
            got=f"{world_size} processes",
            fix="start megatron-ext cache-teacher without torchrun",
        )
    if arguments.targets not in (None, "topk"):
        raise ConfigError("recordings are top-k targets", got=f"--targets {arguments.targets}")
    recorded = RecordedFiles.of(
        arguments.recordings, tail=arguments.tail, compression_config=arguments.compression_config
    )
    top_k = recorded.top_count() if arguments.top_k is None else arguments.top_k
    config = import_config(given, name, arguments.output)
    inputs = read_inputs(config, world_size=1, has_targets=False)
    write_warnings(inputs.warnings)
    form = TargetForm.of(
        "topk",
        precision=arguments.target_precision,
        top_k=top_k,
        hidden_size=0,
        vocab_size=inputs.teachers[name].tokenizer.vocab_size,
    )
    recording = _recording(arguments, name, form)
    manifest, report = import_recording(config, inputs, recorded, recording)
    print(f"imported from {recorded.format}, tail {recorded.tail}: {report}", flush=True)
    return manifest


def _write_prompts(arguments: argparse.Namespace, given: DistillConfig, name: str) -> None:
    """List what has to be recorded."""
    from megatron_ext.teachers.target_form import TargetForm
    from megatron_ext.training.teachers.import_recording import import_config, write_prompts
    from megatron_ext.training.teachers.recording import Recording

    # A folder that is not there: the file may be of an earlier start.
    folder = arguments.output.with_name(f"{arguments.output.name}.cache")
    config = import_config(given, name, folder)
    inputs = read_inputs(config, world_size=1, has_targets=False)
    write_warnings(inputs.warnings)
    vocab_size = inputs.teachers[name].tokenizer.vocab_size
    form = TargetForm.of("label", precision=None, top_k=0, hidden_size=0, vocab_size=vocab_size)
    recording = Recording(
        teacher=name, form=form, folder=arguments.output, file_bytes=_bytes(arguments)
    )
    count = write_prompts(inputs, recording)
    print(f"{count:,} windows to be recorded in {arguments.output}", flush=True)


def _bytes(arguments: argparse.Namespace) -> int:
    return int(arguments.file_mib * (1 << 20))


def _recording(arguments: argparse.Namespace, name: str, form: TargetForm) -> Recording:
    """The cache that is asked for; its bytes a token are printed."""
    from megatron_ext.training.teachers.recording import Recording

    if _is_shown():
        parts = " + ".join(f"{width} {part}" for part, width in form.parts.items())
        print(f"{form}: {form.bytes_per_token:,} bytes a token = {parts}", flush=True)
    return Recording(
        teacher=name,
        form=form,
        folder=arguments.output,
        file_bytes=_bytes(arguments),
    )


def _is_shown() -> bool:
    return os.environ.get("RANK", "0") == "0"
