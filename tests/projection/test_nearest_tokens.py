import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import ProjectionError
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.nearest_tokens import NearestTokens
from tests.projection.greedy_tokenizer import GreedyTokenizer


def distance(one, other):
    """Edit distance by the whole table."""
    row = list(range(len(other) + 1))
    for at, byte in enumerate(one, 1):
        last, row[0] = row[0], at
        for column, second in enumerate(other, 1):
            last, row[column] = (
                row[column],
                min(row[column] + 1, row[column - 1] + 1, last + (byte != second)),
            )
    return row[-1]


def definition(tokens, token):
    def rank(pair):
        same = 0
        while same < min(len(pair[1]), len(token)) and pair[1][same] == token[same]:
            same += 1
        return distance(pair[1], token), -same, pair[0]

    return min(tokens, key=rank)[0]


WORDS = st.text("abc", min_size=1, max_size=20).map(str.encode)


@given(st.lists(WORDS, min_size=1, max_size=30, unique=True), st.lists(WORDS, max_size=5))
def test_the_nearest_token_is_that_of_the_definition(words, asked):
    tokens = [(7 * at % 31, word) for at, word in enumerate(words)]
    search = NearestTokens(tokens)
    for token in asked:
        assert search.nearest(token) == definition(tokens, token)


@given(
    st.lists(st.binary(min_size=1, max_size=70), min_size=1, max_size=12, unique=True),
    st.binary(min_size=1, max_size=64),
)
def test_tokens_of_any_bytes_and_of_up_to_64_are_compared(words, token):
    tokens = list(enumerate(words))
    assert NearestTokens(tokens).nearest(token) == definition(tokens, token)


def test_exact_tokens_come_first_and_of_equals_the_longest_beginning():
    search = NearestTokens([(3, b"cat"), (1, b"bats"), (2, b"bat"), (5, b"ba")])
    assert search.nearest(b"bat") == 2
    # bat and ba are one away from bar, and bats from bas too.
    assert search.nearest(b"bar") == 2
    assert search.nearest(b"bas") == 1
    # cat begins like car; bat, as far from tat, does not.
    assert search.nearest(b"car") == 3
    assert search.nearest(b"cab") == 3


def test_a_token_beyond_the_word_gets_the_longest_that_it_begins_with():
    search = NearestTokens([(0, b" "), (1, b" " * 32), (2, b"x" * 65)])
    assert search.nearest(b" " * 80) == 1
    assert search.nearest(b"y" * 65) is None
    assert search.nearest(b" " * 63) == 1
    assert NearestTokens([]).nearest(b"a") is None


def test_mined_maps_every_token_to_one():
    student = GreedyTokenizer([b"a", b"b", b"cab", b"cabs", b"dabs"])
    teacher = GreedyTokenizer([b"b", b"cab", b"d", b"a"])
    projection = SparseProjection.from_tokenizers(student, teacher, method="mined")
    assert projection.indices.tolist() == [3, 0, 1, 1, 1]
    assert projection.values.tolist() == [1.0] * 5
    assert projection.is_exact_row.tolist() == [True, True, True, False, False]
    with pytest.raises(ProjectionError, match="keeps at one; got method mined with reverse_pass"):
        SparseProjection.from_tokenizers(student, teacher, method="mined", reverse_pass=True)
