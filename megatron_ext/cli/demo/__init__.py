"""Distil across two real tokenizers, end to end, in minutes on a CPU.

    megatron-ext demo

Three runs, each resumed if it was interrupted and skipped if it is finished:

1. a teacher with a SentencePiece vocabulary learns from all of the text;
2. a smaller student with a Tekken vocabulary is distilled on an eighth of it;
3. the same student trains on the same eighth, for as many steps, with a loss without the teacher.

Both vocabularies are the heads of published ones, so that small models learn to use them. At the
end stand a table of what each model knows of text that none of them has read, three texts that each
of them completes, and the path of a report.
"""

from __future__ import annotations

import argparse
import importlib.resources
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import yaml

from megatron_ext.cli.demo.corpus import write_corpus
from megatron_ext.cli.demo.outcome import DemoError, check_outcome, print_outcome
from megatron_ext.cli.demo.vocabulary_head import write_head
from megatron_ext.files import write_text
from megatron_ext.imports import missing_package

_HERE: Final = Path(__file__).parent
STUDENT_SHARE: Final = 1 / 8
VOCABULARY_SIZE: Final = 4096
TOKENIZERS: Final = {"teacher": "tokenizer.model.v1", "student": "tekken_240911.json"}
"""Published vocabularies, of whose ids ``VOCABULARY_SIZE`` are kept."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the verb."""
    parser.add_argument("--run-dir", default="runs/demo", help="folder for everything it makes")


def run(arguments: argparse.Namespace) -> None:
    """Run what is not done yet, and print what came out."""
    for package in ("torch", "mistral_common"):
        if find_spec(package) is None:
            raise missing_package(package, feature="megatron-ext demo", extra="demo")
    root = Path(arguments.run_dir)
    started = time.perf_counter()
    if not (root / "data" / "validation.jsonl").exists():
        write_corpus(root / "data", student_share=STUDENT_SHARE)
    teacher, student = _write_configs(root, _write_tokenizers(root / "data"))
    told = ("--quiet",) * arguments.quiet + ("--debug",) * arguments.debug
    _train("1/3 teacher", teacher, root / "teacher", *told)
    _train("2/3 student, distilled", student, root / "distilled", *told)
    # The teacher still predicts, so that both students are compared with it.
    without_teacher = ("--loss-kd-weight", "0")
    _train("3/3 student, undistilled", student, root / "undistilled", *without_teacher, *told)
    print_outcome(root)
    print(f"{'this call took':<16}{(time.perf_counter() - started) / 60:.1f} minutes")
    check_outcome(root)


def _write_tokenizers(folder: Path) -> dict[str, Path]:
    """Write the vocabulary of each side, and give its file."""
    vocabularies = importlib.resources.files("mistral_common") / "data"
    files = {}
    with importlib.resources.as_file(vocabularies) as carried:
        for side, name in TOKENIZERS.items():
            suffix = ".json" if name.endswith(".json") else ".model"
            files[side] = folder / f"{side}{suffix}"
            write_head(carried / name, VOCABULARY_SIZE, files[side])
    return files


def _write_configs(root: Path, tokenizers: Mapping[str, Path]) -> tuple[Path, Path]:
    """Write the complete configurations of the teacher and of the student."""
    paths = []
    for name, text, side in (("teacher", "train", "teacher"), ("distill", "student", "student")):
        values = yaml.safe_load((_HERE / f"{name}.yaml").read_text(encoding="utf-8"))
        values["run_dir"] = str(root / ("teacher" if name == "teacher" else "distilled"))
        values["tokenizer"]["model"] = str(tokenizers[side])
        if "teacher" in values:
            values["teacher"]["tokenizer"]["model"] = str(tokenizers["teacher"])
            values["teacher"]["checkpoint"] = str(root / "teacher" / "checkpoints")
        data = root / "data"
        files = {"train": f"{text}.jsonl", "validation": "validation.jsonl"}
        values["data"] = {split: [str(data / file)] for split, file in files.items()}
        paths.append(root / f"{name}.yaml")
        write_text(paths[-1], yaml.safe_dump(values, sort_keys=False))
    return paths[0], paths[1]


def _train(title: str, config: Path, run_dir: Path, *flags: str) -> None:
    """One run of ``megatron-ext distill`` under torchrun, unless it is finished."""
    if _is_finished(run_dir, config):
        print(f"{title}: finished already in {run_dir}", flush=True)
        return
    print(f"{title}: {'resuming' if run_dir.exists() else 'starting'} in {run_dir}", flush=True)
    processes, layout = _layout(is_teacher=config.stem == "teacher")
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / "log.txt"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)),
        *("--log-dir", str(run_dir / "torchrun"), "-m", "megatron_ext", "distill"),
        *("--config", str(config), "--run-dir", str(run_dir)),
        *flags,
        *layout,
    ]
    with log.open("a", encoding="utf-8") as output:
        output.write(" ".join(command) + "\n")
        output.flush()
        # Standard error carries the progress bar; what the ranks print besides goes to the log.
        finished = subprocess.run(command, stdout=output, env=_environment(processes), check=False)
    if finished.returncode:
        raise DemoError(
            "a run of the demo failed",
            where=title,
            got=f"exit code {finished.returncode}",
            fix=f"see {log}; megatron-ext demo goes on from there",
        )


def _is_finished(run_dir: Path, config: Path) -> bool:
    latest = run_dir / "checkpoints" / "latest"
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    final = settings["training"]["train_iters"]
    return latest.exists() and latest.read_text(encoding="utf-8").strip() == f"iter_{final:07d}"


def _layout(*, is_teacher: bool) -> tuple[int, list[str]]:
    """Processes to start and the flags of their layout, on GPUs where there are any."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus in (1, 2, 3):
        return 1, []
    return 2, [] if is_teacher else ["--tensor-model-parallel-size", "2"]


def _environment(processes: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // processes)
    return {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore", **os.environ}
