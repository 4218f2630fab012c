"""The page's figures are those of the benchmark."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "generate_projection_figures.py"


def test_the_table_of_pairs_is_current():
    script = runpy.run_path(str(SCRIPT))
    assert script["PAGE"].read_text(encoding="utf-8") == script["projection_page"](), (
        "run: python docs/generate_projection_figures.py"
    )
