"""Write the figures of ``projection.md`` from the results of the benchmark.

    python benchmarks/projection.py --output benchmarks/results/projection.json
    python docs/generate_projection_figures.py

The table stands between ``<!-- pairs -->`` and ``<!-- /pairs -->``. A test compares the page with
what this would write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).with_name("projection.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "projection.json"
REGION = re.compile(r"(<!-- pairs -->\n).*?(<!-- /pairs -->)", re.DOTALL)


def projection_page() -> str:
    """The text of ``projection.md`` with its table as the results have it now."""
    page = PAGE.read_text(encoding="utf-8")
    assert REGION.search(page), "the page has no region of this name"
    table = "\n".join(_pairs())
    return REGION.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", page)


def _pairs() -> Iterator[str]:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    header = ("pair", "rows", "exact", "spelled", "empty", "reachable columns", "build", "file")
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    for row in results["rows"]:
        rows, columns = row["shape"]
        spelled = rows - row["exact_rows"] - row["empty_rows"]
        cells = (
            row["pair"],
            f"{rows:,}",
            f"{row['exact_rows']:,}",
            f"{spelled:,}",
            f"{row['empty_rows']:,}",
            f"{row['reachable_columns']:,} of {columns:,}",
            f"{row['seconds_median']:.1f} s, {row['peak_mib']:.0f} MiB",
            f"{row['file_mib']:.1f} MiB",
        )
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(projection_page(), encoding="utf-8")
