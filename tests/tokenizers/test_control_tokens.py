"""Control tokens are read where they are asked for, and nowhere else."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from megatron_ext.tokenizers import MegatronTokenizer, TokenizerConfig, build_tokenizer
from megatron_ext.tokenizers.special_tokens import ControlToken, ControlTokens
from tests.tokenizers.tokenizer_files import MANY

NAMES = {
    "sentencepiece-v3": ["<s>", "</s>", "[INST]", "[/INST]"],
    "tekken": ["<s>", "</s>", "[INST]"],
    "huggingface-byte-level": ["<|end|>", "<tool>"],
    "huggingface-metaspace": ["<s>", "</s>", "<unk>"],
    "huggingface-wordpiece": ["[CLS]", "[SEP]"],
}
PIECES = st.lists(
    st.one_of(
        st.sampled_from(sorted({name for names in NAMES.values() for name in names})),
        st.sampled_from(["the parser", " ", "\n", "é", "日本", "🤷", "<", "|", "[INS", "T]", "s>"]),
    ),
    max_size=8,
)


def found(text, *tokens, spans=None):
    return [(m.begin, m.end, m.token_id) for m in ControlTokens(tokens).find(text, spans)]


@MANY
@given(
    names=st.lists(st.text("ab<.", min_size=1, max_size=5), min_size=1, max_size=12, unique=True),
    text=st.text("ab<.", max_size=40),
)
def test_of_any_names_those_are_found_that_a_list_of_them_finds(names, text):
    longest_first = sorted(names, key=len, reverse=True)
    wanted = re.finditer("|".join(map(re.escape, longest_first)), text)
    tokens = [ControlToken(name, i) for i, name in enumerate(names)]
    assert found(text, *tokens) == [(*m.span(), names.index(m[0])) for m in wanted]


def test_what_a_thousand_tokens_have_in_common_is_compared_once():
    tokens = [ControlToken(f"<SPECIAL_{i}>", i) for i in range(1_000)]
    tokens += [ControlToken(f"[control_{i}]", 1_000 + i) for i in range(1_000)]
    pattern = ControlTokens(tokens)._pattern.pattern
    assert (pattern.count("SPECIAL"), pattern.count("control")) == (1, 1)
    text = "<div class='a'>[x]</div><SPECIAL_77>" * 2
    assert found(text, *tokens) == [(24, 36, 77), (60, 72, 77)]


def test_a_token_counts_only_whole_inside_one_span():
    token = ControlToken("<a>", 1)
    assert found("<a><a><a>", token, spans=[(0, 4), (5, 9)]) == [(0, 3, 1), (6, 9, 1)]
    assert found("<a><a><a>", token, spans=[(1, 8)]) == [(3, 6, 1)]
    assert found("<a>", token, spans=[(0, 1), (1, 3)]) == []
    assert found("<a>", token, spans=[]) == []


def test_a_token_swallows_the_white_space_that_it_asks_for():
    left, right = ControlToken("<l>", 1, lstrip=True), ControlToken("<r>", 2, rstrip=True)
    assert found("a  <l> <r> \n b", left, right) == [(1, 6, 1), (7, 13, 2)]
    assert found("<r>  <l>", left, right) == [(0, 5, 2), (5, 8, 1)]


def test_a_single_word_counts_only_between_words():
    token = ControlToken("end", 1, single_word=True)
    assert found("end bend ends end.", token) == [(0, 3, 1), (14, 17, 1)]


def test_without_tokens_nothing_is_found():
    assert found("<a>") == []


@pytest.mark.parametrize("name", NAMES)
@MANY
@given(pieces=PIECES)
def test_a_span_over_all_of_the_text_reads_what_parsing_reads_and_no_span_reads_nothing(
    tokenizer, name, pieces
):
    ours, text = tokenizer(name), "".join(pieces)
    for spans, parse_special in (([(0, len(text))], True), ([], False)):
        ids, ends = ours.encode_with_control_spans(text, spans)
        wanted = ours.encode_with_byte_ends(text, parse_special=parse_special)
        assert ids.tolist() == wanted[0].tolist()
        assert ends.tolist() == wanted[1].tolist()


@pytest.mark.parametrize("name", NAMES)
@MANY
@given(before=PIECES, inside=PIECES, after=PIECES)
def test_no_text_outside_of_the_spans_becomes_a_control_token(
    tokenizer, name, before, inside, after
):
    ours = tokenizer(name)
    parts = ["".join(before), "".join(inside), "".join(after)]
    text = "".join(parts)
    begin, end = len(parts[0]), len(parts[0]) + len(parts[1])
    ids, ends = ours.encode_with_control_spans(text, [(begin, end)])
    first, last = len(parts[0].encode()), len((parts[0] + parts[1]).encode())
    starts = np.concatenate(([0], ends[:-1]))[: len(ends)]
    unknown = ours.unk_id
    for token_id, start, stop in zip(ids.tolist(), starts.tolist(), ends.tolist(), strict=True):
        if ours.is_control(token_id) and token_id != unknown:
            # White space that gives no token belongs to the token after it, or to the last one.
            covered = text.encode()[start:stop].decode()
            assert covered.strip() == ours.id_to_token(token_id)
            assert first <= stop - len(covered.lstrip().encode())
            assert start + len(covered.rstrip().encode()) <= last
            assert stop <= last or stop == len(text.encode())
    assert (np.diff(ends, prepend=0) >= 0).all()
    assert not len(ids) or ends[-1] == len(text.encode())


@pytest.mark.parametrize("name", NAMES)
def test_parse_special_tokens_is_a_choice_of_the_tokenizer(tokenizer_path, tokenizer, name):
    text = "the" + "".join(NAMES[name]) + "parser"
    config = TokenizerConfig(model=str(tokenizer_path(name)), parse_special_tokens=True)
    parsing = build_tokenizer(config)
    wanted, _ = tokenizer(name).encode_with_byte_ends(text, parse_special=True)
    assert parsing.tokenize(text) == wanted.tolist() != tokenizer(name).tokenize(text)
    assert parsing.text_to_ids_batch([text, "", text])[2].tolist() == wanted.tolist()
    assert parsing.encode_with_byte_ends(text)[0].tolist() == wanted.tolist()
    assert "parse_special_tokens" in parsing.unique_identifiers


def bpe_with(folder, *added, pre_tokenizer, normalizer=None):
    """A small BPE whose added tokens have the attributes of the library."""
    alphabet = ["<unk>", *map(chr, range(32, 127)), "▁"]
    whole = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, [], unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        whole.normalizer = normalizer
    whole.add_special_tokens(list(added))
    whole.save(str(folder / "tokenizer.json"))
    return whole, MegatronTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_the_space_before_a_stretch_follows_the_scheme_of_the_file(tmp_path, scheme):
    theirs, ours = bpe_with(
        tmp_path,
        AddedToken("<s>", normalized=False),
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme),
    )
    for text in ("a b", "<s>a b<s> c", "a<s>b", "<s><s>", " <s> a"):
        ids, ends = ours.encode_with_byte_ends(text, parse_special=True)
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids, text
        assert ends[-1] == len(text)


NEAR_END = [
    f"a {before}end{after} b" for before in ("", "²", "é") for after in ("\u0301", "‿", "½")
]


def test_stripping_and_single_words_are_those_of_the_library(tmp_path):
    theirs, ours = bpe_with(
        tmp_path,
        AddedToken("<l>", lstrip=True, normalized=False),
        AddedToken("<r>", rstrip=True, normalized=False),
        AddedToken("end", single_word=True, normalized=False),
        pre_tokenizer=pre_tokenizers.Split(" ", "isolated"),
        normalizer=normalizers.Sequence([]),
    )
    texts = ["a  <l> b", "a <r>  b", "<r>  <l>", "end bend end", "the end.", " <l><r> "]
    for text in texts + NEAR_END:
        ids, ends = ours.encode_with_byte_ends(text, parse_special=True)
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids, text
        assert ends[-1] == len(text.encode())


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("template", ["[CLS] $A [SEP]", "[CLS] $A", "$A [SEP] [SEP]"])
def test_the_post_processors_tokens_stand_around_each_text_and_cover_nothing(
    tmp_path, tokenizer_path, template, include
):
    theirs = Tokenizer.from_file(str(tokenizer_path("huggingface-wordpiece") / "tokenizer.json"))
    theirs.no_truncation()
    theirs.no_padding()
    names = [(name, theirs.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    theirs.post_processor = processors.TemplateProcessing(single=template, special_tokens=names)
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = MegatronTokenizer.from_pretrained(tmp_path, include_special_tokens=include)
    texts = ["the parser", "", "the parser ends"]
    wanted = [theirs.encode(text, add_special_tokens=include).ids for text in texts]
    assert [ours.tokenize(text) for text in texts] == wanted
    assert [row.tolist() for row in ours.text_to_ids_batch(texts)] == wanted
    ids, ends = ours.encode_with_byte_ends("the parser")
    assert ids.tolist() == wanted[0]
    bare, bare_ends = ours.encode_with_control_spans("the parser", [])
    before = template.split().index("$A") if include else 0
    after = (len(template.split()) - 1 - before) if include else 0
    assert ids.tolist()[before : len(ids) - after] == bare.tolist()
    assert ends.tolist() == [0] * before + bare_ends.tolist() + [10] * after
