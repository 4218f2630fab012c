"""Write one page about a run, or about several runs side by side.

    megatron-ext report runs/student
    megatron-ext report runs/projected_kl runs/alm runs/without-teacher --output compared.html
    megatron-ext report runs/student --baseline runs/without-teacher
    megatron-ext report runs/student --text "Sold 201 of 2017."
    megatron-ext report runs/student --watch 30

The page needs no network and no other file. It has the result in a sentence, curves of every loss
term, learning rate and gradient norm, times, memory, bits per byte, the alignment of sample texts,
and the configuration with the differences between runs. An unfinished run is shown up to its last
logged iteration.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from megatron_ext.cli.output import write_output
from megatron_ext.cli.pages.audit_source import encodable
from megatron_ext.cli.pages.run_page import PairSample, pair_samples, report_page
from megatron_ext.cli.pages.run_record import read_run
from megatron_ext.errors import ConfigError

REPORT_FILE: Final = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run_dir of a run")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the page; {REPORT_FILE} in the folder of the (first) run when unset",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="RUN",
        help="run_dir of a run without a teacher, which the others are compared with",
    )
    parser.add_argument(
        "--watch",
        type=int,
        metavar="SECONDS",
        help="write the page again so often until the runs are finished; it reloads itself",
    )
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="TEXT",
        help="show how tokens meet on this text, in place of the run's own; may be repeated",
    )
    parser.add_argument(
        "--sample-bytes",
        type=int,
        default=1500,
        metavar="N",
        help="bytes of text to draw for each pair of tokenizers; 0 leaves texts out (1500)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the page, and print its path; with ``--watch`` again and again."""
    if arguments.watch is not None and arguments.watch < 1:
        raise ConfigError("too small", where="--watch", got=arguments.watch, expected="1 or more")
    paths = [*arguments.runs, *([] if arguments.baseline is None else [arguments.baseline])]
    names = _names(paths)
    texts = [encodable(text, "--text") for text in arguments.text]
    output = arguments.output or arguments.runs[0] / REPORT_FILE
    samples: list[PairSample] | None = None
    while True:
        runs = [read_run(path, name=name) for path, name in zip(paths, names, strict=True)]
        if arguments.baseline is not None and runs[-1].distils:
            raise ConfigError(
                "the baseline learns from a teacher",
                where=f"--baseline {arguments.baseline}",
                expected="a run with loss.objective next_token",
            )
        is_first = samples is None
        if samples is None:
            most_bytes = arguments.sample_bytes
            samples = pair_samples(runs, texts, most_bytes=most_bytes) if most_bytes > 0 else []
        goes_on = arguments.watch is not None and not all(run.is_finished for run in runs)
        page = report_page(runs, samples, reload_seconds=arguments.watch if goes_on else None)
        write_output(output, page, "--output")
        if is_first:
            sys.stdout.write(f"{output}\n")
            sys.stdout.flush()
        if not goes_on:
            return
        time.sleep(arguments.watch)


def _names(paths: Sequence[Path]) -> list[str]:
    """Name of each run: its folder's name, or more of the path where names coincide."""
    resolved = [Path(os.path.abspath(path)) for path in paths]
    if len(set(resolved)) < len(resolved):
        raise ConfigError("a run is named twice", got=" ".join(map(str, paths)))
    names = [path.name for path in resolved]
    if len(set(names)) == len(names):
        return names
    return [os.path.relpath(path, os.path.commonpath(resolved)) for path in resolved]
