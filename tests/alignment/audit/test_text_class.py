"""Script and class of chunks."""

import unicodedata
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from megatron_ext.alignment import ChunkCounts
from megatron_ext.alignment.audit import document as module
from megatron_ext.alignment.audit.coverage_row import CoverageRow, share_in_words
from megatron_ext.alignment.audit.document import ChunkRanking, Example, pair_hashes
from megatron_ext.alignment.audit.pair_audit import recommend
from megatron_ext.alignment.audit.text_class import (
    DIGIT,
    LETTER,
    OTHER,
    SCRIPTS,
    SIGN,
    SPACE,
    TEXT_CLASSES,
    CharacterTable,
    TextClassifier,
)


def points(text):
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def classified(before, chunk, after="", documents=(0,)):
    """Script and class of ``chunk`` where it stands."""
    begin = np.array([len(before)])
    script, text_class = TextClassifier().classify(
        points(before + chunk + after), np.array(documents), begin, begin + len(chunk)
    )
    return SCRIPTS[script[0]], tuple(TEXT_CLASSES)[text_class[0]]


@pytest.mark.parametrize(
    ("before", "chunk", "after", "expected"),
    [
        pytest.param("a", " the", " b", "letters", id="space in front"),
        pytest.param("", "नमस्ते", "", "letters", id="vowel signs"),
        pytest.param("", "é", "", "letters", id="combining accent"),
        pytest.param("x ", "7", " y", "digits-1", id="one digit"),
        pytest.param("20", "1", "7", "digits-4+", id="one digit of four"),
        pytest.param("", "42", "", "digits-2", id="two digits"),
        pytest.param("1,", "234", ",5", "digits-3", id="between commas"),
        pytest.param("", "٢٠١", "", "digits-3", id="Arabic digits"),
        pytest.param("", "0123456789", "", "digits-4+", id="many digits"),
        pytest.param("a", ",", "b", "punctuation", id="comma"),
        pytest.param("", " $", "5", "punctuation", id="currency"),
        pytest.param("", "🤷🏽‍♀️", "", "punctuation", id="emoji with joiners"),
        pytest.param("a", "\n\n", "b", "whitespace", id="line feeds"),
        pytest.param("a", "  ", "b", "whitespace", id="two spaces inside a line"),
        pytest.param("a\n", " ", "b", "whitespace", id="one space begins a line"),
        pytest.param("a\n", "    ", "b", "code", id="indentation"),
        pytest.param("a", "\n   ", " b", "code", id="line feed and indentation"),
        pytest.param("a\n", "\t", "b", "code", id="tab"),
        pytest.param("a", "\t", "b", "whitespace", id="tab inside a line"),
        pytest.param("a ", "==", " b", "code", id="operator"),
        pytest.param("", "text", "_key", "code", id="part of snake case"),
        pytest.param("my", "Name", "", "code", id="part of camel case"),
        pytest.param("", "Name", "", "letters", id="capital alone"),
        pytest.param("", "HTML", "", "letters", id="capitals"),
        pytest.param("x_", "12", "", "digits-2", id="digits of an identifier"),
        pytest.param("", "v2", "", "mixed", id="letters and digits"),
        pytest.param("", ".append", "", "mixed", id="full stop and letters"),
        pytest.param("a", "\x00", "b", "other", id="control"),
    ],
)
def test_class_of_a_chunk(before, chunk, after, expected):
    assert classified(before, chunk, after)[1] == expected


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        (" the", "Latin"),
        ("naïve", "Latin"),
        ("мир", "Cyrillic"),
        ("日本", "Han"),
        ("日本の", "several scripts"),
        ("カー", "Katakana"),
        ("12, ", "Common"),
        ("🤷", "Common"),
        ("ᚠᚢ", "other scripts"),
        ("नमस्ते", "Devanagari"),
        ("xж", "several scripts"),
    ],
)
def test_script_of_a_chunk(chunk, expected):
    assert classified("", chunk)[0] == expected


def test_runs_end_with_their_document():
    # Three documents: "20", "17" and "x".
    text = points("2017x")
    _, classes = TextClassifier().classify(
        text, np.array([0, 2, 4]), np.array([0, 2, 4]), np.array([2, 4, 5])
    )
    assert [tuple(TEXT_CLASSES)[c] for c in classes] == ["digits-2", "digits-2", "letters"]
    assert classified("a", "B", documents=(0, 1))[1] == "letters"
    assert classified("a", "  ", "b", documents=(0, 1))[1] == "code"


