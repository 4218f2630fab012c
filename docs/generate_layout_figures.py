"""Write the figures of vocabulary layouts into ``projection.md``, from published vocabularies.

    MEGATRON_EXT_SHARED=../shared python docs/generate_layout_figures.py

The table stands between ``<!-- layouts -->`` and ``<!-- /layouts -->``. A test compares the page
with what this would write, where the vocabularies are at hand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import LayoutStatistics, VocabularyLayout, VocabularyOrder
from megatron_ext.tokenizers.build import padded_vocab_size
from megatron_ext.tokenizers.libraries.huggingface import HuggingFaceTokenizer

PAGE = Path(__file__).with_name("projection.md")
SHARED = Path(os.environ.get("MEGATRON_EXT_SHARED") or Path(__file__).parents[2] / "shared")
REGION = re.compile(r"(<!-- layouts -->\n).*?(<!-- /layouts -->)", re.DOTALL)
TEACHERS = {"qwen3": "Llama 3.2 to Qwen3", "gemma3": "Llama 3.2 to Gemma 3"}
RANKS = (2, 4, 8)


def layout_page() -> str:
    """The text of ``projection.md`` with its table of layouts as it is measured now."""
    page = PAGE.read_text(encoding="utf-8")
    assert REGION.search(page), "the page has no region of this name"
    rows = (row for teacher in TEACHERS for row in rows_of(teacher, projection_to(teacher), RANKS))
    table = "\n".join([*_header(), *rows])
    return REGION.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", page)


def projection_to(teacher: str) -> SparseProjection:
    """From Llama 3.2, by the default method."""
    student, other = (
        HuggingFaceTokenizer(SHARED / "tokenizers" / name) for name in ("llama3_2", teacher)
    )
    return SparseProjection.from_tokenizers(student, other)


def layout_of(projection: SparseProjection, ranks: int) -> VocabularyLayout:
    """For heads padded as megatron-core does."""
    student, teacher = _padded_sizes(projection, ranks)
    return VocabularyLayout.of(
        projection, rank_count=ranks, student_size=student, teacher_size=teacher
    )


def rows_of(teacher: str, projection: SparseProjection, rank_counts: Sequence[int]) -> list[str]:
    """A row of the table for each number of ranks; ``projection`` is that to the teacher."""
    rows = []
    for ranks in rank_counts:
        found = LayoutStatistics.of(projection, layout_of(projection, ranks))
        before = LayoutStatistics.of(projection, _in_order_of_ids(projection, ranks))
        cells = (
            TEACHERS[teacher],
            str(ranks),
            f"{found.common_within:,} of {found.common:,}",
            f"{found.share_within:.1%}",
            f"{before.share_within:.1%}",
            f"{found.crossing_columns:,}",
            f"{before.crossing_columns:,}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _padded_sizes(projection: SparseProjection, ranks: int) -> list[int]:
    return [
        padded_vocab_size(size, make_vocab_size_divisible_by=128, tensor_model_parallel_size=ranks)
        for size in projection.vocab_sizes
    ]


def _in_order_of_ids(projection: SparseProjection, ranks: int) -> VocabularyLayout:
    student, teacher = (
        VocabularyOrder(ids=np.arange(padded), vocab_size=size, rank_count=ranks)
        for padded, size in zip(
            _padded_sizes(projection, ranks), projection.vocab_sizes, strict=True
        )
    )
    return VocabularyLayout(student=student, teacher=teacher, common_counts=(0,) * ranks)


def _header() -> Iterator[str]:
    header = (
        "pair",
        "ranks",
        "common pairs side by side",
        "entries within a rank",
        "in order of ids",
        "columns of several ranks",
        "in order of ids",
    )
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"


if __name__ == "__main__":
    PAGE.write_text(layout_page(), encoding="utf-8")
