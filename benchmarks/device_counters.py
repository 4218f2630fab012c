"""What a microbatch of projected KL with cross-entropy does on a GPU, by its hardware counters.

    python benchmarks/device_counters.py --output benchmarks/results/device_counters.json

Bytes of the GPU's memory that were read and written, instructions, warps at once and time of
every launch of a kernel, for each pair of ``losses.py``, from NVIDIA's Nsight Compute (``ncu``),
which has to be installed; no launch is repeated, and clocks are left alone. Small launches of torch
are added up under "torch". The eager recipe is not measured.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from loss_cost.cases import OBJECTIVES
from loss_cost.counted_bytes import floors
from loss_cost.machine import commit, machine, write_results
from loss_cost.microbatch import RankVocabulary
from loss_cost.pairs import SIZES, load_pair

ROWS: Final = 8192
METRICS: Final = {
    "gpu__time_duration.sum": "ns",
    "dram__bytes_read.sum": "read",
    "dram__bytes_write.sum": "written",
    "smsp__inst_executed.sum": "warp_instructions",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_percent",
}
"""Counters of ncu, and their names in the results."""


def one_microbatch(pair: str) -> None:
    """Forward and backward, the third time for the profiler."""
    inputs = RankVocabulary.of(load_pair(pair), 1).microbatch(ROWS, device="cuda")
    loss = OBJECTIVES[0].loss("triton")
    for turn in range(3):
        inputs.student_logits.grad = None
        if turn == 2:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        loss(inputs).backward()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def launches(pair: str) -> list[dict[str, Any]]:
    """Counters of each launch, in order."""
    command = ["ncu", "--csv", "--clock-control", "none", "--profile-from-start", "off"]
    command += ["--metrics", ",".join(METRICS), sys.executable, __file__, "--one", pair]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    table = "\n".join(line for line in printed.splitlines() if line.startswith('"'))
    found: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO(table)):
        launch = found.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        launch[METRICS[row["Metric Name"]]] = float(row["Metric Value"].replace(",", ""))
    return list(found.values())


def by_kernel(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sums of the launches of each kernel, the longest first."""
    sums: dict[str, dict[str, Any]] = {}
    for launch in found:
        is_ours = launch["kernel"].endswith("_kernel") and "::" not in launch["kernel"]
        name = launch["kernel"] if is_ours else "torch"
        total = sums.setdefault(name, {"kernel": name, "launches": 0, "ms": 0.0})
        total["launches"] += 1
        total["ms"] += launch["ns"] / 1e6
        for key in ("read", "written", "warp_instructions"):
            total[key] = total.get(key, 0) + round(launch[key])
        busy = total.pop("busy", 0.0) + launch["ns"] * launch["warps_percent"]
        total["busy"] = busy
    rows = sorted(sums.values(), key=lambda total: -total["ms"])
    for total in rows:
        total["warps_percent"] = round(total.pop("busy") / (total["ms"] * 1e6), 1)
        total["ms"] = round(total["ms"], 4)
    return rows


def main() -> int:
    """Measure every pair, or run one microbatch for the profiler."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--one", choices=SIZES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        one_microbatch(options.one)
        return 0
    if shutil.which("ncu") is None or not torch.cuda.is_available():
        parser.error("an NVIDIA GPU and Nsight Compute (ncu) are needed")
    rows = []
    for pair in SIZES:
        shape = RankVocabulary.of(load_pair(pair), 1).shape(ROWS)
        once, twice = floors(shape, 2, OBJECTIVES[0].teacher)
        kernels = by_kernel(launches(pair))
        rows.append({"pair": pair, "floor_b1": once, "floor_b2": twice, "kernels": kernels})
    results = {"machine": machine(), "commit": commit(), "student_rows": ROWS, "rows": rows}
    if options.output is None:
        print(json.dumps(results, indent=1))
    else:
        write_results(options.output, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
