"""What every objective costs on a GPU: forward and backward, time, bytes and memory.

    python benchmarks/losses.py --output benchmarks/results/losses.json        (on a GPU)
    python benchmarks/losses.py --counted benchmarks/results/losses_counted.json

``python benchmarks/gpu.py`` does both, after the tests of the kernels. bf16 logits of Llama 3.2
with Qwen 3 and with Gemma 3, their projections and the chunks of a real text where
``benchmarks/inputs`` has them (``benchmarks/make_inputs.py``), else pairs of the same structure;
"inputs" in the results says which. "ranks" is how many ranks would share the vocabulary: one of
them is run, alone. ``bytes`` are counted from shapes (``loss_cost/counted_bytes.py``,
``loss_cost/traffic.py``), never measured. Times are of CUDA events, with a cache that holds none of
the inputs, by the median. What did not fit into the time given is under "not_run".

First every kernel is compared with torch in fp64. If one differs, this prints which, writes nothing
and exits with 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from loss_cost.cases import OBJECTIVES, NotThereError, Objective
from loss_cost.counted_bytes import LAUNCHES, floors, kernel_bytes
from loss_cost.counting import counted_rows
from loss_cost.gate import check_kernels, small_vocabulary
from loss_cost.heads import ONE_VOCABULARY, TILED, Heads, bare_products, linear_form
from loss_cost.machine import commit, machine, write_results
from loss_cost.microbatch import Order, RankVocabulary, same_vocabulary
from loss_cost.pairs import SIZES, load_pair
from loss_cost.timing import copy_bandwidth, timed

from megatron_ext.losses import DistillationInputs

DEVICE = "cuda"
QWEN, GEMMA = SIZES
LENGTHS = (2048, 4096, 8192, 16384)
RANKS = (1, 2, 4, 8)
MAIN_LENGTH = 8192
TILES = (1024, 2048, 4096)
"""Rows of a tile of the linear form."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One microbatch and what is run on it."""

    pair: str
    ranks: int
    rows: int
    objectives: tuple[str, ...]
    order: Order = "co_sharded"
    compiled: bool = False
    """What needs minutes of compiling, and only that."""

    def implementations(self, objective: Objective) -> list[str]:
        """What is run of an objective."""
        if objective.name not in self.objectives:
            return []
        return [name for name in objective.implementations if (name == "compiled") == self.compiled]


def settings() -> list[Setting]:
    """The most telling first, since the time may end before the list does."""
    every = tuple(objective.name for objective in OBJECTIVES)
    main = every[:4]
    found = [
        Setting(pair=QWEN, ranks=1, rows=MAIN_LENGTH, objectives=every),
        Setting(pair=QWEN, ranks=1, rows=MAIN_LENGTH, objectives=main[:1], order="original"),
    ]
    found += [
        Setting(pair=QWEN, ranks=1, rows=rows, objectives=main)
        for rows in LENGTHS
        if rows != MAIN_LENGTH
    ]
    found += [
        Setting(pair=QWEN, ranks=ranks, rows=MAIN_LENGTH, objectives=main) for ranks in RANKS[1:]
    ]
    found.append(Setting(pair=GEMMA, ranks=1, rows=MAIN_LENGTH, objectives=every))
    found += [
        Setting(pair=GEMMA, ranks=ranks, rows=MAIN_LENGTH, objectives=main) for ranks in RANKS[1:]
    ]
    found.append(Setting(pair=QWEN, ranks=1, rows=MAIN_LENGTH, objectives=every, compiled=True))
    return found


