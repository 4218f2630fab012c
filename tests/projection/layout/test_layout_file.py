"""Layouts on disk."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import ProjectionError
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import VocabularyLayout
from megatron_ext.projection.layout.packing import NOWHERE, filled, spread
from tests.projection.layout.random_pairs import random_pair


class Named:
    """As much of a tokenizer as a file is checked against."""

    def __init__(self, name):
        self._name = name

    def fingerprint(self):
        return self._name


@pytest.fixture
def layout():
    return VocabularyLayout.of(random_pair(7), rank_count=2, student_size=96, teacher_size=128)


def test_a_layout_is_read_as_it_was_written(layout, tmp_path):
    path = tmp_path / "layout.json"
    layout.save(path)
    student, teacher = Named("s7"), Named("t7")
    loaded = VocabularyLayout.load(path, student, teacher)
    assert loaded == layout
    assert loaded.metadata == {"student_fingerprint": "s7", "teacher_fingerprint": "t7"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["layout.json"]


@pytest.mark.parametrize(("student", "teacher"), [("s8", "t7"), ("s7", "s7")])
def test_a_layout_of_another_pair_is_not_loaded(layout, tmp_path, student, teacher):
    layout.save(tmp_path / "layout.json")
    with pytest.raises(ProjectionError, match="made for another"):
        VocabularyLayout.load(tmp_path / "layout.json", Named(student), Named(teacher))


def test_broken_files_are_refused(layout, tmp_path):
    path = tmp_path / "layout.json"
    layout.save(path)
    content = json.loads(path.read_text())
    ids = content["student"]["ids"]
    for text, message in (
        (path.read_text()[:-40], "cannot be read"),
        ("[]", "not a vocabulary layout that this version reads"),
        (json.dumps({**content, "format_version": 2}), "that this version reads"),
        (json.dumps({key: content[key] for key in content if key != "teacher"}), "not a complete"),
        (
            json.dumps({**content, "student": {"vocab_size": 90, "ids": [*ids[:-1], ids[0]]}}),
            "not a permutation",
        ),
    ):
        path.write_text(text)
        with pytest.raises(ProjectionError, match=message):
            VocabularyLayout.load(path)
    with pytest.raises(ProjectionError, match="cannot be read"):
        VocabularyLayout.load(tmp_path / "none.json")
    with pytest.raises(ProjectionError, match="cannot be written"):
        layout.save(tmp_path / "none" / "layout.json")


@pytest.mark.parametrize(
    ("count", "levels", "room", "expected"),
    [
        (4, [0, 0], [9, 9], [2, 2]),
        (5, [0, 0], [9, 9], [3, 2]),
        (5, [3, 0], [9, 9], [1, 4]),
        (5, [0, 0, 0], [1, 9, 9], [1, 2, 2]),
        (0, [2, 0], [0, 3], [0, 0]),
        (3, [2, 0], [0, 3], [0, 3]),
    ],
)
def test_levels_end_as_equal_as_room_allows(count, levels, room, expected):
    assert spread(count, levels=np.array(levels), room=np.array(room)).tolist() == expected


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6),
    st.floats(0, 1),
)
def test_everything_is_placed_and_no_room_overrun(ranks, share):
    levels, room = (np.array(column) for column in zip(*ranks, strict=True))
    count = round(share * int(room.sum()))
    shares = spread(count, levels=levels, room=room)
    assert shares.sum() == count
    assert ((shares >= 0) & (shares <= room)).all()
    open_ranks, used = shares < room, shares > 0
    if open_ranks.any() and used.any():
        ends = levels + shares
        assert ends[used].max() <= ends[open_ranks].min() + 1


def test_tokens_without_a_rank_fill_what_is_left_and_members_are_spread():
    rank = np.array([0, NOWHERE, NOWHERE, NOWHERE, NOWHERE, 1])
    full = filled(rank, capacity=np.array([3, 3]), members=np.array([2, 4]))
    assert full[[0, 5]].tolist() == [0, 1]
    assert sorted(full[[2, 4]].tolist()) == [0, 1]
    assert np.bincount(full).tolist() == [3, 3]


def dense(projection):
    array = np.zeros(projection.shape, np.float32)
    array[projection.entry_rows, projection.indices] = projection.values
    return array


@pytest.fixture
def projection():
    return random_pair(7)


@pytest.fixture
def cut_in_four(projection):
    return VocabularyLayout.of(projection, rank_count=2, student_size=96, teacher_size=128)


def test_a_permuted_projection_has_the_same_entries_elsewhere(projection, cut_in_four):
    permuted = projection.permuted(cut_in_four)
    student, teacher = cut_in_four.student.ids[:90], cut_in_four.teacher.ids[:120]
    assert np.array_equal(dense(permuted), dense(projection)[np.ix_(student, teacher)])
    assert np.array_equal(permuted.is_exact_row, projection.is_exact_row[student])
    assert permuted.vocab_sizes == projection.vocab_sizes
    assert projection.padded(96, 128).permuted(cut_in_four) == permuted


def test_the_common_block_of_each_rank_is_a_diagonal(projection, cut_in_four):
    matrix = dense(projection.permuted(cut_in_four).padded(96, 128))
    for rank, count in enumerate(cut_in_four.common_counts):
        block = matrix[rank * 48 : rank * 48 + count, rank * 64 : rank * 64 + count]
        assert np.array_equal(block, np.eye(count))
        assert count > 20


def test_a_permuted_partition_has_the_same_pairs(projection, cut_in_four):
    partition = projection.partition()
    permuted = partition.permuted(cut_in_four)
    assert np.array_equal(permuted.common_student, np.sort(permuted.common_student))
    pairs = np.stack(
        [
            cut_in_four.student.ids[permuted.common_student],
            cut_in_four.teacher.ids[permuted.common_teacher],
        ]
    )
    expected = np.stack([partition.common_student, partition.common_teacher])
    assert np.array_equal(pairs[:, np.argsort(pairs[0])], expected)
    for side, order in (("student", cut_in_four.student), ("teacher", cut_in_four.teacher)):
        rest = getattr(permuted, f"uncommon_{side}")
        back = np.sort(order.ids[rest])
        assert np.array_equal(back, getattr(partition, f"uncommon_{side}"))


def test_a_file_of_places_is_of_no_tokenizer(projection, cut_in_four, tmp_path):
    class Named:
        vocab_size = 90

        def fingerprint(self):
            return "s7"

    assert projection.metadata["student_fingerprint"] == "s7"
    projection.permuted(cut_in_four).save(tmp_path / "places.safetensors")
    with pytest.raises(ProjectionError, match="built for another student"):
        SparseProjection.load(tmp_path / "places.safetensors", student=Named())


def test_a_layout_of_another_pair_is_refused(cut_in_four):
    other = random_pair(8, students=91)
    for what in (other, other.partition()):
        with pytest.raises(ProjectionError, match="the vocabulary layout is of another pair"):
            what.permuted(cut_in_four)
