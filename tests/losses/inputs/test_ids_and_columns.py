"""Columns at word starts, places of ids in a layout, and rows of chunks that count."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses import BoundaryColumns, IdTable
from megatron_ext.losses.matched_columns import counted_ids
from megatron_ext.projection.layout import VocabularyLayout, VocabularyOrder
from megatron_ext.tokenizers.token_bytes import TokenBytes
from tests.losses.microbatch import Microbatch

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


ORDER = VocabularyOrder(ids=np.array([3, 0, 2, 1, 4, 5]), vocab_size=4, rank_count=2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_ids_are_looked_up_and_what_is_no_id_stays(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 1, 2, 3], [IGNORE_INDEX, -1, 5, 3]], dtype=dtype)
    places = IdTable.of(ORDER).places_of(ids)
    assert places.dtype == dtype
    assert places.tolist() == [[1, 3, 2, 0], [IGNORE_INDEX, -1, 5, 0]]
    assert ids.tolist()[0] == [0, 1, 2, 3]


def test_no_ids_have_no_places() -> None:
    assert IdTable.of(ORDER).places_of(torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3)


def test_rows_of_chunks_that_do_not_count_are_in_no_chunk() -> None:
    ids = torch.tensor([[0, -1, 1, 1], [2, 3, -1, 3]])
    inputs = replace(
        Microbatch.random().inputs(),
        alignment=AlignmentBatch.from_chunk_ids(ids, ids.flip(0)),
        chunk_mask=torch.tensor([True, False, True, False]),
    )
    student, teacher = counted_ids(inputs)
    assert student.tolist() == [0, -1, -1, -1, 2, -1, -1, -1]
    assert teacher.tolist() == [2, -1, -1, -1, 0, -1, -1, -1]
    everything, _ = counted_ids(replace(inputs, chunk_mask=None))
    assert everything.tolist() == ids.flatten().tolist()


def test_a_mask_of_no_chunk_leaves_none() -> None:
    nothing = torch.full((2, 3), -1)
    inputs = replace(
        Microbatch.random().inputs(),
        alignment=AlignmentBatch.from_chunk_ids(nothing, nothing),
        chunk_mask=torch.zeros(0, dtype=torch.bool),
    )
    assert all((ids == -1).all() for ids in counted_ids(inputs))
