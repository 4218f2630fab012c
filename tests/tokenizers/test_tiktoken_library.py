"""tiktoken vocabularies: which id every token has, special tokens of the user's among them."""

import base64
import pickle
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers import TOKENIZER_LIBRARIES, MegatronTokenizer
from megatron_ext.tokenizers.libraries import tiktoken_file
from megatron_ext.tokenizers.libraries import tiktoken_file as tiktoken_published
from megatron_ext.tokenizers.libraries.tiktoken_file import (
    R50K,
    PublishedVocabulary,
    published_vocabulary,
    rank_digest,
)
from megatron_ext.tokenizers.libraries.tiktoken_layout import MEGATRON_SPECIAL_TOKENS
from tests.tokenizers.tokenizer_files import RANKS_IN_LIST

LISTED, RANKED, TEKKEN = "json-rank-list", "rank-file", "tekken"
SEVEN = list(MEGATRON_SPECIAL_TOKENS)


@pytest.fixture(scope="session")
def built(adapted):
    return partial(adapted, "tiktoken")


# The tables.


@pytest.mark.parametrize("name", [LISTED, RANKED, TEKKEN])
def test_every_id_has_one_display_string_that_leads_back_to_it(built, name):
    ours = built(name)
    seen = set()
    for token_id in range(ours.vocab_size):
        piece = ours.id_to_token(token_id)
        if piece and piece not in seen:
            assert ours.token_to_id(piece) == token_id
        seen.add(piece)
    assert len(seen) > 0.99 * ours.vocab_size


@pytest.mark.parametrize("num_special_tokens", [7, 32, 1000])
def test_ids_of_a_list_are_shifted_once_in_every_table(tokenizer_path, num_special_tokens):
    ours = MegatronTokenizer.from_pretrained(
        tokenizer_path(LISTED), num_special_tokens=num_special_tokens
    )
    assert ours.vocab_size == num_special_tokens + RANKS_IN_LIST == len(ours.vocab)
    assert ours.token_to_id("a") == num_special_tokens + ord("a")
    assert ours.tokenize("a") == [ours.token_to_id("a")]
    assert sorted(ours.inv_vocab) == list(range(ours.vocab_size))
    assert ours.inv_vocab[ours.token_to_id("a")] == ours.vocab[ours.token_to_id("a")] == "a"
    assert [ours.vocab[i] for i in range(7)] == SEVEN


def test_special_tokens_of_a_list_have_all_seven_roles(built):
    ours = built(LISTED)
    ids = [ours.unk_id, ours.bos_id, ours.eos_id, ours.mask_id, ours.pad_id, ours.cls_id]
    assert [*ids, ours.sep_id] == list(range(7))
    assert ours.eod == ours.eos_id
    assert ours.additional_special_tokens_ids == []


def test_text_may_hold_the_names_of_special_tokens(built):
    ours = built(LISTED, num_special_tokens=None)
    assert ours.vocab_size == RANKS_IN_LIST + 1000
    assert ours.tokens_to_text(ours.text_to_tokens("a<s>b")) == "a<s>b"
    assert ours.bos_id not in ours.text_to_ids("a<s>b")


@given(text=st.text(max_size=30))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_characters_of_several_bytes_are_decoded_whole(built, text):
    for name in (LISTED, RANKED):
        ids = built(name).text_to_ids(text)
        assert built(name).ids_to_text(ids) == text


def test_a_name_that_bytes_spell_too_is_the_special_token(tmp_path, tokenizer_path):
    lines = tokenizer_path(RANKED).read_text(encoding="ascii")
    spelled = base64.b64encode(b"<s>").decode()
    (tmp_path / "x.tiktoken").write_text(f"{lines}{spelled} {RANKS_IN_LIST}\n", encoding="ascii")
    ours = TOKENIZER_LIBRARIES["tiktoken"].build(tmp_path / "x.tiktoken")
    assert ours.token_to_id("<s>") == ours.bos_id == RANKS_IN_LIST + 2
    assert ours.token_bytes(RANKS_IN_LIST) == b"<s>"


