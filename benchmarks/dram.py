"""Bytes that projected KL with cross-entropy moves through a GPU's second cache, by schedule.

    MEGATRON_EXT_SHARED=... python benchmarks/make_inputs.py
    python benchmarks/dram.py --output benchmarks/results/dram.json

A simulation, not a measurement: the addresses that the launches touch go through a cache of 50 MB
that forgets what was touched least recently (``machine_code/cache.py``, ``schedules.py``). Beside
it are the bytes that all accesses would move without a cache, and the floor: each logit once, each
gradient once. About a minute a pair; without inputs the pairs are made up and the results say so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.loss_cost.microbatch import PADDED_TO
from benchmarks.loss_cost.pairs import SIZES, Pair, load_pair
from benchmarks.machine_code.cache import H200_CACHE, Cache, Trace
from benchmarks.machine_code.schedules import Microbatch, Schedule, before, joined
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.projected_kl import ColumnPlan
from megatron_ext.projection.layout import VocabularyLayout

ROWS: Final = 8192
SCHEDULES: Final[dict[str, Callable[[Microbatch], Iterator[tuple[str, Trace]]]]] = {
    "before": before,
    "joined": joined,
}


def microbatch(pair: Pair, rows: int) -> Microbatch:
    """A text of a pair with heads in the co-sharded order, on one rank."""
    student, teacher = (-(-size // PADDED_TO) * PADDED_TO for size in pair.projection.shape)
    layout = VocabularyLayout.of(
        pair.projection, rank_count=1, student_size=student, teacher_size=teacher
    )
    projection = pair.projection.permuted(layout)
    shards = [VocabShard(start=0, stop=size, vocab_size=size) for size in projection.shape]
    plan = ColumnPlan.of(
        projection.indptr,
        projection.indices,
        projection.values,
        student_shard=shards[0],
        teacher_shard=shards[1],
    )
    text = pair.of_rows(rows)
    count = 1 + int(text.student_chunk.max())
    return Microbatch(
        widths=(student, teacher),
        plan=plan,
        rows=(_by_chunk(text.student_chunk, count), _by_chunk(text.teacher_chunk, count)),
        counts=(len(text.student_chunk), len(text.teacher_chunk)),
    )


def simulated(batch: Microbatch, schedule: str) -> dict[str, Any]:
    """Bytes of a schedule by launch, and their sum."""
    cache = Cache(Schedule(batch).memory.granules + (1 << 21))
    moved: Counter[str] = Counter()
    touched: Counter[str] = Counter()
    launches = 0
    for name, trace in SCHEDULES[schedule](batch):
        moved[name] += cache.run(trace).bytes
        touched[name] += trace.touched
        launches += 1
    moved["left in the cache"] = cache.flush().bytes
    return {
        "schedule": schedule,
        "launches": launches,
        "floor": batch.floor,
        "touched": sum(touched.values()),
        "bytes": sum(moved.values()),
        "by_launch": dict(moved),
    }


def _by_chunk(chunk_id: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    order = np.argsort(chunk_id, kind="stable")
    order = order[chunk_id[order] >= 0]
    return np.split(order, np.searchsorted(chunk_id[order], np.arange(1, count)))


def main() -> None:
    """Write or print what each schedule moves for each pair."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=ROWS, help="student rows")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in SIZES:
        pair = load_pair(name)
        batch = microbatch(pair, options.rows)
        for schedule in SCHEDULES:
            print(f"{name}: {schedule}", file=sys.stderr)
            what = {"pair": name, "inputs": pair.source, "rows": options.rows}
            rows.append(what | simulated(batch, schedule))
    text = json.dumps({"cache_bytes": H200_CACHE, "simulated": True, "rows": rows}, indent=1) + "\n"
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
