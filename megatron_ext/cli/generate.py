"""Generate text with a model, or with several together.

    megatron-ext generate --model runs/student --prompt "A function is"
    megatron-ext generate --model A --model B --prompts prompts.jsonl --output texts.jsonl
    megatron-ext generate --model A --model B --mode byte --weight 2 --weight 1 --prompt "Once"

A model is a run folder, its folder of checkpoints, one of these, or a HuggingFace folder. Several
predict together: token by token where they have one vocabulary, else byte by byte (--mode byte),
with the mean of their probabilities. Processes beyond tensor and pipeline parallelism are replicas,
which share the prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megatron_ext.cli.model_arguments import (
    add_model_arguments,
    check_model_arguments,
    finish,
    load_models,
)
from megatron_ext.evaluation.language_model import GenerationOptions
from megatron_ext.evaluation.tasks.task import texts_of
from megatron_ext.files import write_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb."""
    parser.add_argument(
        "--model",
        dest="checkpoint",
        type=Path,
        required=True,
        action="append",
        help="what generates; several times for models that predict together",
    )
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", help="text to go on with")
    given.add_argument("--prompts", type=Path, help="JSON Lines with one in each record")
    parser.add_argument("--text-field", default="prompt", help="field of a record's prompt")
    parser.add_argument(
        "--output", type=Path, help="file for prompts and completions, as JSON Lines"
    )
    generation = parser.add_argument_group("generation")
    generation.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="INT", help="tokens at most (default: 64)"
    )
    generation.add_argument("--temperature", type=float, default=0.0, help="0: the first choice")
    generation.add_argument("--top-p", type=float, default=1.0, help="draw among the likeliest")
    generation.add_argument("--seed", type=int, default=0, help="of the draws")
    generation.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end a completion before it"
    )
    add_model_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Read the prompts, load the models, and write what they generate."""
    options = GenerationOptions(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
    )
    check_model_arguments(arguments)
    prompts = [arguments.prompt]
    if arguments.prompts is not None:
        prompts = texts_of(arguments.prompts, arguments.text_field)
    model = load_models(arguments)
    completions = model.generate(prompts, options)

    def write() -> None:
        pairs = zip(prompts, completions, strict=True)
        records = [{"prompt": prompt, "completion": text} for prompt, text in pairs]
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        if arguments.output is not None:
            write_text(arguments.output, lines)
        elif arguments.prompt is not None:
            sys.stdout.write(f"{completions[0]}\n")
        else:
            sys.stdout.write(lines)

    model.once(write)
    finish(model)
