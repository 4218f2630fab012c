"""The page's figures are those of the benchmarks."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "generate_alignment_figures.py"


def test_the_tables_of_the_page_are_current():
    script = runpy.run_path(str(SCRIPT))
    assert script["PAGE"].read_text(encoding="utf-8") == script["alignment_page"](), (
        "run: python docs/generate_alignment_figures.py"
    )
