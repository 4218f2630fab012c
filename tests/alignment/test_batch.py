"""Padded and packed chunk ids in label coordinates, against a slow loop."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.alignment import Alignment, ChunkClass, align_byte_ends
from megatron_ext.alignment.batch import AlignmentBatch, pack_alignments, pad_alignments
from megatron_ext.alignment.chunk_places import BEGINS, INSIDE, OUTSIDE, without_chunks
from megatron_ext.constants import NO_CHUNK
from megatron_ext.errors import AlignmentError
from tests.alignment.byte_end_strategies import pairs


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


def padded(microbatch):
    chunk_ids, *options = microbatch
    names = ("student_length", "teacher_length", "student_masks")
    return pad_alignments(chunk_ids, **dict(zip(names, options, strict=True)))


@given(microbatches())
@settings(deadline=None)
def test_a_batch_is_that_of_a_slow_loop(microbatch):
    batch = padded(microbatch)
    student, teacher, count = slow_batch(*microbatch)
    assert batch.student_chunk_id.tolist() == student
    assert batch.teacher_chunk_id.tolist() == teacher
    assert batch.chunk_count == count
    assert batch.student_chunk_id.shape == (len(microbatch[0]), microbatch[1])
    assert batch.student_chunk_id.dtype == batch.teacher_chunk_id.dtype == torch.int64


def pair(student, teacher):
    return np.array(student, np.int32), np.array(teacher, np.int32)


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


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_length_of_no_token_is_refused(side):
    lengths = {"student_length": 4, "teacher_length": 4, f"{side}_length": 0}
    with pytest.raises(AlignmentError, match=f"{side}_length holds no token; got 0"):
        pad_alignments([pair([-1, 0], [-1, 0])], **lengths)


def slow_facts(student, teacher, sample_of):
    """Span, class and sample of each chunk of two flat rows, by their definitions."""
    facts = []
    for chunk in range(max([NO_CHUNK, *student]) + 1):
        at = [[t for t, other in enumerate(ids) if other == chunk] for ids in (student, teacher)]
        names = {(False, False): "ONE_TO_ONE", (False, True): "ONE_TO_MANY"}
        names |= {(True, False): "MANY_TO_ONE", (True, True): "MANY_TO_MANY"}
        facts.append(
            (
                [at[0][0], at[0][-1] + 1],
                [at[1][0], at[1][-1] + 1],
                ChunkClass[names[len(at[0]) > 1, len(at[1]) > 1]],
                sample_of(at[0][0]),
            )
        )
    return facts


def facts_of(batch):
    return list(
        zip(
            batch.student_spans.tolist(),
            batch.teacher_spans.tolist(),
            batch.chunk_class.tolist(),
            batch.sample.tolist(),
            strict=True,
        )
    )


def starts_of(spans, shape):
    starts = torch.zeros(shape, dtype=torch.bool)
    for first, _ in spans.tolist():
        starts.view(-1)[first] = True
    return starts


def assert_facts(batch, sample_of):
    flat = [ids.view(-1).tolist() for ids in (batch.student_chunk_id, batch.teacher_chunk_id)]
    assert facts_of(batch) == slow_facts(*flat, sample_of)
    for side in ("student", "teacher"):
        starts = getattr(batch, f"{side}_is_chunk_start")
        spans = getattr(batch, f"{side}_spans")
        assert torch.equal(starts, starts_of(spans, getattr(batch, f"{side}_chunk_id").shape))
        assert spans.dtype == torch.int64
    assert batch.chunk_class.dtype == torch.int8
    assert batch.sample.dtype == torch.int64
    assert batch.is_exact.tolist() == [True] * batch.chunk_count


@given(microbatches())
@settings(deadline=None)
def test_spans_classes_and_samples_of_a_padded_batch_are_those_of_its_ids(microbatch):
    batch = padded(microbatch)
    assert_facts(batch, lambda position: position // microbatch[1])


@given(microbatches(), st.integers(1, 3))
@settings(deadline=None)
def test_a_packed_batch_holds_the_chunks_of_the_padded_one(microbatch, multiple):
    chunk_ids, _, _, masks = microbatch
    longest = [max((len(side[i]) for side in chunk_ids), default=0) for i in (0, 1)]
    padded = pad_alignments(
        chunk_ids,
        student_length=max(longest[0], 1),
        teacher_length=max(longest[1], 1),
        student_masks=masks,
    )
    packed = pack_alignments(chunk_ids, student_masks=masks, multiple_of=multiple)
    assert packed.chunk_count == padded.chunk_count
    for i, side in enumerate(("student", "teacher")):
        bounds = getattr(packed, f"{side}_cu_seqlens")
        assert bounds.dtype == torch.int32
        sizes = [-(-len(pair[i]) // multiple) * multiple for pair in chunk_ids]
        assert bounds.tolist() == np.cumsum([0, *sizes]).tolist()
        row = getattr(packed, f"{side}_chunk_id")
        assert row.shape == (1, sum(sizes))
        for sample, pair in enumerate(chunk_ids):
            own = row[0, bounds[sample] : bounds[sample + 1]].tolist()
            kept = getattr(padded, f"{side}_chunk_id")[sample, : len(pair[i])].tolist()
            assert own == kept + [NO_CHUNK] * (len(own) - len(kept))
    starts = packed.student_cu_seqlens.tolist()[1:]
    assert_facts(packed, lambda position: sum(start <= position for start in starts))


@given(microbatches())
@settings(deadline=None)
def test_a_sample_of_a_batch_is_the_batch_of_the_sample(microbatch):
    chunk_ids, student_length, teacher_length, masks = microbatch
    lengths = {"student_length": student_length, "teacher_length": teacher_length}
    for layout, options in ((pad_alignments, lengths), (pack_alignments, {})):
        batch = layout(chunk_ids, student_masks=masks, **options)
        assert len(batch) == len(chunk_ids)
        for row, own in enumerate(batch):
            mask = masks and masks[row : row + 1]
            alone = layout(chunk_ids[row : row + 1], student_masks=mask, **options)
            for field in fields(AlignmentBatch):
                if not field.name.endswith(("cu_seqlens", "behind")):
                    left, right = getattr(own, field.name), getattr(alone, field.name)
                    assert left == right if field.name == "chunk_count" else left.equal(right)


def test_a_batch_has_no_sample_past_its_last():
    batch = pad_alignments([pair([-1, 0], [-1, 0])], student_length=2, teacher_length=2)
    assert batch[-1].chunk_count == 1
    with pytest.raises(IndexError, match="sample 1 of a batch of 1"):
        batch[1]


def test_chunks_that_are_not_exact_stay_so_where_others_are_dropped():
    student, teacher = pair([-1, 0, 1, 2], [0, 0, 1, 2])
    spans = np.array([[0, 2], [2, 3], [3, 4]], np.int32)
    alignment = Alignment(spans, spans, np.array([True, False, True]), student, teacher)
    batch = pad_alignments([pair([-1, 0], [-1, 0]), alignment], student_length=3, teacher_length=3)
    assert batch.sample.tolist() == [0, 1, 1]
    assert batch.is_exact.tolist() == [True, False, True]


def test_a_batch_moves_with_all_its_tensors():
    batch = pack_alignments([pair([-1, 0], [-1, 0])])
    behind = torch.tensor([-1])
    moved = replace(batch, student_behind=behind, teacher_behind=behind).to("meta")
    for field in fields(AlignmentBatch):
        value = getattr(moved, field.name)
        assert field.name == "chunk_count" or value.device.type == "meta", field.name
    assert moved.chunk_count == 1


def test_ids_that_leave_a_chunk_out_are_refused():
    with pytest.raises(
        AlignmentError,
        match="the teacher's chunk ids leave a chunk out; got no position of chunk 1",
    ):
        AlignmentBatch.from_chunk_ids(torch.tensor([[0, 1]]), torch.tensor([[0, -1]]))


@given(microbatches())
@settings(deadline=None)
def test_a_batch_of_marks_is_that_of_the_chunk_ids(microbatch):
    batch = padded(microbatch)
    marks = [
        np.where(starts, BEGINS, np.where(ids != NO_CHUNK, INSIDE, OUTSIDE)).astype(np.uint8)
        for ids, starts in (
            (batch.student_chunk_id, batch.student_is_chunk_start),
            (batch.teacher_chunk_id, batch.teacher_is_chunk_start),
        )
    ]
    marked = AlignmentBatch.from_marks(*marks)
    for field in fields(AlignmentBatch):
        own, expected = getattr(marked, field.name), getattr(batch, field.name)
        assert own == expected if not torch.is_tensor(own) else own.equal(expected), field.name


def test_marks_that_do_not_correspond_are_refused():
    both = np.array([[BEGINS, INSIDE, BEGINS]], np.uint8)
    with pytest.raises(AlignmentError, match=r"teacher's chunk ids leave a chunk out.* chunk 1"):
        AlignmentBatch.from_marks(both, np.array([[BEGINS]], np.uint8))
    with pytest.raises(AlignmentError, match=r"student's marks continue .*; got position 1"):
        AlignmentBatch.from_marks(np.array([[OUTSIDE, INSIDE]], np.uint8), both)


def test_chunk_ids_that_do_not_ascend_have_the_facts_of_their_numbers():
    ids = torch.tensor([[1, 0, -1, 1, 2, 0]]), torch.tensor([[2, 1, 0, 1]])
    batch = AlignmentBatch.from_chunk_ids(*ids)
    assert facts_of(batch) == slow_facts(*(side[0].tolist() for side in ids), lambda position: 0)


def test_chunks_are_undone_on_a_side_whatever_is_between_them():
    marks = np.array([OUTSIDE, BEGINS, OUTSIDE, INSIDE, BEGINS, BEGINS, INSIDE], np.uint8)
    undone = without_chunks(marks, np.array([True, False, True]))
    assert undone.tolist() == [OUTSIDE] * 4 + [BEGINS] + [OUTSIDE] * 2
    assert marks[1] == BEGINS
