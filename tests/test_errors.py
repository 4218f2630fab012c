import pickle
from pathlib import Path

import pytest

from megatron_ext import errors
from megatron_ext.errors import (
    DataError,
    MegatronExtError,
    MissingDependencyError,
    counted,
    printable,
    refused_by_system,
)

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, MegatronExtError)
]


def test_the_text_says_where_what_got_expected_and_fix_in_one_line():
    error = MegatronExtError(
        "the key is wrong", where="run.yaml:3", got="a\nb", expected=0, fix="mend it"
    )
    assert str(error) == "run.yaml:3: the key is wrong; got a b; expected 0; mend it"


@pytest.mark.parametrize(
    "text",
    [
        "\x1b]0;title\x07",
        "\x9b2J",
        "\r over it",
        "\u202egnp.exe",
        "\u2066\u061c",
        "\ud800",
        "\x00" * 9000,
        "word " * 9000,
    ],
    ids=["title", "C1", "return", "order", "isolates", "surrogate", "many", "long"],
)
def test_a_terminal_shows_a_text_and_does_not_obey_it(text):
    shown = str(MegatronExtError("it failed", got=text, fix="mend it"))
    assert shown.isprintable()
    assert len(shown) <= 2000
    assert shown.startswith("it failed; got ")
    assert shown.endswith("; mend it")


def test_text_of_any_script_is_shown_as_it_is():
    text = "naïve Ελληνικά हिन्दी 日本語 👩‍👩‍👧 \u00a0\u3000"
    assert printable(text) == text
    assert "[... 1,100 characters ...]" in printable("a" * 3000)


def test_one_thing_is_counted_in_the_singular():
    counts = [counted(1, "row"), counted(0, "row"), counted(2000, "row"), counted(2, "microbatch")]
    assert counts == ["1 row", "0 rows", "2,000 rows", "2 microbatches"]


def test_parts_that_are_not_given_leave_no_trace():
    assert str(MegatronExtError("it failed")) == "it failed"


@pytest.mark.parametrize("value", [0, "", False, 0.0], ids=repr)
def test_a_false_value_is_still_shown(value):
    assert str(MegatronExtError("it failed", got=value)) == f"it failed; got {value}"


def test_a_missing_package_says_what_to_install():
    error = MissingDependencyError("tiktoken", extra="tiktoken", feature="this tokenizer")
    assert isinstance(error, ImportError)
    assert 'pip install "megatron-ext[tiktoken]"' in str(error)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_reaches_another_process_with_its_text(kind):
    error = (
        kind("torch", extra="train", feature="training")
        if kind is MissingDependencyError
        else kind("it failed", got=3)
    )
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)


def test_an_error_of_the_system_is_said_in_one_line_and_others_stay(tmp_path):
    absent = tmp_path / "absent"
    with (
        pytest.raises(DataError, match="absent: it cannot be read; got No such file"),
        refused_by_system("it cannot be read", where=absent),
    ):
        absent.read_bytes()
    with pytest.raises(ValueError, match="embedded null"), refused_by_system("it cannot be read"):
        Path("\0").read_bytes()
