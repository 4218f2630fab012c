"""What a logged completion says of the surprise of both models, piece by piece."""

import math

import pytest
import torch

from megatron_ext.training.surprise import Surprise, TeacherSurprise, surprise_record

NO = -1
TOKENS = [b"a", "é".encode()[:1], "é".encode()[1:], b" ", b"bcd", b"e"]
"""Sampled tokens, of which the third ends a character and the fourth is not trained."""


def surprise(*, first=1, of_teacher=True):
    """Predictions of ``TOKENS`` and a stop token, behind ``first`` positions of a prompt."""
    nan = math.nan
    student = [*[nan] * first, -1.0, -2.0, -3.0, nan, -4.0, -math.inf, -0.5, nan]
    chunks = [*[NO] * first, 0, 1, 2, NO, 3, 4, 5, NO]
    # A chunk of two of the teacher's tokens, and one whose order is not that of positions.
    teacher_chunks = [NO, 0, 0, 1, 2, 3, 4, 5]
    log_probs = [nan, -0.25, -0.5, -7.0, -0.125, -2.0, -1.0, -0.75]
    teacher = TeacherSurprise(
        torch.tensor(log_probs) if of_teacher else None,
        torch.tensor(chunks),
        torch.tensor(teacher_chunks),
    )
    return Surprise(torch.tensor(student), {"t": teacher})


@pytest.mark.parametrize("first", [0, 1, 5])
def test_pieces_are_chunks_that_spell_whole_characters(first):
    record = surprise_record(surprise(first=first), TOKENS, first=first, stop="</s>")["t"]
    assert record["pieces"] == [
        ["a", 1.0, 0.75],
        ["é", 5.0, 7.125],
        [" ", None, None],
        ["bcd", 4.0, 2.0],
        # JSON has no infinity.
        ["e", None, 1.0],
        ["</s>", 0.5, 0.75],
    ]
    # Bytes of text in pieces that have both; the stop token has none.
    assert (record["bytes"], record["student"], record["teacher"]) == (6, 10.5, 10.625)


def test_targets_without_the_labels_are_said_to_be():
    record = surprise_record(surprise(of_teacher=False), TOKENS, first=1, stop=None)["t"]
    assert "log-probabilities" in record["missing"]
    assert "teacher" not in record
    assert [piece[1:] for piece in record["pieces"]][:2] == [[1.0, None], [5.0, None]]
    assert [piece[0] for piece in record["pieces"]] == ["a", "é", " ", "bcd", "e"]


def test_a_chunk_around_an_untrained_token_is_one_piece():
    teacher = TeacherSurprise(
        torch.tensor([-1.0, -1.0]), torch.tensor([0, NO, 0]), torch.tensor([0, 0])
    )
    given = Surprise(torch.tensor([-1.0, math.nan, -1.0]), {"t": teacher})
    record = surprise_record(given, [b"x", b" ", b"y"], first=0, stop=None)["t"]
    assert record["pieces"] == [["x y", None, 2.0]]
    assert (record["bytes"], record["student"], record["teacher"]) == (0, 0.0, 0.0)


def test_the_pieces_of_a_long_completion_are_cut_and_its_sums_are_not():
    count = 1000
    chunks = torch.arange(count)
    teacher = TeacherSurprise(torch.full((count,), -0.5), chunks, chunks)
    given = Surprise(torch.full((count,), -1.0), {"t": teacher})
    record = surprise_record(given, [b"x"] * count, first=0, stop=None)["t"]
    assert len(record["pieces"]) == count - record["more_pieces"] == 512
    assert (record["bytes"], record["student"], record["teacher"]) == (1000, 1000.0, 500.0)
