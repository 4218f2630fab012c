"""Measure a model: bits per byte, MMLU, GSM8K, HumanEval+, MBPP+, from local files.

    megatron-ext evaluate --model runs/student --task bits_per_byte --data held_out.jsonl
    megatron-ext evaluate --model Llama-3.2-1B --task mmlu --data mmlu/ --output mmlu.json
    torchrun --nproc-per-node 8 -m megatron_ext evaluate --tensor-model-parallel-size 2 ...

A model is a run folder, its folder of checkpoints, one of these, or a HuggingFace folder. Several
predict together, token by token or, with --mode byte, across vocabularies. Processes beyond
tensor and pipeline parallelism are replicas, which share the items.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megatron_ext.cli.model_arguments import (
    add_model_arguments,
    check_model_arguments,
    ensemble_values,
    finish,
    load_models,
)
from megatron_ext.cli.output import check_output
from megatron_ext.distributed.layout import launched_processes
from megatron_ext.errors import ConfigError, UnknownNameError
from megatron_ext.evaluation.lm_eval_tasks import PREFIX, LmEvalTask
from megatron_ext.evaluation.run_tasks import (
    cut_warning,
    results_table,
    write_results,
    write_samples,
)
from megatron_ext.evaluation.tasks import TASKS, Task, TaskOptions
from megatron_ext.registry import did_you_mean

if TYPE_CHECKING:
    from megatron_ext.evaluation.ensemble import ByteEnsemble
    from megatron_ext.evaluation.megatron_language_model import MegatronLanguageModel

_TASK_NAMES: Final = f"one of {', '.join(TASKS)}, or {PREFIX}NAME"

_ABOUT = (
    "checkpoint",
    "task",
    "data",
    "tokenizer",
    "allow_other_tokenizer",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "precision",
    "seq_length",
    "adds_bos",
    "applies_chat_template",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb."""
    parser.add_argument(
        "--model",
        "--checkpoint",
        dest="checkpoint",
        type=Path,
        required=True,
        action="append",
        metavar="MODEL",
        help="what to measure: a run, a checkpoint, a HuggingFace folder or a name on the hub; may "
        "be repeated, for models that predict together",
    )
    parser.add_argument("--task", required=True, help=_TASK_NAMES)
    parser.add_argument(
        "--data",
        type=Path,
        help="file or folder in its published format; for lm_eval:NAME, a folder of task files",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="file for the results, as JSON"
    )
    parser.add_argument(
        "--samples", type=Path, help="file for the answer to every item, as JSON Lines"
    )
    task = parser.add_argument_group("task")
    task.add_argument(
        "--num-fewshot", type=int, metavar="INT", help="solved examples before each item"
    )
    task.add_argument(
        "--few-shot-data", type=Path, metavar="PATH", help="file or folder of the solved examples"
    )
    task.add_argument(
        "--limit", type=int, metavar="INT", help="measure the first items only, this many"
    )
    task.add_argument("--text-field", default="text", help="field of a record that holds the text")
    task.add_argument(
        "--run-generated-code",
        action="store_true",
        help="let humaneval_plus and mbpp_plus run what the model writes, under limits",
    )
    task.add_argument(
        "--without-namespaces",
        action="store_true",
        help="run it even without namespaces, so that it can reach the network and files: only on "
        "machines with nothing to lose",
    )
    generation = parser.add_argument_group("generation")
    generation.add_argument(
        "--max-new-tokens", type=int, metavar="INT", help="most tokens of an answer"
    )
    generation.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="temperature of sampling; 0 takes the most probable token (0)",
    )
    generation.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="total probability of the most probable tokens that are sampled from (1)",
    )
    generation.add_argument("--seed", type=int, default=0, help="seed of sampling")
    add_model_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Read the files, load the model, print a table and write the results."""
    task = _task(arguments)
    model = load_models(arguments, shows_progress=True)
    result = task.run(model)
    from megatron_ext.training.inputs import write_warnings

    cut, texts = model.cut_prompts()
    if cut:
        result = replace(result, settings={**result.settings, "cut_prompts": cut})

    def write() -> None:
        if cut:
            write_warnings([cut_warning(cut, texts)])
        # First: a disk without room for a file is no reason to lose what was measured.
        sys.stdout.write(results_table(arguments.task, result))
        if arguments.output is not None:
            write_results(arguments.output, result, _about(arguments, model))
        if arguments.samples is not None:
            write_samples(arguments.samples, result)

    model.once(write)
    finish(model)


def _task(arguments: argparse.Namespace) -> Task:
    """Build the task, which checks its data before a model is loaded."""
    for name in ("limit", "max_new_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError("too small", where=flag, got=value, expected="1 or more")
    if arguments.num_fewshot is not None and arguments.num_fewshot < 0:
        raise ConfigError(
            "too small", where="--num-fewshot", got=arguments.num_fewshot, expected="0 or more"
        )
    for name, begins in (("output", "{\n  "), ("samples", "")):
        if getattr(arguments, name) is not None:
            check_output(getattr(arguments, name), f"--{name}", begins=begins)
    check_model_arguments(arguments)
    if arguments.applies_chat_template and arguments.task == "bits_per_byte":
        raise ConfigError(
            "texts are not messages of a user",
            where="--apply-chat-template",
            got="--task bits_per_byte",
            fix="leave the flag out",
        )
    harness = arguments.task.removeprefix(PREFIX)
    if harness == arguments.task and harness not in TASKS:
        raise UnknownNameError(
            "unknown task",
            where="--task",
            got=repr(harness),
            expected=_TASK_NAMES,
            fix=did_you_mean(harness, TASKS),
        )
    make = TASKS[arguments.task] if harness == arguments.task else partial(LmEvalTask, harness)
    if arguments.data is None and harness == arguments.task:
        raise ConfigError("this task needs its data", where="--data", fix="name its file or folder")
    options = {name: getattr(arguments, name) for name in TaskOptions.__dataclass_fields__}
    return make(TaskOptions(**options))


def _about(
    arguments: argparse.Namespace, model: MegatronLanguageModel | ByteEnsemble
) -> dict[str, Any]:
    """Description of the measurement: checkpoint, settings, versions and machine."""
    values = {name: getattr(arguments, name) for name in _ABOUT}
    paths = [str(checkpoint) for checkpoint in arguments.checkpoint]
    values["checkpoint"] = paths[0]
    if len(paths) > 1 or arguments.mode == "byte":
        values |= {"checkpoint": paths, **ensemble_values(arguments)}
    values["precision"], values["seq_length"] = model.precision, model.max_length
    values["processes"] = launched_processes()
    return {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}
