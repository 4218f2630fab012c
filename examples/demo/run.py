"""Distil across two real tokenizers, end to end: ``make demo``.

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
from pathlib import Path
from typing import Any

import torch
import yaml
from corpus import write_corpus

HERE = Path(__file__).parent
TEACHER_TOKENIZER = "mistral_instruct_tokenizer_240323.model.v3"
STUDENT_TOKENIZER = "tekken_240911.json"


def main() -> None:
    """Run what is not done yet and print the table."""
    arguments = _arguments()
    root = Path(arguments.run_dir)
    started = time.perf_counter()
    data = root / "data"
    if not (data / "validation.jsonl").exists():
        write_corpus(data)
    with importlib.resources.as_file(importlib.resources.files("mistral_common") / "data") as files:
        teacher_tokenizer = ["--tokenizer-model", str(files / TEACHER_TOKENIZER)]
        student_tokenizers = [
            *("--tokenizer-model", str(files / STUDENT_TOKENIZER)),
            *("--teacher-tokenizer-model", str(files / TEACHER_TOKENIZER)),
            *("--teacher-checkpoint", str(root / "teacher" / "checkpoints")),
        ]
        _train("1/3 teacher", root / "teacher", "teacher.yaml", data, teacher_tokenizer)
        _train(
            "2/3 student, distilled", root / "distilled", "distill.yaml", data, student_tokenizers
        )
        _train(
            "3/3 student, no teacher",
            root / "undistilled",
            "distill.yaml",
            data,
            [*student_tokenizers, "--loss-objective", "next_token"],
        )
    _print_table(root, time.perf_counter() - started)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run-dir", default="runs/demo", help="folder for everything it makes")
    return parser.parse_args()


def _train(title: str, run_dir: Path, config: str, data: Path, flags: list[str]) -> None:
    """One run of ``megatron-ext distill`` under torchrun, unless it is finished."""
    if _is_finished(run_dir, config):
        print(f"{title}: finished already in {run_dir}", flush=True)
        return
    print(f"{title}: {'resuming' if run_dir.exists() else 'starting'} in {run_dir}", flush=True)
    is_teacher = config == "teacher.yaml"
    processes, layout = _layout(is_teacher)
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / "log.txt"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)),
        *("--log-dir", str(run_dir / "torchrun"), "-m", "megatron_ext", "distill"),
        *("--config", str(HERE / config), "--run-dir", str(run_dir)),
        *("--data-train", str(data / ("train.jsonl" if is_teacher else "student.jsonl"))),
        *("--data-validation", str(data / "validation.jsonl")),
        *flags,
        *layout,
    ]
    with log.open("a", encoding="utf-8") as output:
        output.write(" ".join(command) + "\n")
        output.flush()
        # Standard error carries the progress bar; what the ranks print besides goes to the log.
        finished = subprocess.run(command, stdout=output, env=_environment(processes), check=False)
    if finished.returncode:
        sys.exit(f"{title} failed with exit code {finished.returncode}; see {log}")


def _is_finished(run_dir: Path, config: str) -> bool:
    latest = run_dir / "checkpoints" / "latest"
    settings = yaml.safe_load((HERE / config).read_text(encoding="utf-8"))
    final = settings["training"]["train_iters"]
    return latest.exists() and latest.read_text(encoding="utf-8").strip() == f"iter_{final:07d}"


def _layout(is_teacher: bool) -> tuple[int, list[str]]:
    """Processes to start and the flags of their layout, on GPUs where there are any."""
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
    for name in ("checkpoints", "metrics.jsonl", "loss_curve.png"):
        print(f"{name:<16}{root / 'distilled' / name}")
    print(f"{'this call took':<16}{seconds / 60:.1f} minutes")
    if with_teacher >= without:
        sys.exit("the distilled student is not better than the undistilled one")


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


if __name__ == "__main__":
    main()
