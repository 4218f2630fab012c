"""What each rank owns, sends and receives; ``tests/distributed`` has the losses."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.distributed.context_parallel import SequenceLayout
from megatron_ext.errors import LossError
from megatron_ext.losses.context_parallel import ContextParallelPlan
from tests.losses.microbatch import Microbatch
from tests.losses.objective_cases import with_completions

GROUP: Any = object()
"""Nothing is sent here."""


def plan_of(
    alignment: AlignmentBatch, layout: SequenceLayout, *, rank: int, group: Any = GROUP
) -> ContextParallelPlan:
    return ContextParallelPlan.from_alignment(
        alignment, student=layout, teacher=layout, rank=rank, group=group
    )


def plans(
    student: list[list[int]], teacher: list[list[int]], **cu_seqlens: torch.Tensor
) -> list[ContextParallelPlan]:
    """Of two ranks with contiguous slices."""
    alignment = AlignmentBatch.from_chunk_ids(
        torch.tensor(student), torch.tensor(teacher), **cu_seqlens
    )
    layout = SequenceLayout(size=2, order="contiguous")
    return [plan_of(alignment, layout, rank=rank) for rank in range(2)]


def test_only_rows_of_chunks_that_lie_on_both_ranks_cross() -> None:
    # Chunk 1 goes over the student's cut; chunk 2 begins before the teacher's.
    first, second = plans([[0, 0, 1, 1, 2, 3]], [[0, 1, 2, 2, 2, 3]])
    assert first.chunks.tolist() == [0, 1]
    assert second.chunks.tolist() == [2, 3]
    # Rows of the owned chunks, and the one after.
    assert first.alignment.student_chunk_id.tolist() == [[0, 0, 1, 1, -1]]
    assert second.alignment.student_chunk_id.tolist() == [[0, 1, -1]]
    assert first.alignment.teacher_chunk_id.tolist() == [[0, 1, -1]]
    assert second.alignment.teacher_chunk_id.tolist() == [[0, 0, 0, 1, -1]]
    assert (first.student.sent_counts, first.student.received_counts) == ((0, 0), (0, 2))
    assert (second.student.sent_counts, second.student.received_counts) == ((2, 0), (0, 0))
    assert second.student.sent.tolist() == [0, 1]
    assert (first.teacher.sent_counts, first.teacher.received_counts) == ((0, 1), (0, 0))
    assert first.teacher.sent.tolist() == [2]
    assert second.teacher.received.tolist() == [0]


def test_rows_of_no_chunk_stay_behind_and_the_next_sequence_is_not_after_a_chunk() -> None:
    bounds = torch.tensor([0, 4, 8], dtype=torch.int32)
    first, second = plans(
        [[-1, 0, -1, 1, 2, 2, -1, -1]],
        [[-1, 0, -1, 1, 2, 2, -1, -1]],
        student_cu_seqlens=bounds,
        teacher_cu_seqlens=bounds,
    )
    # Rank 0 has rows 0, 1, 4, 5. Chunk 1 ends the first sequence.
    assert first.alignment.student_chunk_id.tolist() == [[0, -1, 1, 1, -1]]
    assert first.alignment.student_cu_seqlens.tolist() == [0, 2, 5]
    assert first.alignment.sample.tolist() == [0, 1]
    assert first.student.leaving.tolist() == [0]
    # Nothing follows chunk 1: not the next sequence, but a blank row.
    assert second.alignment.student_chunk_id.tolist() == [[0, -1]]
    assert second.student_rows.tolist() == [3, -1]
    assert second.student.blank.tolist() == [1]
    assert second.alignment.sample.tolist() == [0]


def test_what_is_known_of_a_chunk_goes_to_its_owner() -> None:
    batch = Microbatch.random(batch=1, lengths=(8, 8))
    inputs = batch.inputs()
    plan = plan_of(inputs.alignment, SequenceLayout(size=1), rank=0, group=None)
    assert torch.equal(plan.alignment.chunk_class, inputs.alignment.chunk_class)
    mask, script = torch.arange(4) % 2 == 0, torch.arange(4, dtype=torch.int8)
    plan = replace(plan, chunks=torch.tensor([1, 2]))
    out = plan.inputs(
        replace(inputs, chunk_mask=mask, chunk_script=script, teacher_labels=torch.arange(8)[None])
    )
    assert out.chunk_mask.tolist() == [False, True]
    assert out.chunk_script.tolist() == [1, 2]
    # Rows of chunks and after them, in order; what follows the last one is blank.
    assert out.teacher_labels.shape == plan.alignment.teacher_chunk_id.shape
    of_chunks = plan.alignment.teacher_chunk_id[0] >= 0
    is_aligned = inputs.alignment.teacher_chunk_id[0] >= 0
    assert torch.equal(out.teacher_labels[0][of_chunks], torch.arange(8)[is_aligned])
    whole = plan.labels(inputs.labels, torch.arange(8)[None])
    assert torch.equal(whole[0], out.labels)
    assert torch.equal(whole[1], out.teacher_labels)
    assert (out.labels[0, plan.student.blank] == IGNORE_INDEX).all()
    assert not out.student_logits[0, plan.student.blank].any()


def test_rows_of_another_length_are_refused() -> None:
    inputs = Microbatch.random(batch=1, lengths=(8, 8)).inputs()
    plan = plan_of(inputs.alignment, SequenceLayout(size=2), rank=0)
    with pytest.raises(LossError, match=r"student's rows .* got \(1, 8\) .* expected 4 rows"):
        plan.inputs(inputs)


def test_completions_of_whole_sequences_are_refused() -> None:
    inputs = with_completions(Microbatch.random(batch=1, lengths=(8, 8)), (0, 0))
    plan = plan_of(inputs.alignment, SequenceLayout(size=1), rank=0, group=None)
    other = replace(inputs.completions, chunk_count=9)
    with pytest.raises(LossError, match=r"got 9 chunks; expected 4; make them of plan.alignment"):
        plan.inputs(replace(inputs, completions=other))