def test_every_chunk_of_many_is_classified_by_itself():
    text = "a 12 ß 日本 == 🤷\n    return my_name, 2017;\t३४"
    code_points = points(text)
    rng = np.random.default_rng(0)
    cuts = np.unique(rng.integers(0, len(text) + 1, 20))
    cuts = np.unique(np.concatenate([[0], cuts, [len(text)]]))
    script, classes = TextClassifier().classify(code_points, np.array([0]), cuts[:-1], cuts[1:])
    for number, (begin, end) in enumerate(pairwise(cuts)):
        alone = classified(text[:begin], text[begin:end], text[end:])
        assert (SCRIPTS[script[number]], tuple(TEXT_CLASSES)[classes[number]]) == alone


def test_kind_of_every_character_follows_its_category():
    every = np.arange(0x110000, dtype=np.uint32)
    every = every[(every < 0xD800) | (every > 0xDFFF)][::97]
    scripts, kinds = CharacterTable().look_up(every)
    assert set(kinds.tolist()) <= {DIGIT, LETTER, SPACE, SIGN, OTHER}
    for point, kind in zip(every.tolist(), kinds.tolist(), strict=True):
        category = unicodedata.category(chr(point))
        assert (kind == DIGIT) == (category == "Nd")
        assert (kind == SPACE) == chr(point).isspace()
    looked_up_again = CharacterTable()
    looked_up_again.look_up(every[::2])
    again, _ = looked_up_again.look_up(every)
    assert np.array_equal(again, scripts)


def example_of(keys):
    return lambda j: Example((), (), str(keys[j]), "", "", "corpus:1")


def fed(blocks):
    """Low-coverage chunks of blocks of keys, each of which has its own size."""
    found = ChunkRanking.none()
    for keys in blocks:
        array = np.array(keys, np.uint64)
        found.add(array, (array % np.uint64(7) + np.uint64(3)).astype(np.int64), example_of(keys))
    return found


def blocks_of_keys():
    rng = np.random.default_rng(3)
    return [rng.zipf(1.3, 400).clip(max=2000).tolist() for _ in range(30)]


def test_the_leaders_of_all_blocks_are_ranked_with_their_counts_and_examples():
    blocks = blocks_of_keys()
    counts = Counter(key for block in blocks for key in block)
    found = fed(blocks)
    assert found.are_exact
    tokens = {key: n * (key % 7 + 3) for key, n in counts.items()}
    best = sorted(tokens, key=lambda key: (-tokens[key], key))[: module.LISTED]
    listed = found.by_tokens()
    assert [int(one.example.text) for one in listed] == best
    assert [(one.count, one.tokens) for one in listed] == [(counts[k], tokens[k]) for k in best]
    longest = sorted(counts, key=lambda key: (-(key % 7 + 3), -counts[key], key))
    listed = found.by_size()
    assert [int(one.example.text) for one in listed] == longest[: module.LISTED]


def test_what_is_forgotten_makes_counts_bounds_but_not_of_the_leaders(monkeypatch):
    blocks = blocks_of_keys()
    exact = fed(blocks).by_tokens()[:5]
    monkeypatch.setattr(module, "MOST_TRACKED", 200)
    bounded = fed(blocks)
    assert not bounded.are_exact
    assert len(bounded._hashes) <= 200
    assert bounded.by_tokens()[:5] == exact


def test_no_chunk_is_no_offender():
    found = ChunkRanking.none()
    found.add(np.zeros(0, np.uint64), np.zeros(0, np.int64), example_of([]))
    assert found.by_tokens() == found.by_size() == []


def test_the_hash_tells_the_ids_of_both_sides_and_their_order():
    ids = np.array([5, 6, 7, 5, 6, 6, 5, 0, 5], np.int32)
    spans = np.array([[0, 2], [3, 5], [5, 7], [0, 3], [7, 9], [8, 9], [1, 2]], np.int32)
    same = np.repeat([[0, 1]], len(spans), axis=0).astype(np.int32)
    hashes = pair_hashes(ids, spans, ids, same)
    assert hashes[0] == hashes[1]
    assert len(set(hashes.tolist())) == len(spans) - 1
    swapped = pair_hashes(ids, same, ids, spans)
    # The span of one token is the same on both sides.
    assert np.flatnonzero(hashes == swapped).tolist() == [5]
    assert pair_hashes(ids, spans, ids, same).tolist() == hashes.tolist()


