"""Padded chunk ids in label coordinates, against a slow loop."""

import numpy as np
import pytest
import torch
from byte_end_strategies import pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.alignment import align_byte_ends
from megatron_ext.alignment.batch import pad_alignments
from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import AlignmentError


def slow_batch(chunk_ids, student_length, teacher_length, masks):
    """Padded rows of both sides and the chunk count, one chunk at a time."""
    lengths = (student_length, teacher_length)
    padded = [[[NO_CHUNK] * length for _ in chunk_ids] for length in lengths]
    count = 0
    for row, pair in enumerate(chunk_ids):
        for chunk in range(max(max(ids, default=NO_CHUNK) for ids in pair) + 1):
            tokens = [[t for t, other in enumerate(ids) if other == chunk] for ids in pair]
            visible = all(
                side and all(1 <= token <= length for token in side)
                for side, length in zip(tokens, lengths, strict=True)
            )
            if not visible:
                continue
            if masks is not None and not all(masks[row][token - 1] for token in tokens[0]):
                continue
            for side in (0, 1):
                for token in tokens[side]:
                    padded[side][row][token - 1] = count
            count += 1
    return padded[0], padded[1], count


@st.composite
def microbatches(draw):
    chunk_ids = []
    for student, teacher in draw(st.lists(pairs(), max_size=4)):
        alignment = align_byte_ends(student, teacher)
        chunk_ids.append((alignment.student_chunk_id, alignment.teacher_chunk_id))
    masks = None
    if draw(st.booleans()):
        masks = [
            np.array(draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))), np.bool_)
            for ids, _ in chunk_ids
        ]
    return chunk_ids, draw(st.integers(1, 20)), draw(st.integers(1, 20)), masks


@given(microbatches())
@settings(max_examples=300, deadline=None)
def test_a_batch_is_that_of_a_slow_loop(microbatch):
    chunk_ids, student_length, teacher_length, masks = microbatch
    batch = pad_alignments(
        chunk_ids,
        student_length=student_length,
        teacher_length=teacher_length,
        student_masks=masks,
    )
    student, teacher, count = slow_batch(*microbatch)
    assert batch.student_chunk_id.tolist() == student
    assert batch.teacher_chunk_id.tolist() == teacher
    assert batch.chunk_count == count
    assert batch.student_chunk_id.shape == (len(chunk_ids), student_length)
    assert batch.student_chunk_id.dtype == batch.teacher_chunk_id.dtype == torch.int64


@given(microbatches())
@settings(deadline=None)
def test_every_chunk_occurs_on_both_sides(microbatch):
    chunk_ids, student_length, teacher_length, masks = microbatch
    batch = pad_alignments(
        chunk_ids,
        student_length=student_length,
        teacher_length=teacher_length,
        student_masks=masks,
    )
    for ids in (batch.student_chunk_id, batch.teacher_chunk_id):
        assert set(ids.unique().tolist()) - {NO_CHUNK} == set(range(batch.chunk_count))


def pair(student, teacher):
    return np.array(student, np.int32), np.array(teacher, np.int32)


def test_position_t_holds_the_chunk_of_token_t_plus_one():
    batch = pad_alignments([pair([-1, 0, 1, 1], [-1, 0, 0, 1])], student_length=5, teacher_length=3)
    assert batch.student_chunk_id.tolist() == [[0, 1, 1, -1, -1]]
    assert batch.teacher_chunk_id.tolist() == [[0, 0, 1]]
    assert batch.chunk_count == 2


@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        pytest.param([0, 1, 2], [-1, 0, 1, 2], id="first student token"),
        pytest.param([-1, 0, 1, 2], [0, 1, 2], id="first teacher token"),
        pytest.param([-1, 1, 2, -1, -1, 0], [-1, 0, 1, 2], id="past the student length"),
        pytest.param([-1, 0, 1, 2], [-1, 1, 2, -1, -1, 0], id="past the teacher length"),
        pytest.param([-1, 0, 1, 2, 0], [-1, 0, 1, 2, -1, 0], id="partly past the length"),
    ],
)
def test_a_chunk_that_is_not_wholly_predicted_is_dropped_on_both_sides(student, teacher):
    batch = pad_alignments([pair(student, teacher)], student_length=4, teacher_length=4)
    assert batch.chunk_count == 2
    for ids in (batch.student_chunk_id, batch.teacher_chunk_id):
        assert [chunk for chunk in ids[0].tolist() if chunk != NO_CHUNK] == [0, 1]


def test_ids_run_on_from_sample_to_sample():
    sample = pair([-1, 0, 1], [-1, 0, 1, 1])
    batch = pad_alignments([sample, sample], student_length=3, teacher_length=3)
    assert batch.student_chunk_id.tolist() == [[0, 1, -1], [2, 3, -1]]
    assert batch.teacher_chunk_id.tolist() == [[0, 1, 1], [2, 3, 3]]


def test_a_chunk_with_an_untrained_student_position_is_dropped():
    batch = pad_alignments(
        [pair([-1, 0, 0, 1], [-1, 0, 1])],
        student_length=3,
        teacher_length=2,
        student_masks=[np.array([True, False, True])],
    )
    assert batch.student_chunk_id.tolist() == [[-1, -1, 0]]
    assert batch.teacher_chunk_id.tolist() == [[-1, 0]]


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([], id="no sample"),
        pytest.param([pair([], [])], id="no token"),
        pytest.param([pair([-1, -1], [-1])], id="no chunk"),
    ],
)
def test_a_batch_without_chunks_is_all_padding(samples):
    batch = pad_alignments(samples, student_length=3, teacher_length=2)
    assert batch.chunk_count == 0
    assert batch.student_chunk_id.tolist() == [[-1, -1, -1]] * len(samples)
    assert batch.teacher_chunk_id.tolist() == [[-1, -1]] * len(samples)


def test_arguments_are_left_as_they_are():
    student, teacher = pair([-1, 0], [-1, 0])
    pad_alignments([(student, teacher)] * 2, student_length=3, teacher_length=3)
    assert student.tolist() == teacher.tolist() == [-1, 0]


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        pytest.param([], "got 0; expected 1", id="no mask"),
        pytest.param([np.ones(1, np.bool_)], "mask of sample 0 is too short", id="short mask"),
    ],
)
def test_a_mask_that_does_not_cover_the_labels_is_refused(masks, message):
    with pytest.raises(AlignmentError, match=message):
        pad_alignments(
            [pair([-1, 0, 1], [-1, 0, 1])], student_length=4, teacher_length=4, student_masks=masks
        )
