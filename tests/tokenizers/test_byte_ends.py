"""Where tokens end in a text: the property that alignment stands on, for every library."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_ext.errors import TokenizerError
from tests.tokenizers.tokenizer_files import BYTE_EXACT, MAKERS, MANY, SPACE_EXACT

FRAGMENTS = st.sampled_from(
    [
        *(" ", "  ", "\n", "\u3000", "\x00", "\u200d", "the", " the", "▁", "<0x0A>"),
        *("<s>", "</s>", "<|end|>", "[INST]", "é", "e\u0301", "\u212b", "ﬁ", "Ⅷ", "İ", "ß"),
        *("🙂", "👩\u200d👩\u200d👧", "世界", "\u1112\u1161\u11ab", "१२३"),
    ]
)
TEXTS = st.one_of(st.text(max_size=40), st.lists(FRAGMENTS, max_size=12).map("".join))


def spans(text: str, ends: np.ndarray) -> list[bytes]:
    raw = text.encode()
    return [raw[begin:end] for begin, end in pairwise([0, *ends])]


@pytest.mark.parametrize("parse_special", [False, True], ids=["as-text", "parse-special"])
@pytest.mark.parametrize("name", MAKERS)
@MANY
@given(text=TEXTS)
@example(text="a\n\n  b\u0301 🙂 ")
def test_ends_are_monotone_and_reach_the_end_of_any_text(tokenizer, name, parse_special, text):
    ids, ends = tokenizer(name).encode_with_byte_ends(text, parse_special=parse_special)
    assert ids.dtype == np.int32
    assert ends.dtype == np.int64
    assert ids.shape == ends.shape
    assert (np.diff(ends, prepend=0) >= 0).all()
    if len(ids):
        assert ends[-1] == len(text.encode())
    if not parse_special:
        assert ids.tolist() == tokenizer(name).tokenize(text)


@pytest.mark.parametrize("name", BYTE_EXACT)
@MANY
@given(text=TEXTS)
def test_byte_level_spans_are_the_bytes_of_the_tokens(tokenizer, name, text):
    ids, ends = tokenizer(name).encode_with_byte_ends(text)
    assert spans(text, ends) == [tokenizer(name).token_bytes(i) for i in ids]
    assert tokenizer(name).byte_ends(ids).tolist() == ends.tolist()
    assert tokenizer(name).detokenize(ids.tolist()) == text


@pytest.mark.parametrize("name", SPACE_EXACT)
@MANY
@given(text=TEXTS)
def test_metaspace_spans_are_the_bytes_of_the_tokens_after_the_dummy_prefix(tokenizer, name, text):
    text = text.replace("▁", "_")
    ids, ends = tokenizer(name).encode_with_byte_ends(text)
    of_tokens = [tokenizer(name).token_bytes(i) for i in ids]
    if of_tokens:
        assert of_tokens[0][:1] == b" "
        of_tokens[0] = of_tokens[0][1:]
    assert spans(text, ends) == of_tokens
    assert tokenizer(name).byte_ends(ids).tolist() == ends.tolist()
    assert tokenizer(name).detokenize(ids.tolist()) == text


@pytest.mark.parametrize("name", MAKERS)
def test_an_empty_text_has_no_tokens(tokenizer, name):
    ids, ends = tokenizer(name).encode_with_byte_ends("")
    assert (ids.tolist(), ends.tolist()) == ([], [])
    assert tokenizer(name).tokenize("") == []
    assert tokenizer(name).detokenize([]) == ""
    assert tokenizer(name).byte_ends([]).tolist() == []


@pytest.mark.parametrize("name", MAKERS)
def test_a_lone_surrogate_is_refused_with_its_place(tokenizer, name):
    library = tokenizer(name)._tokenizer
    for encode in (
        library.text_to_ids,
        library.encode_with_byte_ends,
        lambda text: library.text_to_ids_batch(["fine", text]),
    ):
        with pytest.raises(TokenizerError, match=r"character 3.*U\+D83D"):
            encode("abc\ud83d")


@pytest.mark.parametrize("name", MAKERS)
def test_a_batch_gives_the_ids_of_each_text(tokenizer, name):
    texts = ["the parser", "", "  two\nlines 🙂", "世界"]
    batch = tokenizer(name)._tokenizer.text_to_ids_batch(texts)
    assert [row.tolist() for row in batch] == [tokenizer(name).tokenize(text) for text in texts]
    assert {row.dtype for row in batch} == {np.dtype(np.int32)}
    assert tokenizer(name)._tokenizer.text_to_ids_batch([]) == []
    ids, offsets = tokenizer(name).text_to_flat_ids(texts)
    assert (ids.dtype, offsets.dtype) == (np.int32, np.int64)
    assert [ids[a:b].tolist() for a, b in pairwise(offsets)] == [row.tolist() for row in batch]
    empty, none = tokenizer(name).text_to_flat_ids([])
    assert (empty.tolist(), none.tolist()) == ([], [0])


def test_an_emoji_cut_into_bytes_keeps_its_bytes_apart_beside_composed_letters(tokenizer):
    text = "cafe\u0301 \U0001f9ff"
    ids, ends = tokenizer("huggingface-nfc").encode_with_byte_ends(text)
    parts = spans(text, ends)
    of_tokens = [tokenizer("huggingface-nfc").token_bytes(i) for i in ids]
    space = next(i for i, token in enumerate(of_tokens) if token.startswith(b" "))
    assert parts[space:] == of_tokens[space:]
    assert len(parts[space:]) > 1
    # The combining mark goes with the letter that it was composed into.
    assert b"".join(parts[:space]) == "cafe\u0301".encode()


def test_byte_fallback_pieces_are_one_byte_each_beside_normalised_text(tokenizer):
    text = "ﬁt \U0001f9ff"
    ids, ends = tokenizer("sentencepiece-nfkc-bytes").encode_with_byte_ends(text)
    assert np.diff(ends)[-3:].tolist() == [1, 1, 1]
    assert tokenizer("sentencepiece-nfkc-bytes").token_bytes(ids[-1]) == "\U0001f9ff".encode()[-1:]


def test_a_literal_metaspace_in_the_text_counts_its_own_three_bytes(tokenizer):
    for name in SPACE_EXACT:
        _, ends = tokenizer(name).encode_with_byte_ends("a▁▁b")
        assert ends[-1] == 8
        assert 1 in ends.tolist()


def test_lower_cased_words_end_where_they_end_in_the_text(tokenizer):
    text = "The PARSER, the Café"
    _, ends = tokenizer("huggingface-wordpiece").encode_with_byte_ends(text)
    words = {text[:end].encode() for end in (3, 10, 11, 15)}
    assert words <= {text.encode()[:end] for end in ends}


@pytest.mark.parametrize("name", MAKERS)
def test_the_character_of_each_token_is_where_its_bytes_begin(tokenizer, name):
    text = "The parser, the café 🙂"
    ids, ends = tokenizer(name).encode_with_byte_ends(text)
    offsets = tokenizer(name).offsets(ids.tolist(), text)
    begins = [0, *ends[:-1].tolist()]
    assert offsets == [len(text.encode()[:at].decode(errors="ignore")) for at in begins]
    assert tokenizer(name).offsets([], "") == []
