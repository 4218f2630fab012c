"""Show the tokens of a text, or the trained part of a conversation.

    megatron-ext inspect "naïve 2017" --tokenizer-model tokenizer.json
    megatron-ext inspect --conversation chat.jsonl --tokenizer-model DIR \\
        --tokenizer-prompt-format auto --html chat.html

The argument is a file, - for standard input, or else the text itself, shown token by token. With
--conversation the file holds conversations: each is shown as its template writes it, with the
source of every character and the tokens that are trained.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from megatron_ext.cli.output import PAGE, check_output
from megatron_ext.cli.pages.conversation_report import ConversationReport
from megatron_ext.cli.pages.conversation_view import has_conversations, json_records
from megatron_ext.cli.pages.token_view import (
    TokenView,
    add_color_argument,
    listing,
    token_views,
    use_colors,
)
from megatron_ext.conversation.records import RECORD_SCHEMA_REGISTRY
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.tokenizers import MegatronTokenizerText, build_tokenizer
from megatron_ext.training.configuration.tokenizer_arguments import (
    add_short_tokenizer_flag,
    add_tokenizer_arguments,
    tokenizer_config_from_arguments,
)

_FILE_SUFFIXES: Final = (".json", ".jsonl", ".txt", ".md")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb."""
    parser.usage = (
        "%(prog)s TEXT|FILE [options]\n       %(prog)s --conversation FILE [--html PATH] [options]"
    )
    parser.add_argument(
        "source", nargs="?", metavar="TEXT|FILE", help="a text, a file, or - for standard input"
    )
    conversation = parser.add_argument_group("conversation")
    conversation.add_argument(
        "--conversation", metavar="FILE", help="JSON or JSON lines, or - for standard input"
    )
    conversation.add_argument(
        "--record",
        type=_record,
        default=1,
        metavar="N|all",
        help="which conversation of the file to show, or all (1)",
    )
    conversation.add_argument(
        "--conversation-schema",
        choices=("auto", *RECORD_SCHEMA_REGISTRY),
        default="auto",
        help="format of the records; auto detects it",
    )
    conversation.add_argument("--html", type=Path, metavar="PATH", help="write an HTML page")
    conversation.add_argument("--tokens", action="store_true", help="list the tokens too")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--limit", type=int, default=200, metavar="N", help="tokens to list; 0 for all (200)"
    )
    add_color_argument(output)
    output.add_argument(
        "--json",
        action="store_true",
        help="one JSON object for each token; with --conversation for each conversation",
    )
    add_tokenizer_arguments(parser)
    add_short_tokenizer_flag(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print the tokens, or the conversations."""
    _check(arguments)
    tokenizer = build_tokenizer(tokenizer_config_from_arguments(arguments))
    if arguments.conversation is None:
        _inspect_text(tokenizer, arguments)
    else:
        _inspect_conversations(tokenizer, arguments)


def _check(arguments: argparse.Namespace) -> None:
    if (arguments.source is None) == (arguments.conversation is None):
        raise ConfigError(
            "there is nothing to show"
            if arguments.source is None
            else "there is a text and a file of conversations",
            expected="a text, a file, or --conversation FILE",
        )
    if arguments.conversation is None:
        given = {
            "--html": arguments.html is not None,
            "--tokens": arguments.tokens,
            "--record all": arguments.record is None,
        }
        for flag, is_given in given.items():
            if is_given:
                raise ConfigError("the option is for --conversation", where=flag)
    if arguments.html is not None:
        check_output(arguments.html, "--html", begins=PAGE)


def _inspect_conversations(tokenizer: MegatronTokenizerText, arguments: argparse.Namespace) -> None:
    if arguments.conversation == "-":
        text, name = sys.stdin.read(), "standard input"
    else:
        path = Path(arguments.conversation)
        text, name = _file_text(path), path.name
    report = ConversationReport.of(
        tokenizer,
        text,
        name=name,
        record=arguments.record,
        schema=arguments.conversation_schema,
    )
    report.warn()
    if arguments.html is not None:
        report.write_page(arguments.html)
    if arguments.json:
        sys.stdout.writelines(report.json_lines())
    elif arguments.html is not None:
        sys.stdout.writelines(report.summary_lines())
        sys.stdout.write(f"written: {arguments.html}\n")
    else:
        sys.stdout.writelines(
            report.terminal_lines(
                color=use_colors(arguments.color), tokens=arguments.tokens, limit=arguments.limit
            )
        )


def _inspect_text(tokenizer: MegatronTokenizerText, arguments: argparse.Namespace) -> None:
    text, views = _views(tokenizer, arguments)
    if arguments.json:
        shown = views[: arguments.limit] if arguments.limit else views
        sys.stdout.writelines(
            json.dumps(view.as_row(), ensure_ascii=False) + "\n" for view in shown
        )
        return
    sys.stdout.write(_summary(tokenizer, text, views) + "\n\n")
    sys.stdout.write(listing(views, limit=arguments.limit, color=use_colors(arguments.color)))


def _views(
    tokenizer: MegatronTokenizerText, arguments: argparse.Namespace
) -> tuple[str, Sequence[TokenView]]:
    """The text and its tokens; for conversations in JSON, of what the template writes."""
    text, is_json = _read(arguments.source)
    if not is_json or not _holds_conversations(text):
        return text, token_views(tokenizer, text, *tokenizer.encode_with_byte_ends(text))
    report = ConversationReport.of(
        tokenizer,
        text,
        name=arguments.source,
        record=arguments.record,
        schema=arguments.conversation_schema,
    )
    (view,) = report.views
    return view.text, view.tokens


def _holds_conversations(text: str) -> bool:
    """Whether ``text`` is JSON with conversations; malformed JSON is shown as text."""
    try:
        return has_conversations(json_records(text, ""))
    except DataError:
        return False


def _read(source: str) -> tuple[str, bool]:
    """The text of the argument, and whether it is a JSON file."""
    if source == "-":
        return sys.stdin.read(), False
    path = Path(source)
    try:
        if not path.is_file():
            if path.suffix in _FILE_SUFFIXES and not any(map(str.isspace, source)):
                sys.stderr.write(f"note: there is no file {source}, so it is shown as a text\n")
            return source, False
    except OSError:
        # A text may be longer than a file name may be.
        return source, False
    return _file_text(path), path.suffix in (".json", ".jsonl")


def _file_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the file is not UTF-8 at byte {error.start}",
            got=error.reason,
            expected="a text, or conversations in JSON or JSON lines, uncompressed",
            where=path,
        ) from None
    except OSError as error:
        raise DataError("cannot read the file", got=error.strerror, where=path) from None


def _record(text: str) -> int | None:
    """Parse the number of a record; None for all."""
    if text == "all":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor all") from None


def _summary(tokenizer: MegatronTokenizerText, text: str, views: Sequence[TokenView]) -> str:
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
