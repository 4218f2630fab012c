from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.errors import LossError
from megatron_ext.losses import LOSS_REGISTRY, RepeatTable
from megatron_ext.losses.vocabulary_match import IdTable
from megatron_ext.projection.projection_matrix import ProjectionMatrix
from tests.losses.microbatch import Microbatch
from tests.losses.objective_cases import inputs_of, with_repeats

STUDENT = [b"a", b"\n", b"\n\n", b"\n\n\n", b"--", b"----", b"ab", b"\n", b"b"]
TEACHER = [None, b"\n", b"a", b"b", b"--"]


def matrix(rows):
    """Each row its columns, with even shares."""
    pointers = np.cumsum([0, *map(len, rows)])
    columns = np.array([column for row in rows for column in row], dtype=np.int32)
    shares = np.array([1 / len(row) for row in rows for _ in row], dtype=np.float32)
    return ProjectionMatrix(
        indptr=pointers, indices=columns, values=shares, shape=(len(rows), len(TEACHER))
    )


def table():
    own = [*STUDENT[:7], None, STUDENT[8]]
    rows = [[2], [1], [1], [1], [4], [4], [2, 3], [1], [3]]
    return RepeatTable.from_token_bytes(matrix(rows), own, TEACHER)


def batch_of(student, teacher, own, its, **bounds):
    alignment = AlignmentBatch.from_chunk_ids(
        torch.tensor([student]), torch.tensor([teacher]), **bounds
    )
    return table().of_batch(alignment, torch.tensor([own]), torch.tensor([its]))


def test_members_are_the_copies_of_a_teacher_token_in_order():
    found = table()
    assert found.members == {1: {1: 1, 2: 2, 3: 3}, 4: {1: 4, 2: 5}}
    assert found.copies == {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (4, 1), 5: (4, 2)}
    # The second line feed is emitted in no text; ``ab`` is no copy, and ``a`` has none.
    assert 7 not in found.copies


def test_a_label_is_compared_up_to_the_row_behind_its_chunk():
    # a, two line feeds, b: the teacher's rows 1 and 2 write the line feeds, row 3 the b.
    found = batch_of([0, 1, 2], [0, 1, 1, 2], [0, 2, 8], [2, 1, 1, 3])
    repeats = found.repeats
    assert found.chunk.tolist() == [1]
    assert repeats.student_row.tolist() == [1]
    assert repeats.member.tolist() == [[1, 2, 3]]
    assert repeats.reached.tolist() == [[0, 1, 2]]
    assert repeats.teacher_row.tolist() == [2, 3]
    assert repeats.teacher_token.tolist() == [1, 1]
    assert repeats.step.tolist() == [[0, 1]]


def test_a_row_behind_the_chunk_without_a_label_is_not_read():
    # So the last row of a text is, beside others in one row.
    repeats = batch_of([0, 1, 2], [0, 1, 1, 2], [0, 2, 8], [2, 1, 1, IGNORE_INDEX]).repeats
    assert repeats.reached.tolist() == [[0, 1, -1]]
    assert repeats.teacher_row.tolist() == [2]


def test_the_last_row_of_a_sample_has_none_behind_it():
    alignment = AlignmentBatch.from_chunk_ids(
        torch.tensor([[0, 1], [2, 3]]), torch.tensor([[0, 1], [2, 3]])
    )
    labels = torch.tensor([[8, 1], [8, 0]]), torch.tensor([[3, 1], [3, 2]])
    # One line feed, and no row that says whether another follows: nothing to compare.
    assert not len(table().of_batch(alignment, *labels).chunk)


@pytest.mark.parametrize(
    ("student", "teacher", "own", "its"),
    [
        ([0, 1, 2], [0, 1, 1, 2], [0, 0, 8], [2, 1, 1, 3]),
        ([0, 1, 2], [0, 1, 1, 2], [0, 2, 8], [2, 1, 3, 3]),
        ([0, 1, 2], [0, 1, 2, 2], [0, 2, 8], [2, 1, 1, 3]),
        ([0, 1, 1], [0, 1, 1, -1], [0, 2, 2], [2, 1, 1, 3]),
        ([0, -1, 1], [0, -1, -1, 1], [0, 2, 8], [2, 1, 1, 3]),
        ([0, 1, 2], [0, 1, 1, 2], [0, IGNORE_INDEX, 8], [2, 1, 1, 3]),
    ],
    ids=[
        "no copy",
        "another text",
        "fewer teacher tokens than copies",
        "two tokens of the student",
        "no chunk",
        "no label",
    ],
)
def test_other_rows_are_left_out(student, teacher, own, its):
    assert not len(batch_of(student, teacher, own, its).chunk)


def test_chunks_with_other_bytes_are_left_out():
    found = batch_of(
        [0, 1, 2],
        [0, 1, 1, 2],
        [0, 2, 8],
        [2, 1, 1, 3],
        is_exact=torch.tensor([True, False, True]),
    )
    assert not len(found.chunk)


def test_ids_become_places_and_padding_stays():
    found = batch_of([0, 1, 2, 3], [0, 1, 1, 2, 3], [0, 2, 4, 8], [2, 1, 1, 4, 3])
    assert found.repeats.member.tolist() == [[1, 2, 3], [4, 5, -1]]
    student = IdTable(torch.tensor([8, 7, 6, 5, 4, 3, 2, 1, 0]))
    teacher = IdTable(torch.tensor([4, 3, 2, 1, 0]))
    moved = found.by_place(student, teacher).repeats
    assert moved.member.tolist() == [[7, 6, 5], [4, 3, -1]]
    assert moved.teacher_token.tolist() == [3, 3, 0]
    assert torch.equal(moved.reached, found.repeats.reached)


def test_labels_outside_the_vocabulary_are_refused():
    with pytest.raises(LossError, match="outside the vocabulary"):
        batch_of([0], [0], [9], [1])


def test_the_term_is_added_with_its_weight_and_told_apart():
    inputs = with_repeats(Microbatch.random(batch=16), (0, 0))
    rows = len(inputs.completions.chunk)
    assert rows > 1
    joined = LOSS_REGISTRY["projected_kl"]()(inputs)
    split = LOSS_REGISTRY["projected_kl"](repeat_weight=0.25)(inputs)
    total, count = split.metrics["repeats"]
    assert count == rows
    added = split.loss_sum - joined.loss_sum
    torch.testing.assert_close(added, 0.25 * total, rtol=1e-4, atol=1e-5)
    assert "repeats" not in joined.metrics


def test_it_needs_the_rows_of_its_alignment():
    objective = LOSS_REGISTRY["projected_kl"](repeat_weight=1.0)
    with pytest.raises(LossError, match="needs RepeatRows as completions; got none"):
        objective(inputs_of(Microbatch.random(), (0, 0)))
    few, more = (with_repeats(Microbatch.random(batch=size), (0, 0)) for size in (2, 3))
    with pytest.raises(LossError, match="of another alignment"):
        objective(replace(few, completions=more.completions))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeat_weight": -1.0}, "is negative"),
        ({"repeat_weight": 1.0, "numerics": "nemo"}, "have no term for repeats"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(LossError, match=message):
        LOSS_REGISTRY["projected_kl"](**options)