class Vocabularies:
    """Made when first asked for; one of several pairs at a time."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int, Order], RankVocabulary] = {}

    def __call__(self, setting: Setting) -> RankVocabulary:
        wanted = (setting.pair, setting.ranks, setting.order)
        if wanted not in self._made:
            self._made = {key: value for key, value in self._made.items() if key[0] == wanted[0]}
            self._made[wanted] = RankVocabulary.of(load_pair(setting.pair), *wanted[1:])
        return self._made[wanted]


def measured(
    inputs: DistillationInputs, objective: Objective, implementation: str, budget_ms: float
) -> dict[str, Any]:
    """Time and memory of one implementation; raises NotThereError, or what it failed with."""
    loss = objective.loss(implementation)
    leaf = inputs.student_logits

    def clear() -> None:
        leaf.grad = None

    try:
        return asdict(timed(lambda: loss(inputs).backward(), clear=clear, budget_ms=budget_ms))
    finally:
        clear()


def measured_rows(deadline: float, not_run: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every objective of every setting until the deadline, by ``time.monotonic``."""
    vocabularies = Vocabularies()
    for setting in settings():
        what = {"pair": setting.pair, "ranks": setting.ranks, "rows": setting.rows}
        what["order"] = setting.order
        if time.monotonic() > deadline:
            not_run.append(what | {"why": "the time was up"})
            continue
        vocabulary = vocabularies(setting)
        inputs = vocabulary.microbatch(setting.rows, device=DEVICE)
        for objective in OBJECTIVES:
            given = same_vocabulary(inputs) if objective.same_vocabulary else inputs
            for implementation in setting.implementations(objective):
                row = what | {"objective": objective.name, "implementation": implementation}
                if time.monotonic() > deadline:
                    not_run.append(row | {"why": "the time was up"})
                    continue
                try:
                    found = measured(given, objective, implementation, budget_ms=150)
                except NotThereError as error:
                    not_run.append(row | {"why": str(error)})
                except Exception as error:
                    not_run.append(row | {"why": f"{type(error).__name__}: {str(error)[:300]}"})
                    torch.cuda.empty_cache()
                else:
                    yield (
                        row | _counted(vocabulary, setting.rows, objective, implementation) | found
                    )
            del given
        del inputs
        torch.cuda.empty_cache()


def _counted(
    vocabulary: RankVocabulary, rows: int, objective: Objective, implementation: str
) -> dict[str, Any]:
    shape = vocabulary.shape(rows)
    if objective.same_vocabulary:
        shape = replace(shape, teacher_rows=rows, teacher_columns=shape.student_columns)
    once, twice = floors(shape, 2, objective.teacher)
    found = {"inputs": vocabulary.pair.source, "floor_b1": once, "floor_b2": twice}
    moved = kernel_bytes(objective.name, shape, 2) if implementation == "triton" else None
    return found if moved is None else found | {"bytes": round(moved)}


