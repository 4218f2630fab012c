"""Write the tables of ``megatron_core.md``: private parts by release, and what was tested.

    python docs/generate_megatron_core.py

Each table stands between ``<!-- name -->`` and ``<!-- /name -->``. A test compares the page with
what this would write. ``.ci/check_versions.py --write`` makes what the second table is of.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.training.megatron_models.megatron_parts import PARTS

PAGE = Path(__file__).with_name("megatron_core.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "versions.json"


def megatron_core_page() -> str:
    """The page with current tables."""
    page = PAGE.read_text(encoding="utf-8")
    for name, lines in (("parts", parts()), ("versions", versions())):
        table = "\n".join(lines)
        region = f"(?s)<!-- {name} -->.*<!-- /{name} -->"
        text = f"<!-- {name} -->\n\n{table}\n\n<!-- /{name} -->"
        page, found = re.subn(region, lambda _, text=text: text, page)
        assert found == 1, name
    return page


def parts() -> Iterator[str]:
    """A row for each private part."""
    yield "| from | `megatron.core.` | what for |"
    yield "|---|---|---|"
    for part in PARTS.values():
        for first, where in part.places.items():
            path = (where or "").removeprefix("megatron.core.").replace(":", ".")
            yield f"| {first} | {f'`{path}`' if path else 'nowhere'} | {part.use} |"


def versions() -> Iterator[str]:
    """A row for each combination that was tested."""
    yield "| Python | megatron-core | torch | transformers | tests |"
    yield "|---|---|---|---|---|"
    results: dict[str, Mapping[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    for name, result in sorted(results.items()):
        python = name.split(",")[0].removeprefix("Python ")
        found = [result["versions"][each] for each in ("megatron-core", "torch", "transformers")]
        failed = f", {result['failed']} failed" if result["failed"] else ""
        skipped = f", {result['skipped']} skipped" if result["skipped"] else ""
        told = f"{result['passed']} passed{failed}{skipped}"
        yield f"| {python} | " + " | ".join(found) + f" | {told} |"


if __name__ == "__main__":
    PAGE.write_text(megatron_core_page(), encoding="utf-8")