def test_a_tokenizer_survives_pickling(built):
    ours = built(LISTED, additional_special_tokens=["<image>"])
    copy = pickle.loads(pickle.dumps(ours))
    assert copy.text_to_ids("the <image>", parse_special=True) == ours.text_to_ids(
        "the <image>", parse_special=True
    )


# Special tokens of the user's.


def test_the_vocabulary_may_be_cut_but_not_grown_beyond_its_file(built):
    ours = built(LISTED, vocab_size=1500)
    assert ours.vocab_size == 1500
    assert max(ours.text_to_ids("the parser of arguments")) < 1500
    with pytest.raises(TokenizerError, match=r"cannot fill.*3001.*1256 to 3000"):
        built(LISTED, vocab_size=3001)


@pytest.mark.parametrize("name", [LISTED, RANKED, TEKKEN])
def test_additional_special_tokens_take_the_places_of_fillers(built, name):
    plain, ours = built(name), built(name, additional_special_tokens=["<image>", "</s>", "<tile>"])
    first = plain.token_to_id("<SPECIAL_20>" if name == TEKKEN else "<SPECIAL_7>")
    assert ours.tokens_to_ids(["<image>", "<tile>"]) == [first, first + 1]
    assert ours.token_to_id("</s>") == plain.token_to_id("</s>") == ours.eos_id
    assert ours.vocab_size == plain.vocab_size
    assert ours.additional_special_tokens_ids == [first, first + 1]
    assert ours.text_to_ids("<image>", parse_special=True) == [first]
    assert first not in ours.text_to_ids("<image>")
    with pytest.raises(KeyError):
        ours.token_to_id(plain.id_to_token(first))


def test_a_list_without_free_ids_refuses_more_special_tokens(built):
    with pytest.raises(TokenizerError, match=r"'<tile>'.*at most 1 more.*num_special_tokens"):
        built(LISTED, num_special_tokens=8, additional_special_tokens=["<image>", "<tile>"])


@pytest.mark.parametrize("role", ["bos", "eos", "pad", "unk", "mask", "cls", "sep"])
def test_an_option_says_which_token_has_a_role(built, role):
    ours = built(LISTED, **{f"{role}_token": "<chosen>"})
    assert getattr(ours, f"{role}_id") == ours.token_to_id("<chosen>") == 7
    assert ours.additional_special_tokens_ids == []


def test_a_list_of_names_may_lack_some_of_the_seven(built):
    ours = built(LISTED, special_tokens=["<|endoftext|>", "<pad>", "<a>"], num_special_tokens=10)
    assert (ours.eos_id, ours.pad_id, ours.eod) == (0, 1, 0)
    assert (ours.bos_id, ours.unk_id, ours.cls_id) == (None, None, None)
    assert ours.additional_special_tokens_ids == [2]


