"""What came out of the demo: a table, completed texts, and a report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from megatron_ext.alignment.alignment import CHUNK_KINDS
from megatron_ext.cli import generate, report
from megatron_ext.errors import MegatronExtError
from megatron_ext.files import write_text
from megatron_ext.training.metrics import read_metrics

PROMPTS: Final = (
    "The value of the expression",
    "If the object is not",
    "When a class is",
)
"""Beginnings of texts that the models complete."""

MODELS: Final = {
    "teacher": "teacher",
    "distilled": "student, distilled",
    "undistilled": "student, undistilled",
}
"""Folder of a run -> its name in what is printed."""

_BITS: Final = "student_bits_per_byte"
_ACCURACY: Final = "student_accuracy"
_AGREEMENT: Final = "agreement"
_GENERATION: Final = ("--max-new-tokens", "24", "--temperature", "0.7", "--top-p", "0.8")
"""Drawn: the first choices of models of so few steps go round in circles."""

_WIDTH: Final = 96


class DemoError(MegatronExtError):
    """A run of the demo failed, or its result is not what it should be."""


def print_outcome(root: Path) -> None:
    """Print the table and the completed texts of the runs in ``root``, and write the report."""
    distilled, undistilled = read_metrics(root / "distilled"), read_metrics(root / "undistilled")
    teacher = read_metrics(root / "teacher")
    print(f"\n{'held-out text':<26}{'bits per byte':>14}{'accuracy':>11}{'agreement':>12}")
    teacher_bits = _last(distilled, "teacher_bits_per_byte")
    print(f"{MODELS['teacher']:<26}{teacher_bits:>14.3f}{_last(teacher, _ACCURACY):>11.1%}")
    for name, rows in (("distilled", distilled), ("undistilled", undistilled)):
        bits, accuracy, agreement = (_last(rows, key) for key in (_BITS, _ACCURACY, _AGREEMENT))
        print(f"{MODELS[name]:<26}{bits:>14.3f}{accuracy:>11.1%}{agreement:>12.1%}")
    print(f"\n{_chunks(distilled)}")
    for prompt, completions in zip(PROMPTS, _completed(root), strict=True):
        print(f"\n{prompt} ...")
        for name, completion in completions.items():
            line = f"  {name:<22}{json.dumps(completion, ensure_ascii=False)[1:-1]}"
            print(line[:_WIDTH])
    # The verb prints the path.
    print(f"\n{'report':<16}", end="", flush=True)
    runs = [str(root / run) for run in ("distilled", "undistilled")]
    _call(report, *runs, "--output", str(root / "report.html"))


def check_outcome(root: Path) -> None:
    """Compare the students.

    Raises:
        DemoError: The distilled one is not better in each of the three measures.
    """
    distilled, undistilled = read_metrics(root / "distilled"), read_metrics(root / "undistilled")
    for name, sign in ((_BITS, -1), (_ACCURACY, 1), (_AGREEMENT, 1)):
        with_teacher, without = _last(distilled, name), _last(undistilled, name)
        if sign * (with_teacher - without) <= 0:
            raise DemoError(
                "the distilled student is not better than the undistilled one",
                where=name,
                got=f"{with_teacher:.3f}",
                expected=f"{'more' if sign > 0 else 'less'} than {without:.3f}",
            )


def _last(rows: list[dict[str, Any]], name: str) -> float:
    return float(next(row[name] for row in reversed(rows) if row.get(name) is not None))


def _chunks(rows: list[dict[str, Any]]) -> str:
    chunks = sum(row["chunks"] for row in rows)
    shares = {name: sum(row[name] for row in rows) / chunks for name in CHUNK_KINDS}
    return f"{'chunks':<16}" + ", ".join(f"{share:.1%} {name}" for name, share in shares.items())


def _completed(root: Path) -> list[dict[str, str]]:
    """For each prompt, its completion by name of the model."""
    asked = root / "data" / "prompts.jsonl"
    write_text(asked, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    completions: list[dict[str, str]] = [{} for _ in PROMPTS]
    for run, name in MODELS.items():
        answers = root / run / "completions.jsonl"
        # Of a demo that is run again.
        answers.unlink(missing_ok=True)
        flags = ["--model", str(root / run), "--prompts", str(asked), "--output", str(answers)]
        _call(generate, *flags, *_GENERATION)
        lines = answers.read_text(encoding="utf-8").splitlines()
        for completion, line in zip(completions, lines, strict=True):
            completion[name] = json.loads(line)["completion"]
    return completions


def _call(verb: ModuleType, *words: str) -> None:
    """Call a verb in this process."""
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    verb.run(parser.parse_args(words))
