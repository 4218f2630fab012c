"""The objective that is recommended, and the numbers that it rests on."""

import pytest

from megatron_ext.alignment import ChunkCounts
from megatron_ext.alignment.audit.coverage_row import CoverageRow, share_in_words
from megatron_ext.alignment.audit.pair_audit import recommend


def row(name, one_to_one, rest, *, one_to_one_bytes=None, many_to_many_bytes=0):
    chunks = one_to_one + rest
    return CoverageRow(
        name=name,
        counts=ChunkCounts(one_to_one=one_to_one, one_to_many=rest),
        student_tokens=chunks,
        teacher_tokens=chunks + rest,
        byte_count=4 * chunks,
        one_to_one_bytes=4 * one_to_one if one_to_one_bytes is None else one_to_one_bytes,
        many_to_many_bytes=many_to_many_bytes,
    )


@pytest.mark.parametrize(
    ("total", "numbers", "objective", "said"),
    [
        pytest.param(row("all", 900, 100), row("digits-3", 0, 200), "projected_kl",
                     "100.0% of the 200 chunks in numbers", id="numbers are split"),
        pytest.param(row("all", 900, 100), row("digits-2", 191, 9), "projected_kl",
                     "4.5% of the 200 chunks in numbers", id="numbers are alike"),
        pytest.param(row("all", 900, 100), row("digits-2", 0, 99), "projected_kl",
                     "90.0% of the 1,000 chunks are 1:1", id="too few numbers"),
        pytest.param(row("all", 499, 501), row("digits-3", 0, 200), "chunk_likelihood",
                     "49.9% of the bytes lie in them", id="few 1:1"),
        pytest.param(row("all", 900, 100, many_to_many_bytes=401), row("digits-3", 0, 200),
                     "chunk_likelihood", "10.0% of the bytes lie in n:m", id="much n:m"),
        pytest.param(row("all", 500, 500, many_to_many_bytes=400), row("digits-3", 0, 200),
                     "projected_kl", "50.0% of the bytes", id="at the thresholds"),
        pytest.param(row("all", 0, 0), row("digits-3", 0, 0), None, "no chunk", id="nothing"),
    ],
)  # fmt: skip
def test_the_objective_follows_from_the_counts(total, numbers, objective, said):
    advice = recommend(total, [row("letters", 10, 0), numbers], same_vocabulary=False)
    assert advice.objective == objective
    assert any(said in reason for reason in advice.reasons)


def test_the_same_tokenizer_needs_the_same_tokens_not_the_same_vocabulary_alone():
    alike = recommend(row("all", 10, 0), [], same_vocabulary=True)
    assert alike.objective == "kl"
    assert recommend(row("all", 10, 0), [], same_vocabulary=False).objective == "projected_kl"
    assert recommend(row("all", 9, 1), [], same_vocabulary=True).objective == "projected_kl"


def test_split_numbers_are_named_but_not_a_few_or_those_of_one_digit():
    split, few, single = (
        recommend(row("all", 10, 0), [row(name, 0, count)], same_vocabulary=False)
        for name, count in (("digits-2", 100), ("digits-2", 99), ("digits-1", 500))
    )
    assert "split numbers differently" in split.title
    for other in (few, single):
        assert not any("numbers" in text for text in (other.title, *other.reasons))


def test_what_has_not_been_measured_is_not_said_to_be():
    heavy = recommend(row("all", 1, 9), [], same_vocabulary=False)
    light = recommend(row("all", 9, 1), [], same_vocabulary=False)
    assert "compare runs" in heavy.reasons[-1]
    assert "in both of two seeds" in light.reasons[-1]


@pytest.mark.parametrize(
    ("share", "words"),
    [(0, "0.0%"), (1e-9, "<0.1%"), (0.0005, "0.1%"), (0.5, "50.0%"), (0.99949, "99.9%"),
     (0.9999999, ">99.9%"), (1, "100.0%")],
)  # fmt: skip
def test_a_share_is_none_or_all_only_where_it_is(share, words):
    assert share_in_words(share) == words