def test_a_role_that_two_listed_names_could_have_is_asked_for(built):
    names = ["<|end_of_text|>", "<|endoftext|>"]
    with pytest.raises(TokenizerError, match=r"could be the eos token.*eos_token='<\|end_of"):
        built(LISTED, special_tokens=names)
    assert built(LISTED, special_tokens=names, eos_token=names[1]).eos_id == 1
    assert built(LISTED, special_tokens=["</s>", *names]).eos_id == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"special_tokens": "<s>"}, "list of names"),
        ({"additional_special_tokens": ["a", "a"]}, "additional_special_tokens.*named twice"),
        ({"engine": "warp"}, "unknown engine"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_option_is_refused(built, options, words):
    with pytest.raises(TokenizerError, match=words):
        built(LISTED, **options)


# Vocabularies that are known by their contents.


@pytest.fixture
def known(monkeypatch, tokenizer_path):
    """The rank file as if it had been published, with one special token in a gap of the ranks."""
    ranks = {}
    for line in tokenizer_path(RANKED).read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    row = PublishedVocabulary(
        name="small_base",
        num_ranks=len(ranks),
        digest=rank_digest(ranks),
        pattern=R50K,
        special_ids={"<|endoftext|>": 1990, "<|fim|>": RANKS_IN_LIST + 2},
    )
    for module in (tiktoken_published, tiktoken_file):
        monkeypatch.setattr(module, "PUBLISHED", (row,))
    return lambda **options: TOKENIZER_LIBRARIES["tiktoken"].build(tokenizer_path(RANKED), options)


def test_a_known_vocabulary_has_the_pattern_and_the_special_tokens_of_its_publisher(known):
    ours = known()
    assert ours.vocab_size == RANKS_IN_LIST + 3
    assert ours.eos_id == ours.token_to_id("<|endoftext|>") == 1990
    assert ours.token_to_id("<|fim|>") == RANKS_IN_LIST + 2
    assert ours.id_to_token(RANKS_IN_LIST) == ""
    assert ours.additional_special_tokens_ids == [RANKS_IN_LIST + 2]
    assert ours._encoding._pat_str == R50K
    assert known(pattern=r"\s+|\S+")._encoding._pat_str == r"\s+|\S+"


def test_options_lay_a_known_vocabulary_out_anew(known):
    ours = known(special_tokens=["<s>", "</s>"])
    assert ours.tokens_to_ids(["<s>", "</s>"]) == [RANKS_IN_LIST, RANKS_IN_LIST + 1]
    assert ours.vocab_size == RANKS_IN_LIST + 1000
    assert ours._encoding._pat_str == R50K


def test_ids_kept_for_special_tokens_leave_the_published_ones_where_they_are(known):
    ours = known(num_special_tokens=5, additional_special_tokens=["<image>"])
    assert ours.vocab_size == RANKS_IN_LIST + 5
    assert ours.token_to_id("<|fim|>") == RANKS_IN_LIST + 2
    assert ours.token_to_id("<image>") == RANKS_IN_LIST + 3
    assert ours.id_to_token(RANKS_IN_LIST) == "<SPECIAL_0>"
    with pytest.raises(TokenizerError, match="at least 3 for small_base"):
        known(num_special_tokens=2)
    with pytest.raises(TokenizerError, match=r"no id is free.*'<tile>'"):
        known(num_special_tokens=4, additional_special_tokens=["<image>", "<tile>"])


def test_more_special_tokens_follow_a_known_vocabulary(known):
    ours = known(additional_special_tokens=["<image>", "<tile>"])
    assert ours.tokens_to_ids(["<image>", "<tile>"]) == [RANKS_IN_LIST + 3, RANKS_IN_LIST + 4]
    assert ours.vocab_size == RANKS_IN_LIST + 5
    assert ours.additional_special_tokens_ids == [RANKS_IN_LIST + 3, RANKS_IN_LIST + 4]


def test_a_known_vocabulary_is_not_cut(known):
    with pytest.raises(TokenizerError, match=r"ids of small_base are fixed.*expected 2003"):
        known(vocab_size=1500)


def test_a_file_with_a_published_name_and_other_contents_is_refused(
    known, tokenizer_path, tmp_path
):
    lines = tokenizer_path(RANKED).read_bytes().splitlines(keepends=True)
    (tmp_path / "small_base.tiktoken").write_bytes(b"".join(lines[:-1]))
    with pytest.raises(TokenizerError, match=r"not the small_base.*1998 of them.*truncated"):
        TOKENIZER_LIBRARIES["tiktoken"].build(tmp_path / "small_base.tiktoken")


def test_a_digest_tells_ranks_tokens_and_their_bounds_apart():
    ranks = {b"a": 0, b"bc": 1}
    others = [{b"a": 0, b"bc": 2}, {b"a": 1, b"bc": 0}, {b"ab": 0, b"c": 1}, {b"a": 0, b"bd": 1}]
    assert len({rank_digest(row) for row in [ranks, *others]}) == 5
    assert rank_digest(dict(reversed(ranks.items()))) == rank_digest(ranks)
    assert published_vocabulary(ranks) is None
