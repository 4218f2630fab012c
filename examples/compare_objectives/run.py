"""Train one student by every objective, for equally many steps, and compare what they learnt.

    python examples/compare_objectives/run.py

The teacher is the demo's, with its text: SentencePiece, 32,768 tokens. Each student starts from the
same weights and reads the same windows in the same order; one learns without the teacher. A run
that was interrupted goes on, and one that is finished is skipped. ``vocab_kl`` is left out, since
it needs a teacher with the student's tokenizer.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
DEMO = HERE.parent / "demo"
# The demo's text; a script's folder is all that Python looks into.
sys.path.append(str(DEMO))

from corpus import write_corpus  # noqa: E402
from figure import draw  # noqa: E402

TEACHER_TOKENIZER = "mistral_instruct_tokenizer_240323.model.v3"
STUDENT_TOKENIZER = "tekken_240911.json"
OBJECTIVES = (
    "next_token",
    "projected_kl",
    "partition_kl",
    "strict_topk",
    "gold",
    "hybrid_kl",
    "uld",
    "alm",
    "mined",
    "dskd",
)


def main() -> None:
    """Train what is not trained yet, measure, print and draw."""
    arguments = _arguments()
    root = Path(arguments.run_dir)
    started = time.perf_counter()
    if not (root / "data" / "validation.jsonl").exists():
        write_corpus(root / "data")
    with importlib.resources.as_file(importlib.resources.files("mistral_common") / "data") as files:
        _train(
            root,
            "teacher",
            [
                *("--config", str(DEMO / "teacher.yaml")),
                *("--tokenizer-model", str(files / TEACHER_TOKENIZER)),
                *("--data-train", str(root / "data" / "train.jsonl")),
                *("--train-iters", str(arguments.teacher_steps)),
            ],
        )
        for objective in arguments.objectives:
            _train(
                root,
                objective,
                [
                    *("--config", str(HERE / "student.yaml"), "--loss-objective", objective),
                    *("--tokenizer-model", str(files / STUDENT_TOKENIZER)),
                    *("--teacher-tokenizer-model", str(files / TEACHER_TOKENIZER)),
                    *("--teacher-checkpoint", str(root / "teacher" / "checkpoints")),
                    *("--data-train", str(root / "data" / "student.jsonl")),
                    *("--train-iters", str(arguments.steps)),
                ],
            )
    results = {
        "machine": _machine(),
        "steps": arguments.steps,
        "teacher_steps": arguments.teacher_steps,
        "runs": _measured(root, arguments.objectives),
    }
    (root / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    _print_table(results)
    print(f"\n{draw(results, root / 'objectives.png')}, {root / 'results.json'}")
    print(f"this call took {(time.perf_counter() - started) / 60:.1f} minutes")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--run-dir", default="runs/compare_objectives", help="folder for everything it makes"
    )
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each student")
    parser.add_argument("--teacher-steps", type=int, default=200, help="those of the teacher")
    parser.add_argument(
        "--objectives",
        nargs="+",
        default=OBJECTIVES,
        choices=OBJECTIVES,
        metavar="NAME",
        help=f"some of {', '.join(OBJECTIVES)}",
    )
    return parser.parse_args()


def _train(root: Path, name: str, flags: list[str]) -> None:
    """``megatron-ext distill`` in a process of its own; a finished run returns at once."""
    run_dir = root / name
    steps = int(flags[-1])
    latest = run_dir / "checkpoints" / "latest"
    if latest.exists() and latest.read_text(encoding="utf-8").strip() == f"iter_{steps:07d}":
        print(f"{name}: finished already", flush=True)
        return
    print(f"{name}: {'going on' if latest.exists() else 'starting'}", flush=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    validation = str(root / "data" / "validation.jsonl")
    with (run_dir / "log.txt").open("a", encoding="utf-8") as log:
        finished = subprocess.run(
            [
                *(sys.executable, "-m", "megatron_ext", "distill", *flags),
                *("--run-dir", str(run_dir), "--data-validation", validation),
            ],
            stdout=log,
            env=_environment(),
            check=False,
        )
    if finished.returncode:
        sys.exit(f"{name} failed with exit code {finished.returncode}; see {run_dir / 'log.txt'}")


def _measured(root: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """What ``measure.py`` says of the teacher and of every student."""
    command = [sys.executable, str(HERE / "measure.py"), str(root), *names]
    finished = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=_environment(), check=False
    )
    if finished.returncode:
        sys.exit(f"measuring failed with exit code {finished.returncode}")
    runs: dict[str, dict[str, Any]] = json.loads(finished.stdout.splitlines()[-1])
    for name in names:
        lines = (root / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        runs[name] |= {
            "ce": rows[-1]["ce"],
            "kd": rows[-1].get("kd"),
            "seconds": sum(row["seconds"] for row in rows),
        }
    return runs


def _environment() -> dict[str, str]:
    return {"PYTHONWARNINGS": "ignore", **os.environ}


def _machine() -> dict[str, Any]:
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _print_table(results: dict[str, Any]) -> None:
    print(f"\n{results['steps']} steps; held-out text")
    print(f"{'':<14}{'bits/byte':>11}{'bits/digit':>12}{'numerals':>10}{'agreement':>11}{'s':>7}")
    for name, run in results["runs"].items():
        agreement = run.get("agreement")
        print(
            f"{name:<14}{run['bits_per_byte']:>11.3f}{run['bits_per_digit']:>12.3f}"
            f"{run['numeral_probability']:>10.1e}"
            f"{'' if agreement is None else f'{agreement:.1%}':>11}{run.get('seconds', 0):>7.0f}"
        )


if __name__ == "__main__":
    main()