def head_rows(deadline: float, not_run: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Losses from hidden states, beside the products with the heads alone."""
    vocabulary = RankVocabulary.of(load_pair(QWEN), 1)
    text = vocabulary.text(MAIN_LENGTH)
    columns = (vocabulary.shards[0].width, vocabulary.shards[1].width)
    heads = Heads.random(text.lengths, columns, device=DEVICE)
    runs: dict[tuple[str, str], Callable[[], Callable[[], object]]] = {
        ("none", "bare products"): lambda: lambda: bare_products(heads)
    }
    for objective, names in TILED.items():
        for rows in TILES:
            form = partial(linear_form, names, vocabulary, text, heads, tile_rows=rows)
            runs[objective, f"linear form, tiles of {rows:,}"] = partial(_with_backward, form)
    yield from _head_rows(QWEN, heads, runs, deadline, not_run)
    del heads, runs
    torch.cuda.empty_cache()
    heads = Heads.random((MAIN_LENGTH,) * 2, (columns[0],) * 2, device=DEVICE)
    runs = {("none", "bare products"): lambda: lambda: bare_products(heads)}
    for name, make in ONE_VOCABULARY.items():
        runs["vocab_kl", name] = partial(_with_backward, partial(make, heads))
    yield from _head_rows("one vocabulary", heads, runs, deadline, not_run)


def _with_backward(make: Callable[[], Callable[[], torch.Tensor]]) -> Callable[[], object]:
    loss = make()
    return lambda: loss().backward()


def _head_rows(
    pair: str,
    heads: Heads,
    runs: dict[tuple[str, str], Callable[[], Callable[[], object]]],
    deadline: float,
    not_run: list[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    for (objective, implementation), make in runs.items():
        row = {"pair": pair, "ranks": 1, "rows": MAIN_LENGTH, "flops": heads.flops}
        row |= {"objective": objective, "implementation": implementation}
        if time.monotonic() > deadline:
            not_run.append(row | {"why": "the time was up"})
            continue
        try:
            yield row | asdict(timed(make(), clear=heads.clear, budget_ms=500))
        except NotThereError as error:
            not_run.append(row | {"why": str(error)})
        except Exception as error:
            not_run.append(row | {"why": f"{type(error).__name__}: {str(error)[:300]}"})
            heads.clear()
            torch.cuda.empty_cache()


def gate(device: str) -> list[dict[str, Any]] | None:
    """What was compared; None, with a message, where a kernel differs."""
    if device == "cuda":
        vocabulary, rows = RankVocabulary.of(load_pair(QWEN), 8), 96
    else:
        vocabulary, rows = small_vocabulary(), 12
    checked = list(check_kernels(vocabulary, rows, device))
    for one in checked:
        if not one.passed:
            print(f"WRONG: {one}", file=sys.stderr)
    return [asdict(one) for one in checked] if all(one.passed for one in checked) else None


def write_counted(path: Path, checked: list[dict[str, Any]]) -> None:
    """Bytes from shapes, for every pair, length and number of ranks."""
    rows = []
    launches: list[dict[str, Any]] = []
    for pair in SIZES:
        for ranks in RANKS:
            vocabulary = RankVocabulary.of(load_pair(pair), ranks)
            if not launches:
                found = LAUNCHES[OBJECTIVES[0].name](vocabulary.shape(MAIN_LENGTH), 2)
                launches = [{"launch": name, "bytes": round(moved)} for name, moved in found]
            rows += list(counted_rows(vocabulary, ranks, LENGTHS))
            print(f"counted {pair}, {ranks} ranks", flush=True)
    results = {
        "commit": commit(),
        "torch": torch.__version__,
        "gate": checked,
        "launches": launches,
        "rows": rows,
    }
    write_results(path, results)


def write_measured(path: Path, checked: list[dict[str, Any]], seconds: float) -> None:
    """Times and memory on this machine's GPU."""
    deadline = time.monotonic() + seconds
    copied = copy_bandwidth()
    print(f"copy: {copied / 1e12:.2f} TB/s", flush=True)
    torch.cuda.empty_cache()
    rows: list[dict[str, Any]] = []
    not_run: list[dict[str, Any]] = []
    results = {
        "machine": machine(),
        "commit": commit(),
        "copy_bytes_per_second": copied,
        "finished": False,
        "gate": checked,
        "rows": rows,
        "not_run": not_run,
    }
    write_results(path, results)
    for found in (measured_rows(deadline - 0.2 * seconds, not_run), head_rows(deadline, not_run)):
        for row in found:
            rows.append(row)
            # What is measured is kept if the time ends while something else is compiled.
            write_results(path, results)
            print(
                f"{row['pair']}, {row.get('order', '')}, {row['ranks']} ranks,"
                f" {row['rows']:,} rows, {row['objective']}, {row['implementation']}:"
                f" {row['ms_median']:.2f} ms, peak {row['peak_bytes'] / 2**20:,.0f} MiB",
                flush=True,
            )
    write_results(path, results | {"finished": True})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file with what a GPU took")
    parser.add_argument("--counted", type=Path, help="JSON file with bytes from shapes")
    parser.add_argument("--seconds", type=float, default=420, help="for all times together")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.output is not None and device == "cpu":
        parser.error("--output needs a GPU; --counted does not")
    checked = gate(device)
    if checked is None:
        print("a kernel is wrong: nothing is measured, and nothing was written", file=sys.stderr)
        return 1
    print(f"{len(checked)} comparisons of kernels with torch in fp64: all as they should")
    if arguments.counted is not None:
        write_counted(arguments.counted, checked)
    if arguments.output is not None:
        write_measured(arguments.output, checked, arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
