"""The tree of covers gives what all sequences of tokens together give to a text."""

import itertools
import zlib
from functools import cache

import numpy as np
import pytest

from megatron_ext.errors import DataError
from megatron_ext.evaluation.byte_tree import END, ByteTree, ByteVocabulary

TOKENS = [b"a", b"b", b"ab", b"ba", b"aab", None, None, b"a", b"\xff"]
"""Two ids of the same bytes, one that is no text, and the last byte."""
STOP = 5
PROMPT = [STOP]


def table(ids):
    """A model whose next token depends on all before."""
    return _table(bytes(ids))


@cache
def _table(ids):
    draws = np.random.default_rng(zlib.crc32(ids))
    return draws.dirichlet(np.full(len(TOKENS), 0.7))


def tree(**options):
    return ByteTree(ByteVocabulary(TOKENS, [STOP]), table, PROMPT, **options)


def begins_with(text, ids=tuple(PROMPT), weight=1.0):
    """Probability of all sequences whose bytes begin with a text, by trying every token."""
    if not text:
        return weight
    total = 0.0
    for token, spelled in enumerate(TOKENS):
        if spelled and spelled.startswith(text):
            total += weight * table(ids)[token]
        elif spelled and text.startswith(spelled):
            rest = text[len(spelled) :]
            total += begins_with(rest, (*ids, token), weight * table(ids)[token])
    return total


def is_text(text, ids=tuple(PROMPT), weight=1.0):
    """Probability of all sequences that spell a text and end there."""
    if not text:
        return weight * table(ids)[STOP]
    spelled = ((token, it) for token, it in enumerate(TOKENS) if it and text.startswith(it))
    return sum(
        is_text(text[len(it) :], (*ids, token), weight * table(ids)[token]) for token, it in spelled
    )


TEXTS = [bytes(text) for n in range(5) for text in itertools.product(b"ab\xff", repeat=n)]


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_next_bytes_are_those_of_all_sequences(text):
    found = tree()
    for byte in text:
        found.read(byte)
    assert found.lost == 0
    sums = np.array([begins_with(text + bytes([byte])) for byte in range(END)] + [is_text(text)])
    np.testing.assert_allclose(found.next_bytes(), sums / sums.sum(), rtol=1e-12, atol=0)


def test_what_is_left_out_is_counted():
    text, left_out = b"aababbaabab", []
    for prune, beam in ((0.0, None), (0.02, None), (0.0, 2), (0.3, 1)):
        whole, found = tree(), tree(prune=prune, beam=beam)
        for byte in text:
            whole.read(byte)
            found.read(byte)
        # Of two distributions, one of which lacks a share of the other's weight.
        distance = np.abs(whole.next_bytes() - found.next_bytes()).sum() / 2
        assert distance <= found.lost + 1e-12
        left_out.append(found.lost)
    assert left_out[0] == 0 < left_out[1] < left_out[3] < 1
    assert left_out[2] > 0


def test_the_beam_holds_where_every_reading_is_unlikely():
    asked = []

    def uniform(ids):
        asked.append(ids)
        return np.full(50, 1 / 50)

    alike = ByteTree(ByteVocabulary([b"a"] * 50, []), uniform, PROMPT, prune=0.5, beam=2)
    alike.read(ord("a"))
    assert len(asked) == 1 + 2
    # Two are followed, and two wait.
    assert alike.lost == pytest.approx(48 / 50)


def test_a_byte_that_no_token_has_is_refused():
    with pytest.raises(DataError, match="0x63"):
        tree().read(ord("c"))


def test_a_model_that_expects_no_text_is_refused():
    vocabulary = ByteVocabulary([b"a", None], [])
    silent = ByteTree(vocabulary, lambda ids: np.array([0.0, 1.0]), [1])
    with pytest.raises(DataError, match="neither a byte nor the end"):
        silent.next_bytes()
