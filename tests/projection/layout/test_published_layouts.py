"""What a layout keeps within ranks for published pairs."""

from __future__ import annotations

import runpy
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.projection.layout import LayoutStatistics
from tests.projection.published_vocabularies import needs_published

pytestmark = needs_published

SCRIPT = Path(__file__).parents[3] / "docs" / "generate_layout_figures.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_the_page_shows_what_layouts_keep_together(script: dict[str, Any]) -> None:
    assert script["PAGE"].read_text(encoding="utf-8") == script["layout_page"](), (
        "run: python docs/generate_layout_figures.py"
    )


def test_every_rank_has_its_share_and_a_layout_takes_no_time(script: dict[str, Any]) -> None:
    projection = script["projection_to"]("qwen3")
    started = time.process_time()
    layout = script["layout_of"](projection, 8)
    assert time.process_time() - started < 2
    found = LayoutStatistics.of(projection, layout)
    assert found.common_within == found.common == 109_567
    assert found.crossing_columns < 500
    assert max(found.common_balance, found.residual_balance) < 1.02
