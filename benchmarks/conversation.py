"""What a mask costs: conversations to ids and targets, beside a bare encode and other methods.

    python benchmarks/conversation.py --output benchmarks/results/conversation.json

A conversation is word problems and their solutions (GSM8K, from the folder that MEGATRON_EXT_SHARED
names), one after another. A turn is a question with its answer. Each time is of several different
conversations in a row, as a data loader reads them, and is given for one. Everything runs on one
thread; the sides of a comparison alternate, and medians count, of the times and of the ratios
within a round.

``bare`` is one encode of the rendered text by the same engine: the library itself, or ours through
gigatoken. ``masked`` is ``tokenize_conversation`` with its target: render, encode, mask.

``per_turn`` is how Megatron-LM masks: transformers renders and encodes the whole, and then each
message alone, which must be the next ids of the whole, and masks these if it is no answer.
``prefixes`` is how one does for templates that are not local: transformers renders and encodes the
messages up to each; it is timed without masking anything.
"""

from __future__ import annotations

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from alignment import machine

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.conversation.encoded_conversation import render_conversation
from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig, build_tokenizer

SHARED = Path(os.environ.get("MEGATRON_EXT_SHARED", "../shared"))
FORMATS = {"qwen2_5": "qwen2p5", "llama3_2": "llama3p2", "mistral_nemo": "mistral"}
TURNS = 128
IN_A_ROW = 8
LINEAR = (125, 250, 500, 1_000)
ENGINES = ("reference", "gigatoken")

Messages = list[dict[str, str]]


