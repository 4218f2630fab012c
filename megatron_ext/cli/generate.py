"""Generate text with a model, or with several together.

    megatron-ext generate --model runs/student --prompt "A function is"
    megatron-ext generate --model A --model B --prompts prompts.jsonl --output texts.jsonl
    megatron-ext generate --model A --model B --mode byte --weight 2 --weight 1 --prompt "Once"

A model is a run folder, its folder of checkpoints, one of these, or a HuggingFace folder. Several
predict together: token by token where they have one vocabulary, else byte by byte (--mode byte),
with the mean of their probabilities. Processes beyond tensor and pipeline parallelism are replicas,
which share the prompts.

With --chat, each line of standard input is a message to a model with a chat template, which
answers it, and remembers the conversation until the input ends (Ctrl-D):

    megatron-ext generate --model Qwen/Qwen3-0.6B --chat --max-new-tokens 256

With --conversations, answers become training data, of a model or of an endpoint:

    megatron-ext generate --endpoint https://api.example.com --endpoint-model big --conversations \\
        --prompts questions.jsonl --output answers.jsonl --max-new-tokens 1024 --temperature 0.7
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ext.cli.model_arguments import (
    add_model_arguments,
    check_model_arguments,
    finish,
    load_models,
)
from megatron_ext.cli.output import check_new_file, check_output, write_output
from megatron_ext.conversation import Message
from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.distributed.layout import launched_processes
from megatron_ext.engines.chat_endpoint import Answer, ChatEndpoint
from megatron_ext.engines.engine import EngineConfig
from megatron_ext.errors import ConfigError, counted
from megatron_ext.evaluation.language_model import GenerationOptions
from megatron_ext.evaluation.tasks.task import texts_of
from megatron_ext.evaluation.teacher_texts import Answers, TeacherTexts, asked_conversations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--model",
        "--checkpoint",
        dest="checkpoint",
        type=Path,
        action="append",
        metavar="MODEL",
        help="what generates: a run, a checkpoint, a HuggingFace folder or a name on the hub; may "
        "be repeated, for models that predict together",
    )
    source.add_argument(
        "--endpoint",
        metavar="URL",
        help="OpenAI-compatible endpoint that answers conversations, with or without /v1",
    )
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", help="text to continue")
    given.add_argument(
        "--chat", action="store_true", help="answer messages from standard input, one a line"
    )
    given.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSON Lines with a prompt in each record"
    )
    parser.add_argument(
        "--text-field", default="prompt", help="field of a record that holds the prompt"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="new file for prompts and completions, as JSON Lines",
    )
    training = parser.add_argument_group("training data")
    training.add_argument(
        "--conversations",
        action="store_true",
        help="answer whole conversations (or --text-field as a user's message) and write them as "
        "conversations, without answers that were cut off or say nothing; resumes where it was "
        "stopped",
    )
    training.add_argument(
        "--endpoint-model", metavar="NAME", help="name of the model at the endpoint"
    )
    training.add_argument(
        "--key-variable",
        default="MEGATRON_EXT_ENGINE_KEY",
        metavar="NAME",
        help="environment variable with the endpoint's key (default: %(default)s)",
    )
    training.add_argument(
        "--plain-connection",
        action="store_true",
        help="allow http to another machine, over a trusted network",
    )
    generation = parser.add_argument_group("generation")
    generation.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        metavar="INT",
        help="most tokens of a completion (64)",
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
    generation.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a completion before this text; may be repeated",
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
    if arguments.output is not None:
        check_new_file(arguments.output)
        check_output(arguments.output, "--output")
    if arguments.conversations or arguments.endpoint is not None:
        _answer_conversations(arguments, options)
        return
    if arguments.chat:
        _chat(arguments, options)
        return
    check_model_arguments(arguments)
    prompts = [arguments.prompt]
    if arguments.prompts is not None:
        prompts = texts_of(arguments.prompts, arguments.text_field)
    model = load_models(arguments, shows_progress=True)
    completions = model.generate(prompts, options)

    def write() -> None:
        pairs = zip(prompts, completions, strict=True)
        records = [{"prompt": prompt, "completion": text} for prompt, text in pairs]
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        if arguments.output is not None:
            try:
                write_output(arguments.output, lines, "--output")
            except ConfigError:
                # What was generated is not lost with the file.
                sys.stdout.write(lines)
                raise
        elif arguments.prompt is not None:
            sys.stdout.write(f"{completions[0]}\n")
        else:
            sys.stdout.write(lines)

    model.once(write)
    finish(model)


def _chat(arguments: argparse.Namespace, options: GenerationOptions) -> None:
    """Answer each line of standard input, as a conversation that grows."""
    if arguments.mode != "common":
        raise ConfigError("messages are answered token by token", where="--mode", got="byte")
    if launched_processes() > 1:
        raise ConfigError("one process reads messages", where="--chat", got=launched_processes())
    if arguments.output is not None:
        raise ConfigError(
            "answers go to the terminal",
            where="--chat",
            got=f"--output {arguments.output}",
            fix="leave --output out, or name the messages in --prompts",
        )
    # So that a tokenizer without a template is refused before the weights are read.
    arguments.applies_chat_template = True
    check_model_arguments(arguments)
    model: Any = load_models(arguments)
    messages: list[Message] = []
    for number, line in enumerate(_lines()):
        messages.append({"role": "user", "content": line})
        (answer,) = model.answers([ConversationRecord(list(messages))], options, number)
        messages.append({"role": "assistant", "content": answer.text})
        sys.stdout.write(f"{answer.text}\n")
        sys.stdout.flush()
    finish(model)


def _lines() -> Iterator[str]:
    """Lines of standard input with a message; in a terminal behind a prompt."""
    shown = "> " if sys.stdin.isatty() else ""
    while True:
        sys.stderr.write(shown)
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _answer_conversations(arguments: argparse.Namespace, options: GenerationOptions) -> None:
    """Write answered conversations, by a model or an endpoint."""
    if not arguments.conversations or arguments.prompts is None or arguments.output is None:
        raise ConfigError(
            "conversations of a file are answered into another, also by an endpoint",
            got="a flag is missing",
            expected="--conversations, --prompts and --output",
        )
    if arguments.mode != "common":
        raise ConfigError(
            "conversations are answered token by token", where="--mode", got=arguments.mode
        )
    if options.stop and arguments.endpoint is not None:
        raise ConfigError("an endpoint ends answers itself", where="--stop", got=options.stop[0])
    records = asked_conversations(arguments.prompts, arguments.text_field)
    named = arguments.endpoint_model or arguments.endpoint
    texts = TeacherTexts(
        output=arguments.output,
        about={
            "model": named or ", ".join(map(str, arguments.checkpoint)),
            "temperature": options.temperature,
            "top_p": options.top_p,
            "max_new_tokens": options.max_new_tokens,
            "seed": options.seed,
            "date": datetime.now(timezone.utc).date().isoformat(),
        },
    )
    if arguments.endpoint is not None:
        answers, once = _of_endpoint(arguments, options), _once
    else:
        # As with --chat.
        arguments.applies_chat_template = True
        check_model_arguments(arguments)
        model = load_models(arguments)
        answers, once = partial(_of_model, model, options), model.once
    kept, left_out = texts.write(records, answers, once)
    cut = f", {left_out} that were cut or say nothing are left out" if left_out else ""
    once(lambda: sys.stdout.write(f"{counted(kept, 'answer')} in {arguments.output}{cut}\n"))
    if arguments.endpoint is None:
        finish(model)


def _once(work: Callable[[], Any]) -> Any:
    return work()


def _of_model(
    model: Any, options: GenerationOptions, part: Sequence[ConversationRecord], first: int
) -> list[Answer]:
    answers: list[Answer] = model.answers(part, options, first)
    return answers


def _of_endpoint(arguments: argparse.Namespace, options: GenerationOptions) -> Answers:
    config = EngineConfig(
        kind="vllm",
        url=(arguments.endpoint,),
        model=arguments.endpoint_model,
        key_variable=arguments.key_variable,
        plain_connection=arguments.plain_connection,
    )
    endpoint = ChatEndpoint(config)
    return lambda part, first: endpoint.answers(part, options, first)
