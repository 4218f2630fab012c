from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext import TokenAligner
from megatron_ext.alignment.chunk_places import BEGINS, OUTSIDE
from megatron_ext.constants import NO_CHUNK
from megatron_ext.data.aligner import TextAligner, cut
from tests.data.readers import TEXTS, student_tokenizer, teacher_tokenizer

texts = st.lists(
    st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    max_size=5,
)


@cache
def aligner():
    return TextAligner(student_tokenizer(), [teacher_tokenizer(), student_tokenizer()])


@settings(deadline=None, max_examples=60)
@given(texts)
def test_a_batch_is_aligned_as_each_of_its_texts(texts):
    reference = TokenAligner(student_tokenizer(), teacher_tokenizer())
    for text, aligned in zip(texts, aligner().align(texts), strict=True):
        expected, (teacher, same) = reference.align(text), aligned.teachers
        assert aligned.student_ids.tolist() == student_tokenizer().text_to_ids(text)
        assert teacher.ids.tolist() == teacher_tokenizer().text_to_ids(text)
        assert ids_of(teacher.student_marks) == expected.student_chunk_id.tolist()
        assert ids_of(teacher.teacher_marks) == expected.teacher_chunk_id.tolist()
        assert same.student_marks.tolist() == [BEGINS] * len(aligned.student_ids)
        assert aligned.byte_count == len(text.encode())


@settings(deadline=None, max_examples=60)
@given(texts, st.integers(1, 40), st.integers(1, 40))
def test_pieces_fit_and_are_the_text_in_order_but_for_what_is_dropped(
    texts, student_capacity, teacher_capacity
):
    capacities = [student_capacity, teacher_capacity, student_capacity]
    for text in aligner().align(["".join(texts)]):
        pieces = cut(text, capacities)
        for piece in pieces:
            assert all(n <= most for n, most in zip(piece.token_counts, capacities, strict=True))
            own, its = piece.teachers[0].student_marks, piece.teachers[0].teacher_marks
            assert np.count_nonzero(own == BEGINS) == np.count_nonzero(its == BEGINS)
            for marks in (own, its):
                assert marks[marks != OUTSIDE][:1].tolist() in ([], [BEGINS])
        taken = [i for piece in pieces for i in piece.student_ids.tolist()]
        rest = iter(text.student_ids.tolist())
        assert all(i in rest for i in taken)
        if min(capacities) >= 20 and text.student_ids.size:
            assert sum(piece.byte_count for piece in pieces) == text.byte_count
            assert taken == text.student_ids.tolist()
            assert [piece.is_end for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def ids_of(marks):
    """The chunk ids that marks stand for, counted from 0."""
    ids = np.where(marks == OUTSIDE, NO_CHUNK, np.cumsum(marks >= BEGINS) - 1).tolist()
    return ids


def test_a_tokenizer_that_has_no_token_for_a_text_leaves_its_neighbours_alone():
    class Deaf:
        """It hears no spaces alone, as BERT's does."""

        def __getattr__(self, name):
            return getattr(teacher_tokenizer(), name)

        def text_to_flat_ids(self, texts):
            rows = [teacher_tokenizer().text_to_ids(text) if text.strip() else [] for text in texts]
            ids = np.array([i for row in rows for i in row], np.int32)
            return ids, np.cumsum([0, *map(len, rows)])

        def encode_with_byte_ends(self, text):
            return np.zeros(0, np.int32), np.zeros(0, np.int64)

    deaf = Deaf()
    words = ["some words", "  ", "others here"]
    found = TextAligner(student_tokenizer(), [deaf]).align(words)
    swapped = TextAligner(deaf, [student_tokenizer()]).align(words)
    for index in (0, 2):
        expected = TokenAligner(student_tokenizer(), teacher_tokenizer()).align(words[index])
        marks = found[index].teachers[0].student_marks
        assert ids_of(marks) == expected.student_chunk_id.tolist()
        assert swapped[index].teachers[0].teacher_marks.tolist() == marks.tolist()
        assert swapped[index].byte_count == len(words[index])
    assert found[1].teachers[0].student_marks.tolist() == [OUTSIDE]
    assert found[1].teachers[0].ids.size == swapped[1].student_ids.size == 0
