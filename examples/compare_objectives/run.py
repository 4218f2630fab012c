"""Train one student by every objective, for equally many steps, and compare what they learnt.

    python examples/compare_objectives/run.py

By default on the demo's text, with two vocabularies that mistral-common carries; both of these cut
numerals digit by digit. The published comparison is of a pair that does not, on GSM8K:

    python examples/compare_objectives/run.py --student-tokenizer r50k_base.tiktoken \\
        --data train.jsonl --text-keys question answer

Each student starts from the same weights and reads the same windows in the same order; one learns
without the teacher. ``--seeds`` repeats all of it from other weights and in another order. A run
that was interrupted goes on, and one that is finished is skipped. ``vocab_kl`` is left out, since
it needs a teacher with the student's tokenizer.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import os
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from figure import draw
from text_split import write_split
from vocabulary_head import write_head

from megatron_ext.cli.demo.corpus import write_corpus

HERE = Path(__file__).parent

from megatron_ext.files import write_text  # noqa: E402
from megatron_ext.tokenizers import MegatronTokenizer  # noqa: E402
from megatron_ext.tokenizers.tokenizer_files import file_kind  # noqa: E402

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
CPU_SECONDS = "cpu_seconds"
PROBE = "In 2017, 48 cost $120: <<48+24=72>>"


def main() -> None:
    """Train what is not trained yet, measure, print and draw."""
    arguments = _arguments()
    root = Path(arguments.run_dir)
    started = time.perf_counter()
    _write_data(root / "data", arguments)
    tokenizers = _tokenizers(root, arguments)
    _train(
        root / "teacher",
        *("--config", str(HERE / "teacher.yaml")),
        *("--tokenizer-model", str(tokenizers["teacher"])),
        *("--data-train", str(root / "data" / "train.jsonl")),
        steps=arguments.teacher_steps,
    )
    students = [(objective, seed) for seed in arguments.seeds for objective in arguments.objectives]
    for objective, seed in students:
        _train(
            root / f"seed-{seed}" / objective,
            *("--config", str(HERE / "student.yaml"), "--loss-objective", objective),
            *("--seed", str(seed)),
            *("--tokenizer-model", str(tokenizers["student"])),
            *("--teacher-tokenizer-model", str(tokenizers["teacher"])),
            *("--teacher-checkpoint", str(root / "teacher" / "checkpoints")),
            *("--data-train", str(root / "data" / "student.jsonl")),
            steps=arguments.steps,
        )
    results = {
        "machine": _machine(),
        "text": Path(arguments.data).name if arguments.data else "the demo's",
        "tokenizers": {side: path.name for side, path in tokenizers.items()},
        "steps": arguments.steps,
        "teacher_steps": arguments.teacher_steps,
        **_measured(root, students),
    }
    (root / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    _print_table(results)
    print(f"\n{draw(results, root / 'objectives.svg')}, {root / 'results.json'}")
    print(f"this call took {(time.perf_counter() - started) / 60:.1f} minutes")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--run-dir", default="runs/compare_objectives", help="folder for everything it makes")
    add("--steps", type=int, default=300, help="optimizer steps of each student")
    add("--teacher-steps", type=int, default=500, help="those of the teacher")
    add("--seeds", type=int, nargs="+", default=[1234], help="of students; one set for each")
    carried = importlib.resources.files("mistral_common") / "data"
    add(
        "--student-tokenizer",
        default=str(carried / "mistral_instruct_tokenizer_240323.model.v3"),
        metavar="FILE",
        help="any tokenizer file; a published vocabulary of tiktoken's is cut to --vocab-size",
    )
    add(
        "--teacher-tokenizer",
        default=str(carried / "tekken_240911.json"),
        metavar="FILE",
        help="the same for the teacher",
    )
    add("--vocab-size", type=int, default=8192, help="ids kept of vocabularies that can be cut")
    add("--data", metavar="FILE", help="JSON lines; the demo's text when not given")
    add("--text-keys", nargs="+", default=["text"], help="fields of a line that are its text")
    add(
        "--objectives",
        nargs="+",
        default=OBJECTIVES,
        choices=OBJECTIVES,
        metavar="NAME",
        help=f"some of {', '.join(OBJECTIVES)}",
    )
    return parser.parse_args()


def _write_data(folder: Path, arguments: argparse.Namespace) -> None:
    if (folder / "validation.jsonl").exists():
        return
    if arguments.data is None:
        write_corpus(folder)
    else:
        write_split(Path(arguments.data), arguments.text_keys, folder)


def _tokenizers(root: Path, arguments: argparse.Namespace) -> dict[str, Path]:
    """Files of both tokenizers, with a line on how each cuts numerals."""
    files = {}
    for side in ("student", "teacher"):
        source = Path(getattr(arguments, f"{side}_tokenizer"))
        files[side] = source
        if file_kind(source).library == "tiktoken":
            size = arguments.vocab_size
            files[side] = root / "data" / f"{source.stem}-{size}.json"
            write_head(source, size, files[side])
        tokenizer = MegatronTokenizer.from_pretrained(files[side])
        tokens = [tokenizer.token_bytes(i) or b"" for i in tokenizer.tokenize(PROBE)]
        print(f"{side}: {tokenizer.vocab_size:,} tokens: {b'|'.join(tokens).decode()}", flush=True)
    return files


def _train(run_dir: Path, *flags: str, steps: int) -> None:
    """``megatron-ext distill`` in a process of its own; a finished run returns at once."""
    latest = run_dir / "checkpoints" / "latest"
    if latest.exists() and latest.read_text(encoding="utf-8").strip() == f"iter_{steps:07d}":
        print(f"{run_dir}: finished already", flush=True)
        return
    print(f"{run_dir}: {'going on' if latest.exists() else 'starting'}", flush=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    cpu_file = run_dir / CPU_SECONDS
    before = _cpu_seconds_of_children()
    with (run_dir / "log.txt").open("a", encoding="utf-8") as log:
        finished = subprocess.run(
            [
                *(sys.executable, "-m", "megatron_ext", "distill", *flags),
                *("--run-dir", str(run_dir), "--train-iters", str(steps)),
            ],
            stdout=log,
            env=_environment(),
            check=False,
        )
    earlier = float(cpu_file.read_text(encoding="utf-8")) if cpu_file.exists() else 0.0
    write_text(cpu_file, f"{earlier + _cpu_seconds_of_children() - before:.1f}\n")
    if finished.returncode:
        sys.exit(f"{run_dir} failed with exit code {finished.returncode}; see its log.txt")


def _measured(root: Path, students: list[tuple[str, int]]) -> dict[str, Any]:
    """What ``measure.py`` says of the teacher and of every student."""
    runs = [str(root / f"seed-{seed}" / objective) for objective, seed in students]
    finished = subprocess.run(
        [sys.executable, str(HERE / "measure.py"), str(root / "data" / "validation.jsonl"), *runs],
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(),
        check=False,
    )
    if finished.returncode:
        sys.exit(f"measuring failed with exit code {finished.returncode}")
    measured = json.loads(finished.stdout.splitlines()[-1])
    return {
        "teacher": measured["teacher"],
        "unigram": measured["unigram"],
        "students": [
            {"objective": objective, "seed": seed, **measured[run], **_of_training(Path(run))}
            for run, (objective, seed) in zip(runs, students, strict=True)
        ],
    }


def _of_training(run: Path) -> dict[str, Any]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    half = rows[len(rows) // 2 :]
    cpu_file = run / CPU_SECONDS
    return {
        # Means of the second half, since a step sees few windows.
        "ce": sum(row["ce"] for row in half) / len(half),
        "kd": sum(row["kd"] for row in half) / len(half) if "kd" in rows[0] else None,
        # Nobody has counted for a run that outlived the call that started it.
        "cpu_seconds": float(cpu_file.read_text(encoding="utf-8")) if cpu_file.exists() else None,
    }


def _cpu_seconds_of_children() -> float:
    """Of those that have ended; unlike time on the wall it does not depend on other programs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


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
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "megatron-core", "mistral-common")},
    }


def _print_table(results: dict[str, Any]) -> None:
    print(f"\n{results['steps']} steps; held-out text; one line a student")
    print(
        f"{'':<14}{'seed':>6}{'bits/byte':>11}{'bits/digit':>12}{'numerals':>10}"
        f"{'agreement':>11}{'choices':>9}{'ce':>7}{'kd':>8}{'cpu s':>7}"
    )
    rows = [{"objective": name, **results[name]} for name in ("teacher", "unigram")]
    for run in (*rows, *results["students"]):
        agreement, kd = run.get("agreement"), run.get("kd")
        print(
            f"{run['objective']:<14}{run.get('seed', ''):>6}{run['bits_per_byte']:>11.3f}"
            f"{run['bits_per_digit']:>12.3f}{run['numeral_probability']:>10.1e}"
            f"{'' if agreement is None else f'{agreement:.1%}':>11}{run['first_choices']:>9}"
            f"{run.get('ce', 0):>7.2f}{'' if kd is None else f'{kd:.3f}':>8}"
            f"{run.get('cpu_seconds') or 0:>7.0f}"
        )


if __name__ == "__main__":
    main()
