"""Texts that a published tokenizer changes (lower case, accents), in a batch with others."""

from __future__ import annotations

import pytest

from megatron_ext import TokenAligner
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.training.cross_tokenizer.aligning.text_aligner import TextAligner
from tests.conversation.shared_files import SHARED, needs_shared
from tests.training.cross_tokenizer.aligning.test_text_aligner import ids_of
from tests.training.cross_tokenizer.readers import student_tokenizer

TEXTS = [
    "plain text",
    "e\N{COMBINING ACUTE ACCENT}te\N{COMBINING ACUTE ACCENT} and more",
    "हिन्दी में क\N{DEVANAGARI SIGN NUKTA}ानून",
    "",
    " ",
    "Ünïcödé ÀÉ",
    "tail\N{COMBINING ACUTE ACCENT}",
    "plain again",
]


@needs_shared
@pytest.mark.parametrize("is_student", [True, False])
def test_a_text_that_is_changed_moves_none_of_its_neighbours(is_student: bool) -> None:
    model = str(SHARED / "tokenizers" / "bert_uncased")
    normalising = build_tokenizer(TokenizerConfig(model=model, engine="reference"))
    student, teacher = student_tokenizer(), normalising
    if is_student:
        student, teacher = teacher, student
    reference = TokenAligner(student, teacher)

    for text, aligned in zip(TEXTS, TextAligner(student, [teacher]).align(TEXTS), strict=True):
        expected, (own,) = reference.align(text), aligned.teachers
        ends = student.encode_with_byte_ends(text)[1]
        assert aligned.student_ids.tolist() == student.text_to_ids(text)
        assert aligned.student_widths.cumsum().tolist() == ends.tolist()
        assert ids_of(own.student_marks) == expected.student_chunk_id.tolist()
        assert ids_of(own.teacher_marks) == expected.teacher_chunk_id.tolist()
