"""Script and class of chunks."""

import unicodedata
from itertools import pairwise

import numpy as np
import pytest

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
