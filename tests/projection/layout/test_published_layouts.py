"""What a layout keeps within ranks for published pairs; the figures of docs/projection.md."""

from __future__ import annotations

import time
from functools import cache

import pytest

from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import LayoutStatistics, VocabularyLayout
from megatron_ext.tokenizers.build import padded_vocab_size
from megatron_ext.tokenizers.libraries.huggingface.tokenizer import HuggingFaceTokenizer
from tests.projection.published_vocabularies import needs_published, published

pytestmark = needs_published

SHARES = {
    "qwen3": {1: (109_567, 1.0, 0), 2: (109_567, 0.956, 363), 8: (109_567, 0.911, 430)},
    "gemma3": {1: (86_436, 1.0, 0), 2: (86_436, 0.935, 184), 8: (86_436, 0.829, 475)},
}
"""Teacher -> ranks -> common pairs side by side, share of entries within a rank, columns that are
entered from several; of Llama 3.2 and a retokenized projection."""


@cache
def projection_to(teacher: str) -> SparseProjection:
    return SparseProjection.from_tokenizers(
        HuggingFaceTokenizer(published("llama3_2")), HuggingFaceTokenizer(published(teacher))
    )


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("teacher", SHARES)
def test_nearly_all_of_a_published_pair_stays_within_ranks(teacher: str, ranks: int) -> None:
    projection = projection_to(teacher)
    sizes = [
        padded_vocab_size(size, make_vocab_size_divisible_by=128, tensor_model_parallel_size=ranks)
        for size in projection.vocab_sizes
    ]
    started = time.process_time()
    layout = VocabularyLayout.of(
        projection, rank_count=ranks, student_size=sizes[0], teacher_size=sizes[1]
    )
    assert time.process_time() - started < 2
    found = LayoutStatistics.of(projection, layout)
    common, share, crossing = SHARES[teacher][ranks]
    assert found.common_within == found.common == common
    assert found.share_within == pytest.approx(share, abs=5e-4)
    assert found.crossing_columns == crossing
    assert found.residual_balance < 1.001
    assert found.common_balance < 1.02