def conversations(turns: int, count: int) -> list[Messages]:
    """Questions and answers in turn, others in each conversation while there are others."""
    lines = (SHARED / "corpora/gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()
    records = cycle(map(json.loads, lines))
    return [
        [
            message
            for record in islice(records, turns)
            for message in (
                {"role": "user", "content": record["question"]},
                {"role": "assistant", "content": record["answer"]},
            )
        ]
        for _ in range(count)
    ]


def tokenizer_of(name: str, engine: str) -> MegatronTokenizerText:
    """A vocabulary with its prompt format; the engine is built."""
    tokenizer = build_tokenizer(
        TokenizerConfig(
            model=str(SHARED / "tokenizers" / name),
            mode="sft",
            prompt_format=FORMATS[name],
            engine=engine,
        )
    )
    tokenizer._tokenizer.prepare_engine()
    return tokenizer


def peer_of(tokenizer: MegatronTokenizerText) -> Any:
    """transformers' tokenizer of the same file, with the same template."""
    from transformers import PreTrainedTokenizerFast

    assert tokenizer.prompt_config is not None
    assert tokenizer.path is not None
    return PreTrainedTokenizerFast(
        tokenizer_file=str(Path(tokenizer.path) / "tokenizer.json"),
        chat_template=tokenizer.prompt_config.custom_chat_template,
        **tokenizer.special_token_names,
    )


def rendered(tokenizer: MegatronTokenizerText, messages: Messages) -> str:
    """The text of a conversation."""
    assert tokenizer.prompt_config is not None
    return render_conversation(
        tokenizer,
        messages,
        tokenizer.prompt_config,
        add_generation_prompt=False,
        apply_image_tag_fn=None,
    ).text


def bare_encode(tokenizer: MegatronTokenizerText) -> Callable[[str], Any]:
    """One encode of a text, by the library itself where the engine is the reference."""
    adapter: Any = tokenizer._tokenizer
    if adapter.engine == "reference":
        return lambda text: adapter._whole.encode(text, add_special_tokens=False).ids
    return lambda text: tokenizer.text_to_flat_ids([text])


def masked_encode(tokenizer: MegatronTokenizerText) -> Callable[[Messages], Any]:
    """Ids and target of a conversation."""
    return lambda messages: tokenizer.tokenize_conversation(messages, True, False)


def per_turn(peer: Any, messages: Messages) -> int:
    """Megatron-LM's method; returns the number of encodes."""

    def encode(part: Messages) -> Any:
        return np.array(peer.apply_chat_template(part, tokenize=True, return_dict=False))

    ids = encode(messages)
    target = ids.copy()
    begin = 0
    for message in messages:
        alone = encode([message])
        # The template begins each render with the token that begins a text.
        alone = alone[1:] if begin and alone[0] == peer.bos_token_id else alone
        end = begin + len(alone)
        if message["role"] != "assistant":
            target[begin:end] = IGNORE_INDEX
        assert np.array_equal(ids[begin:end], alone)
        begin = end
    assert begin == len(ids)
    return len(messages) + 1


def prefixes(peer: Any, messages: Messages) -> int:
    """A render and an encode up to each message; returns the number of encodes."""
    for end in range(1, len(messages) + 1):
        peer.apply_chat_template(messages[:end], tokenize=True)
    return len(messages)


Side = tuple[Callable[[Any], Any], Sequence[Any]]
"""What is called, and with what, one after another."""


def times(sides: dict[str, Side], repeats: int) -> dict[str, list[float]]:
    """Seconds of one call of each side in each round; a first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repeats + 1):
        for name, (call, inputs) in sides.items():
            gc.collect()
            begin = time.perf_counter()
            for each in inputs:
                call(each)
            elapsed = time.perf_counter() - begin
            if number:
                seconds[name].append(elapsed / len(inputs))
    return seconds


def ratio(seconds: dict[str, list[float]], above: str, below: str) -> float:
    """Median over the rounds."""
    return median(a / b for a, b in zip(seconds[above], seconds[below], strict=True))


def beside_a_bare_encode(name: str, repeats: int) -> list[dict[str, Any]]:
    """Rows of masked against bare, by engine."""
    rows = []
    for engine in ENGINES:
        tokenizer = tokenizer_of(name, engine)
        several = conversations(TURNS, IN_A_ROW)
        texts = [rendered(tokenizer, messages) for messages in several]
        seconds = times(
            {
                "bare": (bare_encode(tokenizer), texts),
                "masked": (masked_encode(tokenizer), several),
            },
            repeats,
        )
        rows.append(
            {
                "vocabulary": name,
                "engine": engine,
                "turns": TURNS,
                "bytes": sum(len(text.encode()) for text in texts) / len(texts),
                "masked_to_bare": ratio(seconds, "masked", "bare"),
                "seconds": seconds,
            }
        )
        milliseconds = {side: 1e3 * median(found) for side, found in seconds.items()}
        print(
            f"{name:>14} {engine:>10} {TURNS} turns: bare {milliseconds['bare']:.2f} ms, masked "
            f"{milliseconds['masked']:.2f} ms, {rows[-1]['masked_to_bare']:.2f} times",
            flush=True,
        )
    return rows


def beside_other_methods(name: str, repeats: int) -> dict[str, Any]:
    """The row of masked, with the fast engine, against per_turn and prefixes."""
    tokenizer = tokenizer_of(name, "gigatoken")
    peer = peer_of(tokenizer)
    several = conversations(TURNS, IN_A_ROW)
    messages = several[0]
    ids = tokenizer.tokenize_conversation(messages, False, False).tolist()
    encoded = peer.apply_chat_template(messages, tokenize=True, return_dict=True)
    seconds = times(
        {
            "per_turn": (lambda each: per_turn(peer, each), several),
            "masked": (masked_encode(tokenizer), several),
        },
        repeats,
    )
    few = times({"prefixes": (lambda each: prefixes(peer, each), several[:1])}, 1)
    row = {
        "vocabulary": name,
        "engine": "gigatoken",
        "turns": TURNS,
        "ids_equal": ids == encoded["input_ids"],
        "per_turn_to_masked": ratio(seconds, "per_turn", "masked"),
        "prefixes_to_masked": median(few["prefixes"]) / median(seconds["masked"]),
        "seconds": {**seconds, **few},
    }
    print(
        f"{name:>14} {TURNS} turns: per turn {1e3 * median(seconds['per_turn']):.1f} ms, "
        f"{row['per_turn_to_masked']:.1f} times; prefixes {1e3 * few['prefixes'][0]:,.0f} ms, "
        f"{row['prefixes_to_masked']:,.0f} times; ids {'equal' if row['ids_equal'] else 'DIFFER'}",
        flush=True,
    )
    return row


def over_lengths(name: str, repeats: int) -> dict[str, Any]:
    """The row of the time for each turn as a conversation grows."""
    tokenizer = tokenizer_of(name, "gigatoken")
    sides: dict[str, Side] = {
        str(turns): (masked_encode(tokenizer), conversations(turns, IN_A_ROW)) for turns in LINEAR
    }
    seconds = times(sides, repeats)
    each = {turns: median(found) / int(turns) * 1e6 for turns, found in seconds.items()}
    shown = ", ".join(f"{turns}: {value:.1f}" for turns, value in each.items())
    print(f"{name:>14} microseconds a turn, by turns: {shown}", flush=True)
    return {"vocabulary": name, "microseconds_per_turn": each, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=list(FORMATS), help="vocabularies to measure")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    names = [name for name in FORMATS if name in arguments.only]
    results = {
        "machine": machine()
        | {"packages": {p: version(p) for p in ("tokenizers", "transformers", "gigatoken")}},
        "masked_and_bare": [
            row for name in names for row in beside_a_bare_encode(name, arguments.repeats)
        ],
        "other_methods": [beside_other_methods(name, arguments.repeats) for name in names],
        "lengths": [over_lengths(name, arguments.repeats) for name in names],
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
