"""Write the figures of ``performance.md`` from the results of the benchmark of losses.

    make bench-gpu                                  (with a GPU, and once without)
    python docs/generate_performance.py

Each table stands between ``<!-- name -->`` and ``<!-- /name -->``. A test compares the page with
what this would write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("performance.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
ROWS = 8192
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes a second by the data sheets of the SXM modules."""

IMPLEMENTATIONS = ("triton", "torch", "eager")
NO_FIGURE = "**No GPU figure exists yet.** What is on this page is counted, not measured."

Row = dict[str, Any]


def performance_page() -> str:
    """The text of ``performance.md`` with its tables as the results have them now."""
    counted = _results("losses_counted")
    assert counted is not None
    measured = _results("losses")
    regions = {
        "inputs": [_inputs(counted["rows"])],
        "counted": _table(_counted(counted["rows"])),
        "launches": _table(_launches(counted["launches"])),
        "shards": _table(_shards(counted["rows"])),
        "measured": [NO_FIGURE] if measured is None else _measured(measured),
        "target": _target(counted["rows"], measured),
        "designs": _table(_designs()),
        "instructions": _table(_instructions()),
        "chunks": _table(_chunks()),
        "cpu": _table(_on_cpu()),
    }
    page = PAGE.read_text(encoding="utf-8")
    for name, lines in regions.items():
        region = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert region.search(page), f"the page has no region {name}"
        text = "\n".join(lines)
        page = region.sub(lambda match, text=text: f"{match[1]}\n{text}\n\n{match[2]}", page)
    return page


def _inputs(rows: list[Row]) -> str:
    made_up = sorted({row["pair"] for row in rows if row["inputs"] != "published"})
    if not made_up:
        return "Vocabularies, projections and the chunks of the text are the published ones."
    return f"Of {' and '.join(made_up)} only the structure is real: the files were not at hand."


def _counted(rows: list[Row]) -> Iterator[Sequence[str]]:
    """GB of each objective and implementation, for each pair."""
    pairs = list(dict.fromkeys(row["pair"] for row in rows))
    yield ("objective", "pair", "floor", "kernels", "torch", "eager recipe", "floor on H100, H200")
    for objective in dict.fromkeys(row["objective"] for row in rows):
        for pair in pairs:
            found = _by_implementation(rows, objective=objective, pair=pair, ranks=1, rows=ROWS)
            floor = next(iter(found.values()))["floor_b1"]
            times = ", ".join(f"{floor / speed * 1e3:.1f}" for speed in BANDWIDTH.values())
            cells = (_gigabytes(found.get(name), floor) for name in IMPLEMENTATIONS)
            yield (f"`{objective}`", pair, f"{floor / 1e9:.1f} GB", *cells, f"{times} ms")


def _gigabytes(row: Row | None, floor: int) -> str:
    if row is None:
        return ""
    return f"{row['bytes'] / 1e9:.1f} ({row['bytes'] / floor:.1f}x)"


def _launches(launches: list[Row]) -> Iterator[Sequence[str]]:
    total = sum(launch["bytes"] for launch in launches)
    yield ("launch", "bytes", "share")
    for launch in launches:
        cells = (f"{launch['bytes'] / 1e9:.2f} GB", f"{launch['bytes'] / total:.0%}")
        yield (launch["launch"], *cells)


def _shards(rows: list[Row]) -> Iterator[Sequence[str]]:
    """GB of the first objective by ranks."""
    chosen = {"objective": rows[0]["objective"], "pair": rows[0]["pair"], "rows": ROWS}
    yield ("ranks", "floor B1", "floor B2", "kernels", "torch", "eager recipe")
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        found = _by_implementation(rows, **chosen, ranks=ranks)
        first = next(iter(found.values()))
        floors = (f"{first[name] / 1e9:.2f} GB" for name in ("floor_b1", "floor_b2"))
        cells = (
            f"{found[name]['bytes'] / 1e9:.2f} GB" if name in found else ""
            for name in IMPLEMENTATIONS
        )
        yield (f"{ranks:,}", *floors, *cells)


