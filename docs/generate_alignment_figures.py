"""Write the figures of ``alignment.md`` from the results of the benchmarks.

    python benchmarks/alignment.py --output benchmarks/results/alignment.json
    python benchmarks/pair_coverage.py --output benchmarks/results/coverage.json
    python docs/generate_alignment_figures.py

Each table stands between ``<!-- name -->`` and ``<!-- /name -->``. A test compares the page with
what this would write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("alignment.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def alignment_page() -> str:
    """The text of ``alignment.md`` with its tables as the results have them now."""
    page = PAGE.read_text(encoding="utf-8")
    for name, rows in (("coverage", _coverage()), ("speed", _speed())):
        region = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        assert region.search(page), f"the page has no region {name}"
        table = "\n".join(_table(rows))
        page = region.sub(lambda match, table=table: f"{match[1]}\n{table}\n\n{match[2]}", page)
    return page


def _coverage() -> Iterator[Sequence[str]]:
    rows = _results("coverage")["rows"]
    texts = list(dict.fromkeys(row["text"] for row in rows))
    shares: dict[str, dict[str, float]] = {}
    for row in rows:
        pair = shares.setdefault(f"{row['student']}, {row['teacher']}", {})
        pair[row["text"]] = row["one_to_one"] / row["chunks"]
    yield ("student, teacher", *texts)
    for pair_name, by_text in shares.items():
        yield (pair_name, *(f"{by_text[text]:.1%}" for text in texts))


def _speed() -> Iterator[Sequence[str]]:
    rows = _results("alignment")["rows"]
    sizes = sorted({row["student_tokens"] for row in rows})
    yield ("text", *(f"{size:,}" for size in sizes))
    for text in dict.fromkeys(row["text"] for row in rows):
        rates = {
            r["student_tokens"]: r["student_tokens_per_second"] for r in rows if r["text"] == text
        }
        yield (text, *(f"{rates[size] / 1e6:.0f}" for size in sizes))


def _results(name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return results


def _table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for number, cells in enumerate(rows):
        yield f"| {' | '.join(cells)} |"
        if number == 0:
            yield "|---" * len(cells) + "|"


if __name__ == "__main__":
    PAGE.write_text(alignment_page(), encoding="utf-8")
