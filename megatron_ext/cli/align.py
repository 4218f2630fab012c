"""Show how the tokens of a student and a teacher align on a text, and recommend an objective.

    megatron-ext align corpus.jsonl --student llama3_2/ --teacher qwen3/tokenizer.json
    megatron-ext align gsm8k.jsonl --text-field question answer --student DIR --teacher DIR \\
        --html pair.html --json pair.json
    megatron-ext align --text "Sold 201 of 2017." --student DIR --teacher DIR

Files are JSON lines, Parquet, Arrow or plain text, as megatron-ext tokenize reads them; - is
standard input. A chunk is a minimal pair of token spans that cover the same bytes; it is 1:1 if it
is one student token and one teacher token. The report gives the share of 1:1 chunks by script and
by class of text, lists the most important others, and recommends an objective with its reasons.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

from megatron_ext.cli.output import MOST_NAMED, PAGE, check_output, warn_left_out, write_output
from megatron_ext.cli.pages.audit_source import AuditSource
from megatron_ext.cli.pages.audit_text import AuditRun, text_report
from megatron_ext.cli.pages.token_view import add_color_argument, use_colors
from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig, build_tokenizer
from megatron_ext.training.configuration.arguments import (
    argparse_type,
    flags_of,
    mark_advanced,
    terminal_help,
)
from megatron_ext.training.configuration.tokenizer_arguments import BASIC_FIELDS
from megatron_ext.typed_mapping import build_config

_STANDARD_OUTPUT = "-"
_PREFIXES: Final = {"student": "tokenizer-", "teacher": "teacher-tokenizer-"}
"""Prefixes of both tokenizers' flags; ``--student`` and ``--teacher`` abbreviate the models."""
_MODEL: Final = "model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb."""
    parser.usage = "%(prog)s FILE... --student MODEL --teacher MODEL [options]"
    data = parser.add_argument_group("text")
    data.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="files, folders and glob patterns: .jsonl, .json, .parquet, .arrow, .txt, also .gz; "
        "- for standard input",
    )
    data.add_argument("--text", metavar="TEXT", help="a text in place of files")
    data.add_argument(
        "--text-field",
        "--json-keys",
        dest="json_keys",
        nargs="+",
        default=[],
        metavar="KEY",
        help="fields of a record to align, each a document of its own; text when unset",
    )
    data.add_argument(
        "--max-documents", type=_count, metavar="N", help="stop after this many; all when unset"
    )
    data.add_argument(
        "--strict",
        action="store_true",
        help="stop at the first record that cannot be used, instead of leaving it out",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", metavar="FILE|-", help="write the report as JSON; - prints it in place of text"
    )
    output.add_argument(
        "--html", type=Path, metavar="FILE", help="write an HTML page that shows both tokenizations"
    )
    output.add_argument(
        "--html-bytes",
        type=_count,
        default=20_000,
        metavar="N",
        help="bytes of text on the page, from the first documents (20000)",
    )
    output.add_argument(
        "--examples",
        type=int,
        default=10,
        metavar="N",
        help="chunks that are not 1:1 to list in each ranking, up to 25 (10)",
    )
    add_color_argument(output)
    # Spelled as megatron-ext distill spells them.
    for side, prefix in _PREFIXES.items():
        group = parser.add_argument_group(f"{side}'s tokenizer")
        for flag in flags_of(TokenizerConfig, prefix=prefix):
            names = [f"--{side}"] if flag.keys[-1] == _MODEL else []
            action = group.add_argument(
                *names,
                flag.name,
                dest=f"{side}.{flag.keys[-1]}",
                default=argparse.SUPPRESS,
                help=terminal_help(flag.help),
                **argparse_type(flag.hint),
            )
            if flag.keys[-1] not in BASIC_FIELDS:
                mark_advanced(action)


def run(arguments: argparse.Namespace) -> None:
    """Audit the pair and print the report."""
    source = AuditSource(
        files=tuple(arguments.files),
        text=arguments.text,
        keys=tuple(arguments.json_keys),
        most_documents=arguments.max_documents,
        is_strict=arguments.strict,
    )
    source.check()
    if arguments.html is not None:
        check_output(arguments.html, "--html", begins=PAGE)
    if arguments.json not in (None, _STANDARD_OUTPUT):
        check_output(Path(arguments.json), "--json", begins='{\n "student": {')
    student, teacher = (_tokenizer(arguments, side) for side in _PREFIXES)
    wants_page = arguments.html is not None
    audit = AuditRun.of(
        student, teacher, source, sample_bytes=arguments.html_bytes if wants_page else 0
    )
    _warn(audit)
    if wants_page:
        from megatron_ext.cli.pages.audit_page import audit_page

        page = audit_page(audit, student, teacher, most_bytes=arguments.html_bytes)
        write_output(arguments.html, page, "--html")
    row = json.dumps(audit.as_row(), ensure_ascii=False, indent=1, allow_nan=False) + "\n"
    if arguments.json == _STANDARD_OUTPUT:
        sys.stdout.write(row)
        return
    if arguments.json is not None:
        write_output(Path(arguments.json), row, "--json")
    sys.stdout.write(
        text_report(audit, examples=max(arguments.examples, 0), color=use_colors(arguments.color))
    )


def _warn(audit: AuditRun) -> None:
    """Name the first records and documents left out, on standard error."""
    left_out = [(row["place"], row["problem"]) for row in audit.source.bad]
    left_out += [(one.place, one.problem) for one in audit.report.refused]
    more = audit.source.bad_records + audit.report.refused_documents - MOST_NAMED
    warn_left_out(
        left_out,
        f"and {more:,} more; --json lists the first" if more > 0 else "",
        audit.source.skipped_files,
    )


def _count(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _tokenizer(arguments: argparse.Namespace, side: str) -> MegatronTokenizerText:
    values = {
        name.removeprefix(f"{side}."): value
        for name, value in vars(arguments).items()
        if name.startswith(f"{side}.")
    }
    if not values.keys() & {_MODEL, "library"}:
        raise ConfigError(
            "no tokenizer is named",
            where=f"--{side}",
            expected="a tokenizer file, its directory, or its name on the HuggingFace hub",
        )
    spelled = {flag.keys: flag.name for flag in flags_of(TokenizerConfig, prefix=_PREFIXES[side])}
    config = build_config(TokenizerConfig, values, lambda keys: spelled.get(keys, f"--{side}"))
    return build_tokenizer(config)
