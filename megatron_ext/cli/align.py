"""Show how the tokens of a student and a teacher meet on a text, and which objective suits them.

    megatron-ext align corpus.jsonl --student llama3_2/ --teacher qwen3/tokenizer.json
    megatron-ext align gsm8k.jsonl --json-keys question answer --student DIR --teacher DIR \\
        --html pair.html --json pair.json
    megatron-ext align --text "Sold 201 of 2017." --student DIR --teacher DIR

Files are JSON lines, Parquet, Arrow or plain text, as megatron-ext tokenize reads them; - is
standard input. A chunk is a minimal pair of token spans that cover the same bytes; it is 1:1 where
one student token is one teacher token. The report says how many chunks are, by script and by class
of text, which ones are not and matter most, and recommends an objective with the numbers behind it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megatron_ext.atomic_file import write_text
from megatron_ext.cli.alignment.audit_run import AuditRun
from megatron_ext.cli.alignment.source import AuditSource
from megatron_ext.cli.alignment.text_report import text_report
from megatron_ext.cli.pages.terminal import add_color_argument, use_colors
from megatron_ext.cli.tokenizer_pair import add_pair_arguments, pair_from_arguments
from megatron_ext.errors import ConfigError

_BAD_SHOWN = 5
_STANDARD_OUTPUT = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
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
        "--json-keys",
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
        "--html", type=Path, metavar="FILE", help="write a page that shows both tokenizations"
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
    add_pair_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Audit the pair and say what was found."""
    source = AuditSource(
        files=tuple(arguments.files),
        text=arguments.text,
        keys=tuple(arguments.json_keys),
        most_documents=arguments.max_documents,
        is_strict=arguments.strict,
    )
    source.check()
    student, teacher = pair_from_arguments(arguments)
    wants_page = arguments.html is not None
    found = AuditRun.of(
        student, teacher, source, sample_bytes=arguments.html_bytes if wants_page else 0
    )
    _warn(found)
    if wants_page:
        from megatron_ext.cli.alignment.page import audit_page

        page = audit_page(found, student, teacher, most_bytes=arguments.html_bytes)
        _write(arguments.html, page, "--html")
    row = json.dumps(found.as_row(), ensure_ascii=False, indent=1, allow_nan=False) + "\n"
    if arguments.json == _STANDARD_OUTPUT:
        sys.stdout.write(row)
        return
    if arguments.json is not None:
        _write(Path(arguments.json), row, "--json")
    sys.stdout.write(
        text_report(found, examples=max(arguments.examples, 0), color=use_colors(arguments.color))
    )


def _warn(found: AuditRun) -> None:
    """The first records and documents that were left out, on standard error."""
    left_out = [(row["place"], row["problem"]) for row in found.source.bad]
    left_out += [(one.place, one.problem) for one in found.report.refused]
    for place, problem in left_out[:_BAD_SHOWN]:
        sys.stderr.write(f"megatron-ext: left out: {place}: {problem}\n")
    more = found.source.bad_records + found.report.refused_documents - _BAD_SHOWN
    if more > 0:
        sys.stderr.write(f"megatron-ext: and {more:,} more; --json lists the first\n")
    for file in found.source.skipped_files[:_BAD_SHOWN]:
        sys.stderr.write(f"megatron-ext: skipped, of no known kind: {file}\n")


def _write(path: Path, text: str, flag: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise ConfigError(
            "cannot write the file", got=error.strerror, where=f"{flag} {path}"
        ) from error


def _count(text: str) -> int:
    """A number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)