def _measured(results: Row) -> list[str]:
    """What a GPU took: machine, then a table of the main setting and one of all others."""
    machine, copied = results["machine"], results["copy_bytes_per_second"]
    gpu = machine["gpu"]
    # The main setting comes first.
    main = next((row["rows"] for row in results["rows"]), ROWS)
    of_main = [row for row in results["rows"] if row["rows"] == main]
    others = [row for row in results["rows"] if row["rows"] != main]
    notes = _notes(results["rows"])
    lines = [
        f"{gpu['name']}, {gpu['multiprocessors']} multiprocessors, torch {machine['torch']},"
        f" triton {machine['triton']}, commit `{str(results['commit'])[:12]}`. A device-to-device"
        f" copy moves {copied / 1e12:.2f} TB/s, which is 100 % below. Where the first column is"
        f" empty: {of_main[0]['pair']}, {main:,} rows on one rank, heads co-sharded. Memory is what"
        " is allocated beyond the inputs, the gradient included; in place, kernels write that over"
        " the student's logits.",
        "",
        *_table(_times(of_main, copied, notes)),
        "",
        "Other lengths, by the kernels and by the eager recipe:",
        "",
        *_table(_other_lengths(others, notes)),
    ]
    for number, note in enumerate(notes, 1):
        lines += ["", f"({number}) {note}"]
    if not results["finished"]:
        lines += ["", "The run was stopped before its end."]
    if results["not_run"]:
        reasons: dict[str, int] = {}
        for row in results["not_run"]:
            reasons[row["why"]] = reasons.get(row["why"], 0) + 1
        listed = "; ".join(f"{count} because: {why}" for why, count in reasons.items())
        lines += ["", f"Not run: {listed}."]
    return lines


def _notes(rows: list[Row]) -> list[str]:
    """What has to be said of some rows, each once."""
    return list(dict.fromkeys(row["note"] for row in rows if "note" in row))


def _marked(words: str, row: Row, notes: list[str]) -> str:
    return f"{words} ({notes.index(row['note']) + 1})" if "note" in row else words


def _times(rows: list[Row], copied: float, notes: list[str]) -> Iterator[Sequence[str]]:
    yield (
        "setting", "objective", "implementation", "ms", "queued by the host in",
        "floor's bytes, of a copy", "memory",
    )  # fmt: skip
    bare = {row["pair"]: row["ms_median"] for row in rows if row["objective"] == "none"}
    for row in rows:
        if "floor_b1" in row:
            share = f"{row['floor_b1'] / (row['ms_median'] / 1e3) / copied:.0%}"
        elif row["objective"] == "none":
            share = f"{row['flops'] / (row['ms_median'] / 1e3) / 1e12:.0f} TFLOP/s"
        else:
            share = f"{row['ms_median'] / bare[row['pair']]:.2f} times the bare products"
        setting = (
            row["pair"] if row["pair"] != rows[0]["pair"] else "",
            "original order" if row.get("order") == "original" else "",
            f"{row['ranks']} ranks" if row["ranks"] != 1 else "",
        )
        yield (
            ", ".join(filter(None, setting)),
            f"`{row['objective']}`" if row["objective"] != "none" else "",
            _marked(row["implementation"], row, notes),
            f"{row['ms_median']:.2f}",
            f"{row['host_ms']:.1f} ms",
            share,
            f"{row['peak_bytes'] / 1e9:.2f} GB",
        )


def _other_lengths(rows: list[Row], notes: list[str]) -> Iterator[Sequence[str]]:
    yield ("rows", "objective", "kernels", "in place", "eager recipe", "memory: kernels, eager")
    chosen = [row for row in rows if row["ranks"] == 1 and row.get("order") == "co_sharded"]
    for key in dict.fromkeys((row["rows"], row["objective"]) for row in chosen):
        found = _by_implementation(chosen, rows=key[0], objective=key[1])
        if "triton" not in found:
            continue
        names = ("triton", "triton, in place", "eager")
        times = (f"{found[name]['ms_median']:.2f} ms" if name in found else "" for name in names)
        peaks = (f"{found[name]['peak_bytes'] / 1e9:.1f}" for name in names[::2] if name in found)
        rows_of_it = _marked(f"{key[0]:,}", found["triton"], notes)
        yield (rows_of_it, f"`{key[1]}`", *times, ", ".join(peaks) + " GB")


def _instructions() -> Iterator[Sequence[str]]:
    """The cheapest launch of each kernel on sm_90."""
    code = _results("kernel_code")
    assert code is not None
    yield ("kernel", "launch", "instructions a column", "registers", "warps at once")
    for (kernel, launch), row in _cheapest(code["after"]["sm_90"]).items():
        passes = " + ".join(f"{length:.0f}" for length in row["passes"])
        yield (f"`{kernel}`", launch, passes, str(row["registers"]), f"{row['occupancy']:.0%}")


def _cheapest(rows: dict[str, Row]) -> dict[tuple[str, str], Row]:
    """By kernel and launch, of those that are counted by passes."""
    found: dict[tuple[str, str], Row] = {}
    for name, row in rows.items():
        kernel, _, launch = name.rpartition(" ")[0].partition(" ")
        least = found.get((kernel, launch), row)
        # A program of the sweep runs one of several loops, by its chunk: they are no passes.
        if kernel == "sweep_kernel" or not row.get("passes"):
            continue
        if row["instructions_a_column"] <= least["instructions_a_column"]:
            found[kernel, launch] = row
    return found


