"""What every objective costs on a CPU: forward and backward, processor time and memory.

    python benchmarks/cpu_losses.py --output benchmarks/results/cpu_losses.json

One thread, logits of 512 student rows of Llama 3.2 with Qwen 3 in fp32 and bf16, their projection
and the chunks of a real text where ``benchmarks/inputs`` has them (``benchmarks/make_inputs.py``),
else a pair of the same structure; "inputs" in the results says which. Seconds are of the process,
so that other work on the machine counts less, and medians of turns in which every implementation
has one; memory is the most that is resident during a turn beyond what is before it, the gradient
included. "floor" is one ``torch.logsumexp`` of each model's logits and one write of the gradient.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from loss_cost.cases import OBJECTIVES, Loss, Objective
from loss_cost.machine import commit, machine, write_results
from loss_cost.microbatch import RankVocabulary, same_vocabulary
from loss_cost.pairs import SIZES, load_pair

from megatron_ext.losses import DistillationInputs

ROWS: Final = 512
TOUCHED_BYTES: Final = 2 << 30
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS: Final = ("cpu", "torch")
EAGER: Final = ("eager",)


class PeakMemory:
    """Most resident bytes of the process while the block runs, beyond those before it."""

    def __enter__(self) -> PeakMemory:
        # What is free is given back, so that the loss cannot use it unseen; the kernel counts the
        # peak anew from here on.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        self.bytes = _status("VmHWM") - self._before


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise LookupError(name)


def implementations(objective: Objective) -> dict[str, Loss]:
    """What is run of an objective, by name."""
    names = (*OURS, *(name for name in EAGER if name in objective.others))
    return {name: objective.loss(name) for name in names}


def turns(
    losses: dict[str, Loss], inputs: DistillationInputs, count: int
) -> dict[str, dict[str, Any]]:
    """Seconds and memory of each loss, in turns, after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    peaks: dict[str, int] = {}
    for turn in range(count + 1):
        for name, loss in losses.items():
            inputs.student_logits.grad = None
            _back_memory()
            if turn == 0:
                loss(inputs).backward()
                continue
            if turn == 1:
                with PeakMemory() as memory:
                    loss(inputs).backward()
                peaks[name] = memory.bytes
                inputs.student_logits.grad = None
                _back_memory()
            began = time.process_time()
            loss(inputs).backward()
            seconds[name].append(time.process_time() - began)
    inputs.student_logits.grad = None
    return {
        name: {"seconds": round(statistics.median(of), 4), "peak_mib": round(peaks[name] / 2**20)}
        for name, of in seconds.items()
    }


def _back_memory() -> None:
    """Touch memory that is freed again: a virtual machine's host may have taken it back, and
    giving it costs more than a loss."""
    np.ones(TOUCHED_BYTES, dtype=np.uint8)


def floor(inputs: DistillationInputs, count: int) -> float:
    """Seconds of one ``torch.logsumexp`` of each model's logits, and a write of the gradient."""
    assert inputs.teacher is not None
    assert inputs.teacher.logits is not None
    student, teacher = inputs.student_logits.detach(), inputs.teacher.logits
    gradient = torch.empty_like(student)
    return _median_seconds(
        lambda: (student.logsumexp(-1), teacher.logsumexp(-1), gradient.copy_(student)), count
    )


def _median_seconds(run: Callable[[], object], count: int) -> float:
    found = []
    for _ in range(count):
        began = time.process_time()
        run()
        found.append(time.process_time() - began)
    return round(statistics.median(found), 4)


def measured(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """Where the pair is from, and a row for each dtype and objective."""
    vocabulary = RankVocabulary.of(load_pair(next(iter(SIZES))), 1)
    rows = []
    for dtype in args.dtype:
        inputs = vocabulary.microbatch(args.rows, dtype=DTYPES[dtype])
        lowest = floor(inputs, args.turns)
        for objective in OBJECTIVES:
            if args.objective and objective.name not in args.objective:
                continue
            given = same_vocabulary(inputs) if objective.same_vocabulary else inputs
            if not objective.needs_completions:
                given = replace(given, completions=None)
            found = turns(implementations(objective), given, args.turns)
            row = {"dtype": dtype, "objective": objective.name, "floor_seconds": lowest, **found}
            print(_line(row), flush=True)
            rows.append(row)
    return vocabulary.pair.source, rows


def _line(row: dict[str, Any]) -> str:
    ours = row["cpu"]["seconds"]
    parts = [f"{row['dtype']} {row['objective']:28}"]
    for name in (*OURS, *EAGER):
        if name in row:
            of = row[name]
            ratio = of["seconds"] / ours
            parts.append(f"{name} {of['seconds']:.3f} s ({ratio:.1f}x, {of['peak_mib']} MiB)")
    return "  ".join([*parts, f"floor {row['floor_seconds']:.3f} s"])


def main() -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--objective", nargs="+", help="names; all by default")
    args = parser.parse_args()
    torch.set_num_threads(1)
    source, rows = measured(args)
    if args.output:
        write_results(
            args.output,
            {
                "commit": commit(),
                "machine": machine(),
                "inputs": source,
                "rows": args.rows,
                "threads": 1,
                "results": rows,
            },
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
