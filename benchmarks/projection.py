"""How long projections take to build, and in how much memory, on one core.

    python benchmarks/projection.py --output benchmarks/results/projection.json

Tekken (131,072 ids) and SentencePiece v3 (32,768 ids), both from mistral_common, in both
directions; and Llama 3.2 to Qwen3 and to Gemma 3 where MEGATRON_EXT_SHARED names a folder whose
``tokenizers`` has them. Every build runs in a process of its own, so that its peak memory is its
own. Seconds are processor time, which other work on the machine does not lengthen.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from alignment import demo_pair, write_results

from megatron_ext.projection import SparseProjection
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.tokenizers.libraries.huggingface import HuggingFaceTokenizer

SHARED = Path(os.environ.get("MEGATRON_EXT_SHARED", Path(__file__).parents[2] / "shared"))

Pair = tuple[ByteTokenizer, ByteTokenizer]


def published_pair(student: str, teacher: str) -> Pair:
    """Two tokenizers of the shared folder."""
    folder = SHARED / "tokenizers"
    return HuggingFaceTokenizer(folder / student), HuggingFaceTokenizer(folder / teacher)


def swapped_demo_pair() -> Pair:
    student, teacher = demo_pair()
    return teacher, student


PAIRS: dict[str, Callable[[], Pair]] = {
    "Tekken to SentencePiece v3": demo_pair,
    "SentencePiece v3 to Tekken": swapped_demo_pair,
    "Llama 3.2 to Qwen3": partial(published_pair, "llama3_2", "qwen3"),
    "Llama 3.2 to Gemma 3": partial(published_pair, "llama3_2", "gemma3"),
}


def build(name: str) -> dict[str, Any]:
    """Build once in this process, on one core."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    loading = time.process_time()
    student, teacher = PAIRS[name]()
    before = peak_mib()
    start = time.process_time()
    projection = SparseProjection.from_tokenizers(student, teacher)
    seconds = time.process_time() - start
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "projection.safetensors"
        projection.save(path)
        file_mib = path.stat().st_size / 2**20
    return {
        "seconds": seconds,
        "seconds_to_load_tokenizers": start - loading,
        "peak_mib": peak_mib(),
        "peak_mib_before": before,
        "shape": projection.shape,
        "entries": projection.entry_count,
        "exact_rows": int(projection.is_exact_row.sum()),
        "empty_rows": len(projection.empty_rows),
        "reachable_columns": int(projection.reachable_columns.sum()),
        "file_mib": file_mib,
    }


def peak_mib() -> float:
    """Most resident memory of this process so far; Linux counts in KiB, macOS in bytes."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Build ``repeats`` times, each in a child process."""
    command = [sys.executable, __file__, "--child", name]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(repeats)
    ]
    seconds = [run.pop("seconds") for run in runs]
    loading = [run.pop("seconds_to_load_tokenizers") for run in runs]
    return {
        "pair": name,
        "repeats": repeats,
        "seconds_min": min(seconds),
        "seconds_median": float(np.median(seconds)),
        "seconds_max": max(seconds),
        "seconds_to_load_tokenizers": float(np.median(loading)),
        **runs[0],
        "peak_mib": max(run["peak_mib"] for run in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=5, help="builds of each pair")
    parser.add_argument("--child", choices=PAIRS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(build(arguments.child)))
        return
    results = []
    for name, pair in PAIRS.items():
        if isinstance(pair, partial) and not SHARED.is_dir():
            print(f"{name}: left out, {SHARED} is absent", flush=True)
            continue
        result = measure(name, arguments.repeats)
        results.append(result)
        print(
            f"{name}: {result['seconds_median']:.2f} s"
            f" ({result['seconds_min']:.2f} to {result['seconds_max']:.2f}),"
            f" tokenizers {result['seconds_to_load_tokenizers']:.2f} s,"
            f" peak {result['peak_mib']:.0f} MiB (tokenizers {result['peak_mib_before']:.0f}),"
            f" {result['entries']:,} entries, {result['exact_rows']:,} exact rows,"
            f" {result['empty_rows']:,} empty, file {result['file_mib']:.1f} MiB",
            flush=True,
        )
    write_results(arguments.output, results)


if __name__ == "__main__":
    main()
