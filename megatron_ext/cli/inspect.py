"""Show how a tokenizer cuts a text or a conversation.

    megatron-ext inspect "naïve 2017" --tokenizer-model tokenizer.json
    megatron-ext inspect chat.jsonl --tokenizer-model DIR --tokenizer-prompt-format auto

An argument that names a file is read; - is standard input; anything else is the text itself. A JSON
file whose records have messages is shown as conversations, with the trained part marked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ext.cli.token_view import TokenView, ribbon, table, token_views
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.tokenizers import MegatronTokenizerText, build_tokenizer
from megatron_ext.training.tokenizer_arguments import (
    add_tokenizer_arguments,
    tokenizer_config_from_arguments,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.add_argument("source", metavar="TEXT|FILE", help="a text, a file, or - for stdin")
    parser.add_argument(
        "--record", type=int, default=1, metavar="N", help="conversation of a file to show (1)"
    )
    parser.add_argument(
        "--limit", type=int, default=200, metavar="N", help="tokens to show; 0 for all (200)"
    )
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="when to use colours"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object for each token")
    add_tokenizer_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print the tokens."""
    tokenizer = build_tokenizer(tokenizer_config_from_arguments(arguments))
    text, views = _views(tokenizer, arguments)
    shown = views[: arguments.limit] if arguments.limit else views
    if arguments.json:
        sys.stdout.writelines(
            json.dumps(view.as_row(), ensure_ascii=False) + "\n" for view in shown
        )
        return
    sys.stdout.write(_summary(tokenizer, text, views) + "\n\n")
    sys.stdout.write(ribbon(shown, color=_colors(arguments.color)) + "\n" + table(shown))
    if len(shown) < len(views):
        sys.stdout.write(f"... {len(views) - len(shown):,} tokens more; --limit 0 shows all\n")


def _views(
    tokenizer: MegatronTokenizerText, arguments: argparse.Namespace
) -> tuple[str, list[TokenView]]:
    """The text that is tokenized, and its tokens."""
    text, is_json = _read(arguments.source)
    conversation = _conversation(text, arguments.record) if is_json else None
    if conversation is None:
        return text, token_views(tokenizer, text, *tokenizer.encode_with_byte_ends(text))
    encoded = tokenizer.encode_conversation(conversation)
    return encoded.text, token_views(
        tokenizer, encoded.text, encoded.ids, encoded.byte_ends, encoded.trained.tolist()
    )


def _read(source: str) -> tuple[str, bool]:
    """The text of the argument, and whether it is a JSON file."""
    if source == "-":
        return sys.stdin.read(), False
    path = Path(source)
    try:
        if not path.is_file():
            return source, False
    except OSError:
        # A text may be longer than any file name.
        return source, False
    try:
        return path.read_text(encoding="utf-8"), path.suffix in (".json", ".jsonl")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the file is not UTF-8 at byte {error.start}", got=error.reason, where=path
        ) from None


def _conversation(text: str, number: int) -> list[dict[str, Any]] | None:
    """Messages of a record of a JSON document or of JSON lines; None where it has none."""
    records = list(_records(text))
    if not any(_messages(record) is not None for record in records):
        return None
    if not 1 <= number <= len(records):
        raise ConfigError(
            "there is no such record", got=number, expected=f"1 to {len(records)}", where="--record"
        )
    messages = _messages(records[number - 1])
    if messages is None:
        raise DataError(
            "the record has no messages",
            expected="a list under messages",
            where=f"--record {number}",
        )
    return messages


def _records(text: str) -> Iterator[Any]:
    try:
        document = json.loads(text)
    except ValueError:
        for line in text.splitlines():
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError:
                    return
        return
    is_conversation = isinstance(document, list) and _messages({"messages": document}) is not None
    yield from [document] if is_conversation or not isinstance(document, list) else document


def _messages(record: Any) -> list[dict[str, Any]] | None:
    """The messages of a record, or the record itself where it is a list of messages."""
    messages = record.get("messages") if isinstance(record, dict) else record
    if not isinstance(messages, list) or not messages:
        return None
    are = all(isinstance(message, dict) and "role" in message for message in messages)
    return messages if are else None


def _summary(tokenizer: MegatronTokenizerText, text: str, views: list[TokenView]) -> str:
    size = len(text.encode())
    parts = [
        f"{tokenizer.library}, {tokenizer.vocab_size:,} ids",
        f"{len(views):,} tokens",
        f"{size:,} bytes",
    ]
    if views:
        parts.append(f"{size / len(views):.2f} bytes/token")
    trained = sum(bool(view.trained) for view in views)
    if any(view.trained is not None for view in views):
        parts.append(f"{trained:,} trained")
    return " · ".join(parts)


def _colors(when: str) -> bool:
    if when == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return when == "always"
