"""Whatever is done with tracked text, JSON too, each character remembers where it came from."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.conversation.rendering.provenance import TEMPLATE, UNKNOWN, Provenance
from megatron_ext.conversation.rendering.tracked_data import JsonStyle, to_json, tracked_copy
from megatron_ext.conversation.rendering.tracked_text import (
    EMPTY,
    TrackedText,
    as_tracked,
    join,
    track,
)

PLACES = [TEMPLATE, *(Provenance("message", index, "content") for index in range(3))]
ALPHABET = "ab \n\tß-<İé👍"

texts = st.lists(st.tuples(st.text(ALPHABET, max_size=6), st.sampled_from(PLACES)), max_size=5).map(
    lambda pieces: join([track(text, place) for text, place in pieces])
)


def places(text: str) -> list[Provenance]:
    """Provenance of each character."""
    tracked = as_tracked(text)
    assert sum(length for length, _ in tracked.runs) == len(tracked)
    return [place for length, place in tracked.runs for _ in range(length)]


def marked(text: str) -> list[tuple[str, Provenance]]:
    """Each character with its provenance."""
    return list(zip(str.__str__(text), places(text), strict=True))


@given(
    texts,
    st.integers(-8, 8) | st.none(),
    st.integers(-8, 8) | st.none(),
    st.sampled_from([None, 1, 2, -1, -2]),
)
def test_a_slice_keeps_the_places_of_its_characters(
    text: TrackedText, start: int | None, stop: int | None, step: int | None
) -> None:
    assert marked(text[start:stop:step]) == marked(text)[start:stop:step]


@given(texts)
def test_iteration_and_indexing_give_the_same_characters(text: TrackedText) -> None:
    assert [marked(character) for character in text] == [
        marked(text[index]) for index in range(len(text))
    ]
    assert "".join(text) == text


@given(st.lists(texts, max_size=4), texts)
def test_joining_keeps_every_place(pieces: list[TrackedText], separator: TrackedText) -> None:
    expected: list[tuple[str, Provenance]] = []
    for index, piece in enumerate(pieces):
        expected += [*(marked(separator) if index else []), *marked(piece)]
    assert marked(separator.join(pieces)) == expected


@given(texts, texts, st.integers(-1, 3))
def test_sums_and_products_keep_every_place(a: TrackedText, b: TrackedText, times: int) -> None:
    assert marked(a + b) == marked(a) + marked(b)
    assert marked(a * times) == marked(a) * times


CUTS: dict[str, Callable[[Any], Any]] = {
    "strip": lambda text: text.strip(),
    "strip characters": lambda text: text.strip("ab "),
    "lstrip": lambda text: text.lstrip("\n "),
    "rstrip": lambda text: text.rstrip(),
    "removeprefix": lambda text: text.removeprefix("a"),
    "removesuffix": lambda text: text.removesuffix("b"),
    "removesuffix of nothing": lambda text: text.removesuffix(""),
    "split": lambda text: text.split(),
    "split once": lambda text: text.split(None, 1),
    "split at a text": lambda text: text.split("a"),
    "split once at a text": lambda text: text.split("a", 1),
    "rsplit": lambda text: text.rsplit(None, 1),
    "rsplit at a text": lambda text: text.rsplit(" ", 1),
    "partition": lambda text: text.partition("a"),
    "rpartition": lambda text: text.rpartition("a"),
    "splitlines": lambda text: text.splitlines(),
    "splitlines with ends": lambda text: text.splitlines(True),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@given(text=texts)
def test_pieces_are_those_of_a_string_and_keep_their_places(
    cut: Callable[[Any], Any], text: TrackedText
) -> None:
    pieces = cut(text)
    assert pieces == cut(str.__str__(text))
    pieces = [pieces] if isinstance(pieces, str) else pieces
    found = 0
    for piece in filter(None, pieces):
        while marked(text[found : found + len(piece)]) != marked(piece):
            found += 1
            assert found + len(piece) <= len(text)
        found += len(piece)


@given(texts, st.sampled_from(["a", " ", "ab", ""]), texts, st.integers(-1, 3))
def test_a_replacement_keeps_its_own_places(
    text: TrackedText, old: str, new: TrackedText, count: int
) -> None:
    count_given = count
    expected: list[tuple[str, Provenance]] = []
    done = 0
    while count != 0:
        at = str.__str__(text).find(old, done)
        if at < 0 or (not old and at > len(text)):
            break
        # Nothing is found before each character, and once more at the end.
        stop = at + len(old) if old else at + 1
        expected += marked(text)[done:at] + marked(new) + ([] if old else marked(text)[at:stop])
        done, count = stop, count - 1
    expected += marked(text)[done:]
    assert marked(text.replace(old, new, count_given)) == expected


@given(texts, st.sampled_from(["upper", "lower", "capitalize", "title", "swapcase", "casefold"]))
def test_a_change_of_case_keeps_places_or_gives_them_up(text: TrackedText, change: str) -> None:
    changed = getattr(text, change)()
    assert changed == getattr(str.__str__(text), change)()
    if len(changed) == len(text):
        assert places(changed) == places(text)
    else:
        assert set(places(changed)) in ({UNKNOWN}, set(places(text)))


def test_a_letter_that_becomes_two_keeps_its_place() -> None:
    text = track("aß", PLACES[0]) + track("ßb", PLACES[1])
    assert marked(text.upper()) == [
        *((letter, PLACES[0]) for letter in "ASS"),
        *((letter, PLACES[1]) for letter in "SSB"),
    ]


@pytest.mark.parametrize("plain_first", [False, True], ids=["tracked first", "plain first"])
def test_a_plain_string_is_of_unknown_source(plain_first: bool) -> None:
    text = track("ab", PLACES[1])
    total = "xy" + text if plain_first else text + "xy"
    assert isinstance(total, TrackedText)
    assert places(total) == ([UNKNOWN] * 2 + [PLACES[1]] * 2)[:: 1 if plain_first else -1]


def test_text_behaves_as_a_string() -> None:
    text = track("ab", PLACES[1])
    assert {text: 1}["ab"] == 1
    assert str(text) is text
    assert isinstance(str.__str__(text), str)
    assert not isinstance(str.__str__(text), TrackedText)
    assert track("", PLACES[1]) is EMPTY


FORMS: dict[str, tuple[str, Any]] = {
    "one value": ("<%s>", "V"),
    "two values": ("%s, %s!", ("V", "V")),
    "by name": ("%(a)s and %(b)s", {"a": "V", "b": "V"}),
    "a number": ("%d%% of %s", (3, "V")),
    "a width": ("%5s|%-4s|%.1s", ("V", "V", "V")),
    "a representation": ("%r", "V"),
}


@pytest.mark.parametrize(("form", "values"), FORMS.values(), ids=FORMS)
def test_percent_formatting_keeps_the_places_of_values(form: str, values: Any) -> None:
    def filled(value: Any) -> Any:
        if isinstance(values, tuple):
            return tuple(value if item == "V" else item for item in values)
        return dict.fromkeys(values, value) if isinstance(values, dict) else value

    own, content = TEMPLATE, PLACES[2]
    result = track(form, own) % filled(track("xyz", content))
    assert result == form % filled("xyz")
    for character, place in marked(result):
        assert place == (content if character in "xyz" else own) or character in " '"


def test_a_star_width_gives_up_the_places() -> None:
    result = track("%*s", TEMPLATE) % (5, track("x", PLACES[1]))
    assert (result, set(places(result))) == ("    x", {UNKNOWN})


CONTENT = Provenance("message", 1, "content")
CALLS = Provenance("message", 1, "tool_calls")

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
styles = st.fixed_dictionaries(
    {
        "ensure_ascii": st.booleans(),
        "indent": st.sampled_from([None, 0, 2, "\t"]),
        "separators": st.sampled_from([None, (",", ":"), ("; ", "= ")]),
        "sort_keys": st.booleans(),
    }
)


@given(values, styles)
def test_it_is_what_json_dumps_writes(value: Any, style: dict[str, Any]) -> None:
    expected = json.dumps(value, **style)
    tracked = tracked_copy(value, CALLS)
    assert to_json(tracked, JsonStyle.of(**style), TEMPLATE) == expected
    assert to_json(value, JsonStyle.of(**style), TEMPLATE) == expected


@given(values)
def test_what_comes_whole_from_a_message_is_the_message_s(value: Any) -> None:
    tracked = tracked_copy([value], CALLS)
    text = to_json(tracked, JsonStyle(), TEMPLATE)
    assert {(place.source, place.message) for _, place in text.runs} == {("message", 1)}


def test_punctuation_of_the_template_s_own_containers_is_the_template_s() -> None:
    text = to_json({"say": track('a"é', CONTENT), "n": 1}, JsonStyle(), TEMPLATE)
    assert text == '{"say": "a\\"é", "n": 1}'
    assert [(length, place.source) for length, place in text.runs] == [
        (len('{"say": '), "template"),
        (len('"a\\"é"'), "message"),
        (len(', "n": 1}'), "template"),
    ]


def test_a_text_of_two_places_keeps_both() -> None:
    text = to_json(join([track("a\n", TEMPLATE), track("b", CONTENT)]), JsonStyle(), TEMPLATE)
    assert text == '"a\\nb"'
    assert [(length, place.source) for length, place in text.runs] == [
        (4, "template"),
        (1, "message"),
        (1, "template"),
    ]


@pytest.mark.parametrize("keys", [{1: "a", False: "b"}, {None: 0, 2.5: 1}], ids=str)
def test_keys_that_are_no_text_are_written_as_json_dumps_does(keys: dict[Any, Any]) -> None:
    assert to_json(keys, JsonStyle(), TEMPLATE) == json.dumps(keys)


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        to_json({"a": object()}, JsonStyle(), TEMPLATE)
