from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses import BoundaryColumns
from megatron_ext.projection.layout import VocabularyLayout, VocabularyOrder
from megatron_ext.tokenizers.token_bytes import TokenBytes

TOKENS = [b" a", b"b", b"\nc", b"d", b" "]


def order(ids: list[int]) -> VocabularyOrder:
    return VocabularyOrder(ids=np.array([*ids, 5]), vocab_size=5, rank_count=2)


LAYOUT = VocabularyLayout(
    student=order([1, 0, 3, 4, 2]), teacher=order([4, 3, 2, 1, 0]), common_counts=(0, 0)
)


@pytest.mark.parametrize("rank", [0, 1])
def test_columns_of_a_layout_are_by_place(rank: int) -> None:
    shard = VocabShard(start=3 * rank, stop=3 * rank + 3, vocab_size=5)
    columns = BoundaryColumns.at_word_starts(
        TokenBytes.from_tokens(TOKENS),
        TokenBytes.from_tokens(TOKENS),
        student_shard=shard,
        teacher_shard=shard,
        layout=LAYOUT,
    )
    starts = torch.tensor([True, False, True, False, True, False])
    for side, ordered in (("student", LAYOUT.student), ("teacher", LAYOUT.teacher)):
        whole = starts[torch.from_numpy(ordered.ids.copy())]
        assert torch.equal(getattr(columns, side), whole[shard.start : shard.stop])


def test_bytes_of_another_vocabulary_are_refused_under_a_layout_too() -> None:
    shard = VocabShard(start=0, stop=6, vocab_size=5)
    with pytest.raises(LossError, match="of another vocabulary"):
        BoundaryColumns.at_word_starts(
            TokenBytes.from_tokens([*TOKENS, b" e"]),
            TokenBytes.from_tokens(TOKENS),
            student_shard=shard,
            teacher_shard=shard,
            layout=LAYOUT,
        )
