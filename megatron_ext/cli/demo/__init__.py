"""Distil across two real tokenizers, end to end, in minutes on a CPU.

    megatron-ext demo

Three runs, each resumed if it was interrupted and skipped if it is finished:

1. a teacher with a SentencePiece vocabulary learns from all of the text;
2. a smaller student with a Tekken vocabulary is distilled on a twelfth of it;
3. the same student trains on the same twelfth, for as many steps, without a teacher.

The table at the end compares them in bits per byte of text that none of them has read.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import yaml

from megatron_ext.cli.demo.corpus import write_corpus
from megatron_ext.errors import MegatronExtError
from megatron_ext.files import write_text
from megatron_ext.imports import missing_package

_HERE: Final = Path(__file__).parent
TEACHER_TOKENIZER: Final = "mistral_instruct_tokenizer_240323.model.v3"
STUDENT_TOKENIZER: Final = "tekken_240911.json"


class DemoError(MegatronExtError):
    """A run of the demo failed, or its result is not what it should be."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the verb."""
    parser.add_argument("--run-dir", default="runs/demo", help="folder for everything it makes")


def run(arguments: argparse.Namespace) -> None:
    """Run what is not done yet and print the table."""
    for package in ("torch", "mistral_common"):
        if find_spec(package) is None:
            raise missing_package(package, feature="megatron-ext demo", extra="demo")
    root = Path(arguments.run_dir)
    started = time.perf_counter()
    if not (root / "data" / "validation.jsonl").exists():
        write_corpus(root / "data")
    vocabularies = importlib.resources.files("mistral_common") / "data"
    with importlib.resources.as_file(vocabularies) as files:
        teacher, student = _write_configs(root, files)
        _train("1/3 teacher", teacher, root / "teacher")
        _train("2/3 student, distilled", student, root / "distilled")
        flags = ["--loss-objective", "next_token"]
        _train("3/3 student, no teacher", student, root / "undistilled", *flags)
    _print_table(root, time.perf_counter() - started)


def _write_configs(root: Path, vocabularies: Path) -> tuple[Path, Path]:
    """Write the complete configurations of the teacher and of the student."""
    paths = []
    for name, text, model in (
        ("teacher", "train", TEACHER_TOKENIZER),
        ("distill", "student", STUDENT_TOKENIZER),
    ):
        values = yaml.safe_load((_HERE / f"{name}.yaml").read_text(encoding="utf-8"))
        values["run_dir"] = str(root / ("teacher" if name == "teacher" else "distilled"))
        values["tokenizer"]["model"] = str(vocabularies / model)
        if "teacher" in values:
            values["teacher"]["tokenizer"]["model"] = str(vocabularies / TEACHER_TOKENIZER)
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
    if is_teacher:
        return 2, []
    return 4, ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]


def _environment(processes: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // processes)
    return {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore", **os.environ}


def _print_table(root: Path, seconds: float) -> None:
    distilled, undistilled = _rows(root / "distilled"), _rows(root / "undistilled")
    teacher = _last(distilled, "teacher_bits_per_byte")
    with_teacher = _last(distilled, "student_bits_per_byte")
    without = _last(undistilled, "student_bits_per_byte")
    print()
    print(f"{'held-out text':<34}{'bits per byte':>14}{'tokens/s':>12}")
    for name, bits, rows in (
        ("teacher (SentencePiece, 32,768)", teacher, _rows(root / "teacher")),
        ("student (Tekken, 131,072), distilled", with_teacher, distilled),
        ("the same student, no teacher", without, undistilled),
    ):
        print(f"{name:<37}{bits:>11.3f}{_tokens_per_second(rows):>12,.0f}")
    print()
    for line in _coverage(root / "distilled"):
        print(line)
    print(f"{'student':<16}{root / 'distilled'}")
    print(f"{'this call took':<16}{seconds / 60:.1f} minutes")
    print(f"{'next':<16}megatron-ext report {root / 'distilled'} {root / 'undistilled'}")
    if with_teacher >= without:
        raise DemoError(
            "the distilled student is not better than the one without a teacher",
            got=f"{with_teacher:.3f} bits per byte",
            expected=f"less than {without:.3f}",
        )


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _last(rows: list[dict[str, Any]], name: str) -> float:
    return float(next(row[name] for row in reversed(rows) if row.get(name) is not None))


def _tokens_per_second(rows: list[dict[str, Any]]) -> float:
    return float(sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows))


def _coverage(run_dir: Path) -> list[str]:
    rows = _rows(run_dir)
    sizes = ("one_to_one", "one_to_many", "many_to_one", "many_to_many")
    chunks = sum(row["chunks"] for row in rows)
    shares = {name: sum(row[name] for row in rows) / chunks for name in sizes}
    listed = ", ".join(f"{share:.1%} {name}" for name, share in shares.items())
    return [f"{'chunks':<16}{listed}"]
