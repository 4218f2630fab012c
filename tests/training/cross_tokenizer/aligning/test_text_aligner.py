from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext import TokenAligner
from megatron_ext.constants import NO_CHUNK
from megatron_ext.training.cross_tokenizer.aligning.text_aligner import TextAligner
from megatron_ext.training.cross_tokenizer.cut import cut
from tests.training.cross_tokenizer.readers import TEXTS, student_tokenizer, teacher_tokenizer

texts = st.lists(
    st.sampled_from(TEXTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    max_size=5,
)


@cache
def aligner() -> TextAligner:
    return TextAligner(student_tokenizer(), [teacher_tokenizer(), student_tokenizer()])


@settings(deadline=None, max_examples=60)
@given(texts)
def test_a_batch_is_aligned_as_each_of_its_texts(texts: list[str]) -> None:
    reference = TokenAligner(student_tokenizer(), teacher_tokenizer())

    for text, aligned in zip(texts, aligner().align(texts), strict=True):
        expected, (teacher, same) = reference.align(text), aligned.teachers
        assert aligned.student_ids.tolist() == student_tokenizer().text_to_ids(text)
        assert teacher.ids.tolist() == teacher_tokenizer().text_to_ids(text)
        assert teacher.student_chunk_id.tolist() == expected.student_chunk_id.tolist()
        assert teacher.teacher_chunk_id.tolist() == expected.teacher_chunk_id.tolist()
        assert same.student_chunk_id.tolist() == list(range(len(aligned.student_ids)))
        assert aligned.byte_count == len(text.encode())


@settings(deadline=None, max_examples=60)
@given(texts, st.integers(1, 40), st.integers(1, 40))
def test_pieces_fit_and_are_the_text_in_order_but_for_what_is_dropped(
    texts: list[str], student_capacity: int, teacher_capacity: int
) -> None:
    capacities = [student_capacity, teacher_capacity, student_capacity]
    for text in aligner().align(["".join(texts)]):
        pieces = cut(text, capacities)
        for piece in pieces:
            assert all(n <= most for n, most in zip(piece.token_counts, capacities, strict=True))
            assert _chunks(piece.teachers[0]) == _chunks(piece.teachers[0], is_teacher=True)
        taken = [i for piece in pieces for i in piece.student_ids.tolist()]
        rest = iter(text.student_ids.tolist())
        assert all(i in rest for i in taken)
        if min(capacities) >= 20 and text.student_ids.size:
            assert sum(piece.byte_count for piece in pieces) == text.byte_count
            assert taken == text.student_ids.tolist()
            assert [piece.is_end for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def _chunks(teacher: Any, *, is_teacher: bool = False) -> list[int]:
    ids = teacher.teacher_chunk_id if is_teacher else teacher.student_chunk_id
    found: list[int] = np.unique(ids[ids != NO_CHUNK]).tolist()
    assert found == list(range(len(found)))
    return found


def test_a_tokenizer_that_has_no_token_for_a_text_leaves_its_neighbours_alone() -> None:
    class Deaf:
        """It hears no spaces alone, as BERT's does."""

        def __getattr__(self, name: str) -> Any:
            return getattr(teacher_tokenizer(), name)

        def text_to_flat_ids(self, texts: list[str]) -> Any:
            rows = [teacher_tokenizer().text_to_ids(text) if text.strip() else [] for text in texts]
            ids = np.array([i for row in rows for i in row], np.int32)
            return ids, np.cumsum([0, *map(len, rows)])

        def encode_with_byte_ends(self, text: str) -> Any:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)

    deaf: Any = Deaf()
    words = ["some words", "  ", "others here"]
    found = TextAligner(student_tokenizer(), [deaf]).align(words)
    swapped = TextAligner(deaf, [student_tokenizer()]).align(words)

    for index in (0, 2):
        expected = TokenAligner(student_tokenizer(), teacher_tokenizer()).align(words[index])
        ids = found[index].teachers[0].student_chunk_id.tolist()
        assert ids == expected.student_chunk_id.tolist()
        assert swapped[index].teachers[0].teacher_chunk_id.tolist() == ids
        assert swapped[index].byte_count == len(words[index])
    assert found[1].teachers[0].student_chunk_id.tolist() == [NO_CHUNK]
    assert found[1].teachers[0].ids.size == swapped[1].student_ids.size == 0
