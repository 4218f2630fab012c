"""The byte table and ids of many texts in one buffer, against slow loops."""

import pickle
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers import TokenBytes
from megatron_ext.tokenizers.engine.gigatoken_engine import flat_ids, interleave, join
from megatron_ext.tokenizers.token_bytes import byte_of_character, character_starts, settle_ends

ROWS = [b"a", b" b", None, b"", b"\xf0\x9f", b" ", b"\x99\x82", None]
TABLE = TokenBytes.from_tokens(ROWS)
IDS = st.lists(st.integers(0, len(ROWS) - 1), max_size=20)


def test_the_byte_alphabet_is_the_one_of_the_tokenizers_library():
    table = byte_of_character()
    assert sorted(table.values()) == list(range(256))
    assert sorted(table) == sorted(pre_tokenizers.ByteLevel.alphabet())
    for byte in range(0x80):
        ((character, _),) = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        ).pre_tokenize_str(chr(byte))
        assert table[character] == byte


def test_the_flat_buffer_holds_every_row():
    assert len(TABLE) == len(ROWS)
    assert [TABLE[i] for i in range(len(ROWS))] == ROWS
    begins, ends = TABLE.offsets[:-1], TABLE.offsets[1:]
    assert [TABLE.buffer[a:b].tobytes() for a, b in zip(begins, ends, strict=True)] == [
        row or b"" for row in ROWS
    ]
    assert TABLE.is_control.tolist() == [row is None for row in ROWS]


@given(IDS)
def test_join_and_byte_ends_are_those_of_a_loop(ids):
    array = TABLE.as_ids(ids)
    rows = [ROWS[i] or b"" for i in ids]
    assert TABLE.join(array).tobytes() == b"".join(rows)
    assert TABLE.byte_ends(array).tolist() == np.cumsum([len(row) for row in rows]).tolist()


@given(IDS, st.sampled_from(["first", "each"]))
def test_dummy_prefixes_are_those_of_a_loop(ids, dummy_prefix):
    at, expected, fresh, seen = 0, [], True, False
    for i in ids:
        row = ROWS[i]
        if row is None:
            fresh = True
        else:
            dropped = fresh and row.startswith(b" ") and not (dummy_prefix == "first" and seen)
            at += len(row) - dropped
            fresh, seen = False, True
        expected.append(at)
    assert TABLE.byte_ends(TABLE.as_ids(ids), dummy_prefix).tolist() == expected


@given(IDS, st.binary(max_size=3))
def test_ends_within_asks_for_the_very_bytes(ids, other):
    array = TABLE.as_ids(ids)
    joined = TABLE.join(array).tobytes()
    assert TABLE.ends_within(array, joined).tolist() == TABLE.byte_ends(array).tolist()
    if joined.startswith(b" "):
        ends = TABLE.ends_within(array, joined[1:])
        assert ends.tolist() == np.maximum(TABLE.byte_ends(array) - 1, 0).tolist()
    if other and other != b" ":
        assert TABLE.ends_within(array, joined + other) is None


@pytest.mark.parametrize("ids", [[-1], [0, len(ROWS)], [2**40]], ids=["negative", "over", "wide"])
def test_ids_outside_the_table_are_refused(ids):
    with pytest.raises(TokenizerError, match=f"expected 0 to {len(ROWS) - 1}"):
        TABLE.as_ids(ids)


@given(st.text(max_size=30))
def test_character_starts_are_those_of_a_loop(text):
    expected = np.cumsum([0, *(len(character.encode()) for character in text)])
    assert character_starts(text.encode()).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("spans", "pieces", "text", "ends"),
    [
        ([], [], b"abc", []),
        ([(0, 2), (2, 4)], [b"AB", b"CD"], b"abcd", [2, 4]),
        ([(0, 4), (0, 4)], [b"\xf0\x9f", b"\x99\x82"], "🙂".encode(), [2, 4]),
        ([(0, 0), (0, 0), (0, 4)], [b"\xf0", b"\x9f", b"\x99\x82"], "🙂".encode(), [1, 2, 4]),
        ([(0, 0), (0, 4), (0, 4)], [b" ", b"\xf0\x9f", b"\x99\x82"], "🙂".encode(), [0, 2, 4]),
        ([(0, 3), (0, 3)], [b"x", b"y"], b"abc", [0, 3]),
        ([(0, 2), (2, 4), (3, 4)], [b"a", b"b", b"c"], b"xyzw", [2, 2, 4]),
        ([(0, 2), (3, 5)], [b"ab", b"cd"], b"ab cd", [2, 5]),
        ([(0, 1), (3, 4)], [b"e", b"x"], "e\u0301x".encode(), [3, 4]),
        ([(0, 3), (2, 2), (4, 99)], [b"", b"", b""], b"abc e", [3, 3, 5]),
        ([(0, 3), (9, 99)], [b"", b""], b"abcde", [5, 5]),
        ([(0, 1)], [b"a"], b"a   ", [4]),
    ],
    ids=[
        "empty",
        "as-reported",
        "shared-character",
        "last-byte-has-the-span",
        "own-dummy-prefix",
        "the-last-covers-what-pieces-do-not-spell",
        "the-last-with-a-part-in-it-covers-that",
        "white-space-goes-forward",
        "composed-mark-goes-back",
        "clipped-and-monotone",
        "begins-after-the-end",
        "trailing-space",
    ],
)
def test_reported_spans_are_settled(spans, pieces, text, ends):
    assert settle_ends(spans, pieces, text) == ends