def _target(counted: list[Row], measured: Row | None) -> list[str]:
    """What was set out to be reached, and how near it is."""
    found = _by_implementation(
        counted, objective=counted[0]["objective"], pair=counted[0]["pair"], ranks=1, rows=ROWS
    )
    kernels, eager = found["triton"], found["eager"]
    floor = kernels["floor_b1"]
    lines = [
        f"The aim is `{kernels['objective']}` in {floor / 0.7 / 4.3e12 * 1e3:.1f} ms on an H200:"
        f" the floor's {floor / 1e9:.1f} GB at 70 % of what a copy reaches there (about 4.3 TB/s),"
        " at least 20 times faster than the eager recipe, with at most a tenth of its memory, and"
        " the linear form within 1.15 times the bare products with the heads. By the count, kernels"
        f" move {kernels['bytes'] / floor:.2f} times the floor, and the eager recipe"
        f" {eager['bytes'] / kernels['bytes']:.0f} times what they do."
    ]
    if measured is None:
        return [*lines, "", "None of it has been measured."]
    times = {
        row["implementation"]: row
        for row in measured["rows"]
        if (row["objective"], row["pair"]) == (kernels["objective"], kernels["pair"])
        and (row["ranks"], row["rows"], row.get("order")) == (1, ROWS, "co_sharded")
    }
    if {"triton", "eager"} <= set(times):
        ours, theirs = times["triton"], times["eager"]
        share = floor / (ours["ms_median"] / 1e3) / measured["copy_bytes_per_second"]
        found_to_be = (
            f"Measured: {ours['ms_median']:.2f} ms, {share:.0%} of the copy,"
            f" {theirs['ms_median'] / ours['ms_median']:.0f} times faster than the eager recipe,"
            f" with {ours['peak_bytes'] / theirs['peak_bytes']:.2f} of its memory."
        )
        return [*lines, "", found_to_be]
    return lines


def _designs() -> Iterator[Sequence[str]]:
    """Times of the kernels of ``projected_kl + next_token`` in two designs, on a GPU.

    Of the variants of a design the fastest.
    """
    results = _results("projected_kl_designs")
    assert results is not None
    fastest: dict[tuple[str, ...], Row] = {}
    for row in sorted(results["rows"], key=lambda row: float(row["ms"])):
        fastest.setdefault((row["pair"], row["order"], row["design"]), row)
    yield ("pair", "heads", "design", "variant", "kernels", "the longest of them")
    for row in (row for row in results["rows"] if row in fastest.values()):
        longest = sorted(row["kernels"].items(), key=lambda item: -item[1]["ms"])[:3]
        yield (
            row["pair"],
            row["order"].replace("_", "-"),
            row["design"],
            row["variant"],
            f"{row['ms']:.1f} ms",
            ", ".join(f"`{name}` {of['ms']:.1f}" for name, of in longest),
        )


def _on_cpu() -> Iterator[Sequence[str]]:
    results = _results("cpu_losses")
    assert results is not None
    yield ("dtype", "objective", "loops", "torch", "eager recipe", "memory: loops, torch, eager")
    for row in results["results"]:
        ours = row["cpu"]["seconds"]
        others = [row.get(name) for name in IMPLEMENTATIONS[1:]]
        yield (
            row["dtype"],
            f"`{row['objective']}`",
            f"{ours:.2f} s",
            *(f"{of['seconds']:.2f} ({of['seconds'] / ours:.1f}x)" if of else "" for of in others),
            ", ".join(f"{of['peak_mib']}" for of in (row["cpu"], *others) if of) + " MiB",
        )


def _chunks() -> Iterator[Sequence[str]]:
    results = _results("chunks")
    assert results is not None
    counts = sorted({row["chunks"] for row in results["rows"]})
    yield ("objective", *(f"{count:,} chunks" for count in counts), "for 8 times the chunks")
    for label in dict.fromkeys(row["objective"] for row in results["rows"]):
        times = [
            next(
                row["forward_ms"] + row["backward_ms"]
                for row in results["rows"]
                if (row["objective"], row["chunks"]) == (label, count)
            )
            for count in counts
        ]
        cells = (f"{time / 1e3:.1f} s" for time in times)
        yield (label, *cells, f"{times[-1] / times[0]:.1f} times the time")


def _by_implementation(results: list[Row], /, **wanted: Any) -> dict[str, Row]:
    chosen = [row for row in results if all(row[key] == value for key, value in wanted.items())]
    return {row["implementation"]: row for row in chosen}


def _results(name: str) -> Row | None:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return None
    results: Row = json.loads(path.read_text(encoding="utf-8"))
    return results


def _table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for number, cells in enumerate(rows):
        yield f"| {' | '.join(cells)} |"
        if number == 0:
            yield "|---" * len(cells) + "|"


if __name__ == "__main__":
    PAGE.write_text(performance_page(), encoding="utf-8")
