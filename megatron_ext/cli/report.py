"""Write one page about a run, or about several runs side by side.

    megatron-ext report runs/student
    megatron-ext report runs/projected_kl runs/alm runs/without-teacher --output compared.html
    megatron-ext report runs/student --baseline runs/without-teacher
    megatron-ext report runs/student --text "Sold 201 of 2017."
    megatron-ext report runs/student --watch 30
    megatron-ext report runs/student --with-models

The page needs no network and no other file. It has the result in a sentence, curves of every loss
term, learning rate and gradient norm, times, memory, bits per byte, the alignment of sample texts,
and the configuration with the differences between runs. An unfinished run is shown up to its last
logged iteration.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from megatron_ext.cli.output import PAGE, check_output, quiet_libraries, write_output
from megatron_ext.cli.pages.audit_source import encodable
from megatron_ext.cli.pages.run_page import PairSample, pair_samples, report_page, sample_texts
from megatron_ext.cli.pages.run_record import SAMPLES_FILE, RunRecord, read_run
from megatron_ext.distributed.layout import launched_processes
from megatron_ext.errors import ConfigError
from megatron_ext.files import write_text
from megatron_ext.imports import large_imports

REPORT_FILE: Final = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the verb."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run_dir of a run")
    parser.add_argument(
        "-o",
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
        help="rewrite the page at this interval until the runs are finished; it reloads itself",
    )
    parser.add_argument(
        "--with-models",
        action="store_true",
        help="load student and teacher, and show what both write and predict on the same texts; "
        f"{SAMPLES_FILE} in the run's folder keeps it for later pages",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="with --with-models, a beginning that both models complete; may be repeated",
    )
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="TEXT",
        help="show how tokens align on this text, in place of the run's own; may be repeated",
    )
    parser.add_argument(
        "--sample-bytes",
        type=int,
        default=1500,
        metavar="N",
        help="bytes of text to show for each pair of tokenizers; 0 shows none (1500)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the page, and print its path; with ``--watch`` again and again."""
    if arguments.watch is not None and arguments.watch < 1:
        raise ConfigError("too small", where="--watch", got=arguments.watch, expected="1 or more")
    paths = [*arguments.runs, *([] if arguments.baseline is None else [arguments.baseline])]
    names = _names(paths)
    texts = [encodable(text, "--text") for text in arguments.text]
    output = arguments.output or arguments.runs[0] / REPORT_FILE
    check_output(output, "--output", begins=PAGE)
    if arguments.with_models:
        for path, name in zip(arguments.runs, names, strict=False):
            _sample_models(read_run(path, name=name), texts, arguments.prompt)
    elif arguments.prompt:
        raise ConfigError("models complete prompts", where="--prompt", fix="add --with-models")
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


def _sample_models(run: RunRecord, texts: Sequence[str], prompts: Sequence[str]) -> None:
    """Write what the models of a run write and predict into its folder."""
    if not run.distils:
        return
    if launched_processes() > 1:
        raise ConfigError("models are sampled by one process", where="--with-models")
    read = sample_texts(run, texts)
    quiet_libraries()
    with large_imports():
        from megatron_ext.evaluation.model_samples import COMPLETIONS, model_samples
    from megatron_ext.training.checkpoints.folder import find_checkpoint, iteration_of

    checkpoint = find_checkpoint(str(run.folder), where="--with-models")
    of_teachers: dict[str, Any] = {}
    for name, teacher in run.teachers.items():
        path = teacher.get("checkpoint")
        if teacher.get("library") == "huggingface" or not isinstance(path, str):
            problem = "The teacher is not run by megatron-core, and is not sampled."
            of_teachers[name] = {"problem": problem}
            continue
        of_teachers[name] = model_samples(checkpoint, Path(path), read, prompts=prompts)
    values = {
        "iteration": iteration_of(checkpoint),
        "temperature": COMPLETIONS.temperature,
        "teachers": of_teachers,
    }
    write_text(run.folder / SAMPLES_FILE, json.dumps(values, ensure_ascii=False) + "\n")


def _names(paths: Sequence[Path]) -> list[str]:
    """Name of each run: its folder's name, or more of the path where names coincide."""
    resolved = [Path(os.path.abspath(path)) for path in paths]
    if len(set(resolved)) < len(resolved):
        raise ConfigError("a run is named twice", got=" ".join(map(str, paths)))
    names = [path.name for path in resolved]
    if len(set(names)) == len(names):
        return names
    return [os.path.relpath(path, os.path.commonpath(resolved)) for path in resolved]
