from __future__ import annotations

from dataclasses import replace

import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.losses.matched_columns import counted_ids
from tests.losses.microbatch import Microbatch


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
