"""Ranking of candidates by a few optimizer steps.

Bits per byte right after a transfer rank methods wrongly, and those after 50 steps rank them right
(arXiv 2608.03494). Each candidate is trained on the same text by ``megatron-ext distill`` without a
teacher, and measured before, after 10 and after 50 steps by ``megatron-ext evaluate``, in processes
of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.files import write_text
from megatron_ext.huggingface.checkpoint_files import check_checkpoint_folder
from megatron_ext.imports import needed_packages
from megatron_ext.registry import with_near_path

STEPS: Final = (0, 10, 50)
"""Optimizer steps after which a candidate is measured."""

_ERROR_LINES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """Text and optimizer of a probe."""

    data: Path
    """Text to train on."""

    held_out: Path
    """Text to measure on."""

    run_dir: Path
    """Folder for the runs; finished measurements in it are read instead of made again."""

    lr: float = 1e-4
    global_batch_size: int = 8
    seq_length: int = 256
    limit: int | None = None
    """Held-out texts at most."""

    def __post_init__(self) -> None:
        for name in ("data", "held_out"):
            path = getattr(self, name)
            if not path.is_file():
                raise DataError(
                    "there is no such file",
                    where=f"--{name.replace('_', '-')}",
                    got=path,
                    fix=with_near_path("correct the path", path),
                )


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """Bits per byte of one candidate."""

    candidate: str
    bits_per_byte: dict[int, float]
    """By optimizer steps."""


def probe(
    candidates: Sequence[Path], options: ProbeOptions, tell: Callable[[str], None]
) -> list[ProbeRow]:
    """Train and measure each candidate, and sort them by what they are after the most steps.

    Args:
        candidates: HuggingFace folders.
        options: Text and optimizer.
        tell: Called with a line before each run.

    Raises:
        CheckpointError: A candidate is no HuggingFace folder.
        ConfigError: Two candidates have one name, or a run failed; the text ends in its last lines.
    """
    names = [folder.name for folder in candidates]
    if len(set(names)) < len(names):
        raise ConfigError("two candidates have one name", got=", ".join(names))
    for folder in candidates:
        check_checkpoint_folder(folder)
    rows = [_probe_one(folder, options, tell) for folder in candidates]
    return sorted(rows, key=lambda row: row.bits_per_byte[STEPS[-1]])


def _probe_one(folder: Path, options: ProbeOptions, tell: Callable[[str], None]) -> ProbeRow:
    run = options.run_dir / folder.name
    found = {0: _measure(folder, run / "bits_0.json", options, tell)}
    for steps in STEPS[1:]:
        trained = run / f"iter_{steps}"
        if not (trained / "checkpoints" / "latest").is_file():
            tell(f"{folder.name}: {steps} steps")
            _train(folder, trained, steps, options)
        found[steps] = _measure(trained, run / f"bits_{steps}.json", options, tell)
    return ProbeRow(folder.name, found)


def _train(folder: Path, run: Path, steps: int, options: ProbeOptions) -> None:
    """Train for some steps of the schedule of the longest run, without a warm-up."""
    config = {
        "run_dir": str(run),
        "initial_checkpoint": str(folder),
        "tokenizer": {"model": str(folder)},
        "student": {"seq_length": options.seq_length},
        "data": {"train": [str(options.data)], "packing": True},
        "loss": {"objective": "next_token"},
        "optimizer": {"lr": options.lr, "min_lr": options.lr, "lr_warmup_iters": 0},
        "training": {
            "train_iters": steps,
            "micro_batch_size": 1,
            "global_batch_size": options.global_batch_size,
            "save_interval": steps,
        },
    }
    file = run.with_suffix(".json")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(config, indent=2) + "\n")
    run_verb(["distill", "--config", str(file)])


def _measure(
    model: Path, output: Path, options: ProbeOptions, tell: Callable[[str], None]
) -> float:
    if not output.is_file():
        tell(f"{output.parent.name}: {output.stem.replace('_', ' after ')} steps")
        output.parent.mkdir(parents=True, exist_ok=True)
        limit = [] if options.limit is None else ["--limit", str(options.limit)]
        run_verb(
            [
                *("evaluate", "--model", str(model), "--task", "bits_per_byte"),
                *("--data", str(options.held_out), "--output", str(output)),
                *("--seq-length", str(options.seq_length), *limit),
            ]
        )
    result: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return float(result["metrics"]["bits_per_byte"])


def run_verb(words: list[str]) -> None:
    """Call ``megatron-ext`` in a process of its own.

    Raises:
        ConfigError: It failed; the text ends in its last lines.
    """
    finished = subprocess.run(
        [sys.executable, "-m", "megatron_ext", *words], capture_output=True, text=True, check=False
    )
    if finished.returncode:
        last = " | ".join(finished.stderr.strip().splitlines()[-_ERROR_LINES:])
        raise ConfigError(f"megatron-ext {words[0]} failed", got=last)


def table(rows: Sequence[ProbeRow]) -> str:
    """The candidates as lines of text, the best first."""
    width = max(len("candidate"), *(len(row.candidate) for row in rows))
    head = "".join(f"{f'{steps} steps':>12}" for steps in STEPS)
    lines = [f"{'candidate':<{width}}{head}   bits per byte"]
    for row in rows:
        numbers = "".join(f"{row.bits_per_byte[steps]:>12.4f}" for steps in STEPS)
        lines.append(f"{row.candidate:<{width}}{numbers}")
    return "\n".join(lines) + "\n"


def write_results(rows: Sequence[ProbeRow], options: ProbeOptions) -> None:
    """Write ``probe.json`` and the picture ``probe.png`` into the runs' folder."""
    values = {
        "options": {key: str(value) for key, value in asdict(options).items()},
        "candidates": [asdict(row) for row in rows],
    }
    write_text(options.run_dir / "probe.json", json.dumps(values, indent=2) + "\n")
    with needed_packages("the picture"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row in rows:
        bits = [row.bits_per_byte[steps] for steps in STEPS]
        axes.plot(STEPS, bits, marker="o", label=row.candidate)
    axes.set(xlabel="optimizer steps", ylabel="bits per byte of held-out text", xticks=STEPS)
    axes.legend()
    figure.savefig(options.run_dir / "probe.png", dpi=150)