def row(name, one_to_one, rest, *, shorter=0, one_to_one_bytes=None, many_to_many_bytes=0):
    chunks = one_to_one + rest + shorter
    return CoverageRow(
        name=name,
        counts=ChunkCounts(one_to_one=one_to_one, one_to_many=rest, many_to_one=shorter),
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
        pytest.param(row("all", 499, 501), row("digits-3", 0, 200), "projected_kl",
                     "49.9% of the bytes lie in them", id="few 1:1"),
        pytest.param(row("all", 800, 99, shorter=101), row("digits-3", 0, 200), "byte_prefix",
                     "10.1% are n:1", id="shorter tokens"),
        pytest.param(row("all", 800, 100, shorter=100), row("digits-3", 0, 200), "projected_kl",
                     "80.0% of the 1,000 chunks are 1:1", id="at the threshold"),
        pytest.param(row("all", 600, 201, shorter=199), row("digits-3", 0, 200), "projected_kl",
                     "60.0% of the 1,000 chunks are 1:1", id="longer ones too"),
        pytest.param(row("all", 0, 0), row("digits-3", 0, 0), None, "no chunk", id="nothing"),
    ],
)  # fmt: skip
def test_the_objective_follows_from_the_counts(total, numbers, objective, said):
    advice = recommend(total, [row("letters", 10, 0), numbers], same_vocabulary=False)
    assert advice.objective == objective
    assert any(said in reason for reason in advice.reasons)


def test_the_same_tokenizer_needs_the_same_tokens_not_the_same_vocabulary_alone():
    alike = recommend(row("all", 10, 0), [], same_vocabulary=True)
    assert alike.objective == "vocab_kl"
    assert recommend(row("all", 10, 0), [], same_vocabulary=False).objective == "projected_kl"
    assert recommend(row("all", 9, 1), [], same_vocabulary=True).objective == "projected_kl"


def test_the_option_for_repeats_is_named_where_there_are_some():
    few, enough = (
        recommend(row("all", 900, 100), [], same_vocabulary=False, repeats=count)
        for count in (0, 1)
    )
    assert not any("repeat_weight" in reason for reason in few.reasons)
    assert "0.1% of the chunks" in enough.reasons[-1]
    assert "repeat_weight" in enough.reasons[-1]


def test_split_numbers_are_named_but_not_a_few_or_those_of_one_digit():
    split, few, single = (
        recommend(row("all", 10, 0), [row(name, 0, count)], same_vocabulary=False)
        for name, count in (("digits-2", 100), ("digits-2", 99), ("digits-1", 500))
    )
    assert "split numbers differently" in split.title
    for other in (few, single):
        assert not any("numbers" in text for text in (other.title, *other.reasons))


@pytest.mark.parametrize(
    ("total", "is_measured"),
    [
        (row("all", 43, 57), True),
        (row("all", 42, 58), False),
        (row("all", 90, 10, many_to_many_bytes=20), True),
        (row("all", 90, 10, many_to_many_bytes=21), False),
        (row("all", 5, 0, shorter=95), True),
        (row("all", 5, 0, shorter=95, many_to_many_bytes=21), False),
    ],
)
def test_what_has_not_been_measured_is_not_said_to_be(total, is_measured):
    advice = recommend(total, [], same_vocabulary=False)
    assert ("compare runs" in advice.reasons[-1]) is not is_measured
    assert ("learned more from it" in advice.reasons[-1]) is is_measured


@pytest.mark.parametrize(
    ("share", "words"),
    [(0, "0.0%"), (1e-9, "<0.1%"), (0.0005, "0.1%"), (0.5, "50.0%"), (0.99949, "99.9%"),
     (0.9999999, ">99.9%"), (1, "100.0%")],
)  # fmt: skip
def test_a_share_is_none_or_all_only_where_it_is(share, words):
    assert share_in_words(share) == words
