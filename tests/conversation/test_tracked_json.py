"""JSON with places is the JSON of the standard library."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.conversation.rendering.provenance import TEMPLATE, Provenance
from megatron_ext.conversation.rendering.tracked_data import JsonStyle, to_json, tracked_copy
from megatron_ext.conversation.rendering.tracked_text import join, track

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