LONG_ROWS = [b"a", b"ab", b" ab", b"abcdefgh", b"abcdefghi", b"abcdefghijklmnop", b"z" * 40, b""]
LONG_ROWS += [b" ", b" " * 9]
LONG_TABLE = TokenBytes.from_tokens(LONG_ROWS)


@st.composite
def tokenized_texts(draw):
    """Texts and ids that spell them, but for a byte changed, added, lost, or a space in front."""
    rows, texts = [], []
    for ids in draw(st.lists(st.lists(st.integers(0, len(LONG_ROWS) - 1), max_size=6), max_size=5)):
        text = bytearray(b"".join(LONG_ROWS[i] for i in ids))
        change = draw(st.sampled_from(["none", "prefix", "changed", "added", "lost"]))
        at = draw(st.integers(0, max(len(text) - 1, 0)))
        if change == "prefix" and text[:1] == b" ":
            del text[0]
        elif change == "changed" and text:
            text[at] ^= 1
        elif change == "added":
            text[at:at] = b"?" * draw(st.integers(1, 20))
        elif change == "lost" and text:
            del text[at:]
        rows.append(ids)
        texts.append(bytes(text))
    return rows, texts


@given(tokenized_texts())
def test_texts_of_a_batch_are_judged_and_located_as_each_alone(batch):
    rows, texts = batch
    ids = LONG_TABLE.as_ids([i for row in rows for i in row])
    offsets = np.cumsum([0, *map(len, rows)])
    ends, bad = LONG_TABLE.ends_within_each(ids, offsets, texts)
    joined, bad_joined = LONG_TABLE.ends_within_joined(ids, offsets, texts)
    expected = [
        LONG_TABLE.ends_within(LONG_TABLE.as_ids(row), text)
        for row, text in zip(rows, texts, strict=True)
    ]

    assert bad == bad_joined == [i for i, alone in enumerate(expected) if alone is None]
    begin = 0
    for index, (alone, text) in enumerate(zip(expected, texts, strict=True)):
        if alone is not None:
            own = slice(offsets[index], offsets[index + 1])
            assert ends[own].tolist() == alone.tolist()
            assert joined[own].tolist() == (alone + begin).tolist()
        begin += len(text)


def test_a_table_is_sent_without_what_is_quicker_to_make_again():
    copy = pickle.loads(pickle.dumps(LONG_TABLE))
    ids, offsets = LONG_TABLE.as_ids([4, 6]), np.array([0, 2])

    assert copy.ends_within_each(ids, offsets, [LONG_ROWS[4] + LONG_ROWS[6]])[1] == []
    assert len(pickle.dumps(copy)) == len(pickle.dumps(TokenBytes.from_tokens(LONG_ROWS)))


ROW = st.lists(st.integers(0, 2**31 - 1), max_size=4)
ROWS_OF_IDS = st.lists(ROW, max_size=8)


def rows_of(flat):
    ids, offsets = flat
    assert (ids.dtype, offsets.dtype) == (np.int32, np.int64)
    assert offsets[0] == 0
    assert offsets[-1] == len(ids)
    return [ids[begin:end].tolist() for begin, end in pairwise(offsets)]


@given(ROWS_OF_IDS)
def test_rows_come_back_from_one_buffer(rows):
    assert rows_of(flat_ids(rows)) == rows


@given(st.lists(ROWS_OF_IDS, min_size=1, max_size=4))
def test_joined_parts_are_their_rows_in_order(parts):
    assert rows_of(join([flat_ids(rows) for rows in parts])) == list(chain(*parts))


def test_one_part_is_not_copied():
    part = flat_ids([[1, 2], [3]])
    assert join([part])[0] is part[0]


@given(st.lists(st.tuples(st.booleans(), ROW), max_size=12))
def test_rows_set_aside_return_to_their_places(rows):
    aside = [i for i, (is_aside, _) in enumerate(rows) if is_aside]
    rest = flat_ids([row for is_aside, row in rows if not is_aside])
    apart = flat_ids([rows[i][1] for i in aside])
    assert rows_of(interleave(rest, apart, aside)) == [row for _, row in rows]
