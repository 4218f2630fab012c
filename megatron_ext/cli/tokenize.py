"""Tokenize documents to Megatron's indexed datasets (.bin and .idx).

    megatron-ext tokenize --input corpus.jsonl.gz more/ --output-prefix data/corpus \\
        --tokenizer-model tokenizer.json --append-eod --workers 8

Input is JSON lines, Parquet, Arrow or plain text; JSON and text may be gzipped. The output is
PREFIX_KEY_document.bin and .idx for each key, as Megatron's preprocess_data.py makes them. With
--tokenizer-mode sft the records hold conversations (messages, ShareGPT, Alpaca, tool calls) and
PREFIX_KEY_loss_mask says which tokens are trained. Records that cannot be used are left out and
listed in PREFIX_report.json.

The same command resumes a run that was killed. To spread a run over machines, give each the same
--shards and its own --shard-index; the command without --shard-index then joins all shards.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import get_args

import yaml

from megatron_ext.cli.output import MOST_NAMED, quiet_libraries, warn_left_out
from megatron_ext.constants import MAX_RECORD_MIB
from megatron_ext.conversation.records import RECORD_SCHEMA_REGISTRY, RecordSchemaName
from megatron_ext.documents.id_tokenizers import LOSS_MASK
from megatron_ext.errors import ConfigError, counted
from megatron_ext.preprocessing.config import PreprocessConfig
from megatron_ext.preprocessing.preprocess import preprocess
from megatron_ext.preprocessing.report import Report
from megatron_ext.tokenizers import TokenizerConfig
from megatron_ext.training.configuration.tokenizer_arguments import (
    add_short_tokenizer_flag,
    add_tokenizer_arguments,
    tokenizer_config_from_arguments,
)

_EXIT_INTERRUPTED = 128 + 2
"""Exit code of a program ended by SIGINT."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb."""
    parser.usage = "%(prog)s --input PATH... --output-prefix PREFIX [options]"
    data = parser.add_argument_group("data")
    data.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders and glob patterns: .jsonl, .json, .parquet, .arrow, .txt, also .gz",
    )
    data.add_argument(
        "--output-prefix",
        "-o",
        "--output",
        required=True,
        metavar="PREFIX",
        help="folder and first part of the names of the output",
    )
    data.add_argument(
        "--text-field",
        "--json-keys",
        dest="json_keys",
        nargs="+",
        default=[],
        metavar="KEY",
        help="fields to tokenize, each into files of its own; text when unset, and in the mode sft "
        "the conversation of the record, into files named messages",
    )
    data.add_argument(
        "--conversation-schema",
        choices=get_args(RecordSchemaName),
        default="auto",
        help="format of conversations in the mode sft; auto takes that of the first records",
    )
    data.add_argument(
        "--append-eod",
        action="store_true",
        help="end every document that has any tokens with the end-of-document token",
    )
    data.add_argument("--split-sentences", action="store_true", help=argparse.SUPPRESS)
    run = parser.add_argument_group("run")
    run.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes; one for each shard, as far as there are cores, when unset",
    )
    run.add_argument(
        "--shards",
        "--shard-count",
        dest="shard_count",
        type=int,
        metavar="K",
        help="parts to cut the input into; as many as workers, none over 256 MiB, when unset",
    )
    run.add_argument(
        "--shard-index",
        dest="shard_indices",
        type=int,
        nargs="+",
        default=[],
        metavar="I",
        help="make these parts only, from 0 to K-1",
    )
    run.add_argument(
        "--overwrite",
        action="store_true",
        help="replace output that exists, and parts of an unfinished run that was another",
    )
    run.add_argument(
        "--strict",
        action="store_true",
        help="stop at the first record that cannot be used, instead of listing it",
    )
    run.add_argument(
        "--max-record-mib",
        type=int,
        default=MAX_RECORD_MIB,
        metavar="N",
        help=f"MiB of a record; a longer one cannot be used ({MAX_RECORD_MIB})",
    )
    add_tokenizer_arguments(parser)
    add_short_tokenizer_flag(parser)


def run(arguments: argparse.Namespace) -> None:
    """Tokenize, and print a summary."""
    if arguments.split_sentences:
        raise ConfigError(
            "sentences are not split here",
            where="--split-sentences",
            fix="give a list of sentences under the key: each becomes a sequence of the document",
        )
    config = PreprocessConfig(
        inputs=tuple(arguments.input),
        output_prefix=arguments.output_prefix,
        tokenizer=tokenizer_config_from_arguments(arguments),
        json_keys=tuple(arguments.json_keys),
        conversation_schema=arguments.conversation_schema,
        append_eod=arguments.append_eod,
        workers=arguments.workers,
        shard_count=arguments.shard_count,
        shard_indices=tuple(arguments.shard_indices),
        overwrite=arguments.overwrite,
        strict=arguments.strict,
        max_record_mib=arguments.max_record_mib,
    )
    sys.stdout.write(_settings(config))
    sys.stdout.flush()
    quiet_libraries()
    try:
        report = preprocess(config)
    except KeyboardInterrupt:
        sys.stderr.write("megatron-ext: interrupted; the same command takes the run up again\n")
        sys.exit(_EXIT_INTERRUPTED)
    if report is None:
        shards = " ".join(map(str, config.shard_indices))
        sys.stdout.write(f"finished: shard {shards} of {config.shard_count}\n")
    else:
        _warn(config, report)
        sys.stdout.write(_summary(config, report))


def _settings(config: PreprocessConfig) -> str:
    """The settings that differ from their defaults, as YAML."""
    values = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    }
    unset = dataclasses.asdict(TokenizerConfig())
    tokenizer = {k: v for k, v in dataclasses.asdict(config.tokenizer).items() if v != unset[k]}
    return yaml.safe_dump({**values, "tokenizer": tokenizer}, sort_keys=False) + "\n"


def _unit(dataset: str) -> str:
    """Unit of a dataset's count of tokens, in words."""
    if dataset.endswith(f"_{LOSS_MASK}"):
        return "of them trained"
    return f"tokens in {dataset}"


def _warn(config: PreprocessConfig, report: Report) -> None:
    """Name the first records left out, on standard error."""
    listed = f"the first {len(report.bad):,}" if report.bad_unlisted else "all"
    more = f"{listed} that was left out: {config.names.report}"
    warn_left_out(
        [(bad.place, bad.problem) for bad in report.bad],
        more if len(report.bad) > MOST_NAMED else "",
        report.skipped_files,
    )


def _summary(config: PreprocessConfig, report: Report) -> str:
    counts = [
        counted(report.documents, "document"),
        f"{report.text_bytes / 1e6:,.1f} MB of text",
        *(f"{count:,} {_unit(name)}" for name, count in report.tokens.items()),
        f"{report.empty_documents:,} empty",
        f"{report.bad_records:,} left out",
    ]
    if report.settings["mode"] == "sft":
        counts.append(f"{report.untrained_documents:,} without a trained token")
        schema = report.settings["conversation_schema"]
        if schema != "auto":
            counts.append(f"read as {schema} ({RECORD_SCHEMA_REGISTRY[schema].shape})")
        if "chat_templates" in report.settings:
            counts.append(report.settings["chat_templates"])
    written = " ".join(str(prefix) for _, prefix in config.names.datasets())
    return f"{config.output_prefix}: {', '.join(counts)}\nwritten: {written} (.bin, .idx)\n"
