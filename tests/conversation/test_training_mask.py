"""A token is trained when all of it is, and a first word is when only white space goes before."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.conversation import Provenance, Rendered, Span
from megatron_ext.conversation.masking.trained_part import trained_tokens
from megatron_ext.conversation.message import byte_offsets

TEMPLATE = Provenance("template")
USER = Provenance("message", 0, "content")
ANSWER = Provenance("message", 1, "content")


def masked(
    pieces: list[tuple[str, Provenance]], tokens: list[str], empty_at: int | None = None
) -> list[str]:
    """Tokens that are trained when every character from the answer is."""
    ends = list(accumulate(len(text) for text, _ in pieces))
    spans = [
        Span(end - len(text), end, place) for (text, place), end in zip(pieces, ends, strict=True)
    ]
    text = "".join(text for text, _ in pieces)
    assert "".join(tokens) == text
    byte_ends = np.cumsum([len(token.encode()) for token in tokens])
    ranges = [(span.start, span.end) for span in spans if span.provenance is ANSWER]
    trained = trained_tokens(Rendered(text, tuple(spans), False), ranges, byte_ends)
    return [token for token, flag in zip(tokens, trained.tolist(), strict=True) if flag]


CASES: dict[str, tuple[list[tuple[str, Provenance]], list[str], list[str]]] = {
    "whole tokens": (
        [("Q:", TEMPLATE), ("yes", ANSWER), (".", TEMPLATE)],
        ["Q:", "ye", "s", "."],
        ["ye", "s"],
    ),
    "a token that ends in the next turn": ([("a", ANSWER), ("b", USER)], ["ab"], []),
    "a token shared with the question": ([("hi ", USER), ("there", ANSWER)], ["hi", " there"], []),
    "a first word after a space of the template": (
        [("[/INST] ", TEMPLATE), ("Hello you", ANSWER)],
        ["[/INST]", " Hello", " you"],
        [" Hello", " you"],
    ),
    "white space shared with the template": (
        [("assistant\n", TEMPLATE), ("\n\nHello", ANSWER)],
        ["assistant", "\n\n\n", "Hello"],
        ["Hello"],
    ),
    "a word shared with the template": ([("to", TEMPLATE), ("day", ANSWER)], ["today"], []),
    "characters of several bytes": (
        [("é👍", USER), ("é👍", ANSWER), ("é", TEMPLATE)],
        ["é", "👍", "é", "👍", "é"],
        ["é", "👍"],
    ),
    "empty tokens go with what follows": (
        [("a", TEMPLATE), ("b", ANSWER), ("c", TEMPLATE)],
        ["", "a", "", "b", "", "c", ""],
        ["", "b"],
    ),
    "nothing trained": ([("a", TEMPLATE)], ["a"], []),
}


@pytest.mark.parametrize(("pieces", "tokens", "expected"), CASES.values(), ids=CASES)
def test_tokens_are_trained_by_where_their_bytes_lie(
    pieces: list[tuple[str, Provenance]], tokens: list[str], expected: list[str]
) -> None:
    assert masked(pieces, tokens) == expected


def test_no_tokens_and_no_ranges_give_no_mask() -> None:
    rendered = Rendered("", (), False)
    assert trained_tokens(rendered, [], np.array([], np.int64)).tolist() == []


@given(
    st.lists(st.tuples(st.text("ab é", min_size=1, max_size=4), st.booleans()), max_size=6),
    st.lists(st.integers(1, 4), max_size=12),
)
def test_the_mask_is_the_one_that_a_loop_over_bytes_gives(
    pieces: list[tuple[str, bool]], lengths: list[int]
) -> None:
    text = "".join(piece for piece, _ in pieces)
    flags = [flag for piece, flag in pieces for _ in piece.encode()]
    ends = [min(end, len(flags)) for end in accumulate(lengths)]
    ends = [*ends, len(flags)]
    chars = list(accumulate((len(piece) for piece, _ in pieces), initial=0))
    # Text of the user throughout, so that no first word is excused.
    spans = tuple(
        Span(start, end, ANSWER if flag else USER)
        for start, end, (_, flag) in zip(chars, chars[1:], pieces, strict=False)
    )
    ranges = [(span.start, span.end) for span in spans if span.provenance is ANSWER]
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    trained = trained_tokens(Rendered(text, spans, False), merged, np.array(ends))
    begins = [0, *ends[:-1]]
    for begin, end, flag in zip(begins, ends, trained.tolist(), strict=True):
        covered = flags[begin:end] or flags[begin : begin + 1]
        assert flag == (bool(covered) and all(covered))


@given(st.text())
def test_byte_offsets_are_those_of_the_encoding(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    expected = [len(text[:index].encode()) for index in range(len(text) + 1)]
    assert byte_offsets(text).tolist() == expected


@pytest.mark.parametrize(
    ("between", "trained"),
    [
        ((".\n\n", TEMPLATE), ["Yes", "..\n\n"]),
        (("\n", TEMPLATE), ["Yes", ".\n"]),
        ((" .", TEMPLATE), ["Yes"]),
        (("\n\n", USER), ["Yes"]),
    ],
)
def test_an_answer_s_end_with_white_space_of_the_template_is_the_model_s(
    between: tuple[str, Provenance], trained: list[str]
) -> None:
    text, source = between
    own = text.lstrip(".") if text[0] == "." else text
    answer = "Yes." + text[: len(text) - len(own)]
    pieces = [(answer, ANSWER), (own, source), ("q", TEMPLATE)]
    assert masked(pieces, ["Yes", answer[3:] + own, "q"]) == trained
