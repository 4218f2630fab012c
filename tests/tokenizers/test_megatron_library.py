"""Megatron's named tokenizers, built from the vocabulary files of GPT-2 and BERT."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer, pre_tokenizers

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers import MegatronTokenizer, TokenizerConfig, build_tokenizer
from megatron_ext.tokenizers.libraries.huggingface import HuggingFaceTokenizer
from megatron_ext.tokenizers.libraries.megatron import MEGATRON_NAMES, MegatronHFTokenizer
from tests.tokenizers.published import SHARED, needs_published_files

END = "<|endoftext|>"
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "r l", "Ã ©"]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "hell", "##o", "he", "##llo"]
PIECES += ["world", "w", "##orld", "e", "##e", ",", "!", "語", "a", "##a", "b", "##b", "1", "##1"]
CAPITALS = ["Hello", "World", "É"]
WORDS = st.text(st.sampled_from("hello world,!é É語ABab1\n\u3000\u0301🙂"), max_size=30)
QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A folder with ``vocab.json`` and ``merges.txt``."""
    folder = tmp_path_factory.mktemp("gpt2")
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
    vocab = {piece: i for i, piece in enumerate([*pieces, END])}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    write_lines(folder / "merges.txt", ["#version: 0.2", *MERGES])
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A folder with ``uncased-vocab.txt`` and ``cased-vocab.txt``."""
    folder = tmp_path_factory.mktemp("bert")
    write_lines(folder / "uncased-vocab.txt", PIECES)
    write_lines(folder / "cased-vocab.txt", [*PIECES, *CAPITALS])
    return folder


def write_lines(file: Path, lines: list[str]) -> Path:
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def named_gpt2(folder: Path, **options: object) -> MegatronHFTokenizer:
    files = {"vocab_file": folder / "vocab.json", "merges_file": folder / "merges.txt"}
    return MegatronHFTokenizer("GPT2BPETokenizer", **{**files, **options})


@given(text=WORDS)
@QUICK
def test_gpt2_files_give_the_ids_and_spans_of_byte_level_bpe(gpt2, text):
    reference = ByteLevelBPETokenizer(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt"))
    ours = named_gpt2(gpt2)
    ids, ends = ours.encode_with_byte_ends(text)
    assert ids.tolist() == reference.encode(text).ids == ours.text_to_ids(text)
    assert ends.tolist() == ours.byte_ends(ids).tolist()
    assert b"".join(ours.token_bytes(i) or b"" for i in ids) == text.encode()
    assert ours.ids_to_text(ids.tolist()) == text


@given(text=WORDS, cased=st.booleans())
@QUICK
def test_bert_files_give_the_ids_of_word_piece(bert, text, cased):
    file = bert / ("cased-vocab.txt" if cased else "uncased-vocab.txt")
    reference = BertWordPieceTokenizer(str(file), lowercase=not cased)
    name = "BertWordPieceCase" if cased else "BertWordPieceLowerCase"
    ours = MegatronHFTokenizer(name, vocab_file=file)
    ids, ends = ours.encode_with_byte_ends(text)
    assert ids.tolist() == reference.encode(text, add_special_tokens=False).ids
    assert sorted(ends) == ends.tolist()
    assert not len(ends) or ends[-1] == len(text.encode())


def test_gpt2_has_one_special_token_for_every_role(gpt2):
    ours = named_gpt2(gpt2)
    end = ours.token_to_id(END)
    assert (ours.bos_id, ours.eos_id, ours.unk_id, ours.eod) == (end,) * 4
    assert ours.pad_id is None
    assert end not in ours.text_to_ids(f"hello {END}")
    assert ours.text_to_ids(f"hello{END}", parse_special=True)[-1] == end
    with_pad = named_gpt2(gpt2, pad_token="<pad>", additional_special_tokens=["<tool>"])
    assert (with_pad.pad_id, with_pad.token_to_id("<tool>")) == (end + 1, end + 2)


def test_bert_has_cls_and_sep_for_bos_and_eos(bert):
    ours = MegatronHFTokenizer(
        "megatron-bert-345m-uncased",
        vocab_file=bert / "uncased-vocab.txt",
        include_special_tokens=True,
    )
    assert (ours.pad_id, ours.unk_id, ours.cls_id, ours.sep_id, ours.mask_id) == (0, 1, 2, 3, 4)
    assert (ours.bos_id, ours.eos_id) == (2, 3)
    assert ours.text_to_ids("Hello world") == [2, 5, 10, 3]
    assert ours.id_to_token(7) == "##o"


@pytest.mark.parametrize("library", ["huggingface", "megatron"])
def test_a_folder_or_a_file_may_be_named_instead(gpt2, bert, library):
    expected = named_gpt2(gpt2).fingerprint()
    files = {"vocab_file": str(gpt2 / "vocab.json"), "merge_file": str(gpt2 / "merges.txt")}
    for config in (
        TokenizerConfig(library=library, model=str(gpt2)),
        TokenizerConfig(library=library, model=str(gpt2 / "vocab.json")),
        TokenizerConfig(library=library, model=str(gpt2), **files),
    ):
        ours = build_tokenizer(config)
        assert ours.fingerprint() == expected
        assert ours.tokenize("hello") == [ours.token_to_id("hello")]
    for name, text in (("cased", "Hello"), ("uncased", "hello")):
        config = TokenizerConfig(library=library, model=str(bert / f"{name}-vocab.txt"))
        assert build_tokenizer(config).detokenize(build_tokenizer(config).tokenize("Hello")) == text


def test_the_configuration_beside_a_vocabulary_counts_unless_megatrons_name_says_all(
    gpt2, tmp_path
):
    write_lines(tmp_path / "vocab.txt", [*PIECES, *CAPITALS])
    config = {"do_lower_case": True, "tokenizer_class": "BertTokenizerFast", "chat_template": "x"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    by_folder = HuggingFaceTokenizer(tmp_path)
    assert by_folder.ids_to_tokens(by_folder.text_to_ids("Hello")) == ["hello"]
    assert by_folder.chat_template == "x"
    assert set(by_folder.files()) == {"vocab.txt", "tokenizer_config.json"}
    by_name = MegatronHFTokenizer("BertWordPieceCase", vocab_file=tmp_path / "vocab.txt")
    assert by_name.ids_to_tokens(by_name.text_to_ids("Hello")) == ["Hello"]
    assert by_name.chat_template is None
    assert set(by_name.files()) == {"vocab.txt"}
    assert set(named_gpt2(gpt2).files()) == {"vocab.json", "merges.txt"}


def test_special_tokens_that_a_vocabulary_lacks_get_the_next_ids(gpt2, tmp_path):
    vocab = json.loads((gpt2 / "vocab.json").read_text(encoding="utf-8"))
    size = len(vocab) - 1
    del vocab[END]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    write_lines(tmp_path / "merges.txt", MERGES)
    assert (named_gpt2(tmp_path).eos_id, named_gpt2(tmp_path).vocab_size) == (size, size + 1)
    write_lines(tmp_path / "vocab.txt", ["[UNK]", "[CLS]", "[SEP]", "a"])
    ours = MegatronHFTokenizer("BertWordPieceCase", vocab_file=tmp_path / "vocab.txt")
    assert (ours.vocab_size, ours.pad_id, ours.mask_id) == (6, 4, 5)


def test_characters_that_look_like_line_ends_are_pieces(tmp_path):
    file = write_lines(tmp_path / "vocab.txt", [*PIECES[:5], "a", "\u2028", "\x85", "b"])
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    ours = MegatronHFTokenizer("BertWordPieceCase", vocab_file=file)
    assert (ours.token_to_id("\u2028"), ours.token_to_id("b")) == (6, 8)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["#version: 0.2", "h e", "l"], "merges.txt:3: the line is not a merge; got 'l'"),
        (["h e", "", "l l"], "merges.txt:2: the line is not a merge; got ''"),
        (["h e", "l  l"], "merges.txt:2: the line is not a merge"),
        (["h e", "h h"], "merges.txt:2: the vocabulary lacks a piece of this merge; got 'hh'"),
        (["{"], "merges.txt:1: the line is not a merge; got '{'"),
    ],
    ids=["one-piece", "empty", "two-spaces", "lacking", "json"],
)
def test_a_bad_line_of_merges_is_named(gpt2, tmp_path, lines, message):
    merges = write_lines(tmp_path / "merges.txt", lines)
    with pytest.raises(TokenizerError, match=message):
        named_gpt2(gpt2, merges_file=merges)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("[1]", "this is not a vocabulary; expected a JSON object"),
        ("{}", "this is not a vocabulary"),
        ('{"a": 0, "b": "1"}', "the piece 'b' has no id; got '1'"),
        ('{"a": 0, "b": -1}', "the piece 'b' has no id; got -1"),
        ('{"a": 0, "b": 0}', "two pieces have the id 0; got 'a' and 'b'"),
        ('{"a": 0,', "the file is not valid JSON"),
    ],
    ids=["list", "empty", "text", "negative", "twice", "truncated"],
)
def test_a_broken_vocabulary_is_named(gpt2, tmp_path, document, message):
    file = tmp_path / "vocab.json"
    file.write_text(document, encoding="utf-8")
    with pytest.raises(TokenizerError, match=f"vocab.json: {message}"):
        named_gpt2(gpt2, vocab_file=file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[UNK]\n[CLS]\n[SEP]\na\n\nb\n", "vocab.txt:5: the line is empty"),
        (b"[UNK]\n[CLS]\n[SEP]\na\na\n", "vocab.txt:5: the piece is in line 4 already; got 'a'"),
        (b"[UNK]\n[CLS]\na\n", r"vocab.txt: the vocabulary has no \[SEP\]"),
        (b"[UNK]\n\xff\n", "vocab.txt:2: the file is not UTF-8"),
        (b'{"a": 0}', "vocab.txt: a BPE vocabulary needs its merges"),
    ],
    ids=["empty-line", "twice", "no-sep", "latin-1", "json"],
)
def test_a_broken_word_piece_file_is_named(tmp_path, content, message):
    file = tmp_path / "vocab.txt"
    file.write_bytes(content)
    with pytest.raises(TokenizerError, match=message):
        MegatronHFTokenizer("BertWordPieceLowerCase", vocab_file=file)


def test_files_that_do_not_fit_the_name_are_refused(gpt2, bert, tmp_path):
    vocab, merges = gpt2 / "vocab.json", gpt2 / "merges.txt"
    text = bert / "uncased-vocab.txt"
    for name, files, message in (
        ("GPT2BPETokenizer", {"vocab_file": vocab}, "is read from vocab_file and merges_file"),
        ("GPT2BPETokenizer", {"merges_file": merges}, "is read from vocab_file and merges_file"),
        ("BertWordPieceCase", {"vocab_file": text, "merges_file": merges}, "read from vocab_file"),
        (str(gpt2), {"merges_file": merges}, "a merges file needs its vocabulary"),
        (str(gpt2), {"vocab_file": vocab}, "a BPE vocabulary needs its merges; set merges_file"),
        (str(gpt2), {"vocab_file": tmp_path / "none"}, "none: the file does not exist"),
        (str(tmp_path / "gone"), {}, "neither a tokenizer of Megatron's nor a file"),
        ("GPT2BPETokeniser", {}, "one of BertWordPieceLowerCase.*GPT2BPETokenizer"),
    ):
        with pytest.raises(TokenizerError, match=message):
            MegatronHFTokenizer(name, **files)
    (tmp_path / "vocab.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TokenizerError, match="a BPE vocabulary needs its merges"):
        MegatronHFTokenizer(tmp_path)


def test_a_vocabulary_of_a_tokenizer_that_cuts_otherwise_is_refused(gpt2, tmp_path):
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((gpt2 / name).read_bytes())
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"tokenizer_class": "Qwen2Tokenizer"}', encoding="utf-8")
    with pytest.raises(TokenizerError, match="got tokenizer_class Qwen2Tokenizer"):
        HuggingFaceTokenizer(tmp_path)


def test_a_second_vocabulary_is_refused_and_not_ignored(gpt2, tokenizer_path):
    folder = tokenizer_path("huggingface-byte-level")
    files = {"vocab_file": gpt2 / "vocab.json", "merges_file": gpt2 / "merges.txt"}
    for path in (folder, folder / "tokenizer.json"):
        with pytest.raises(TokenizerError, match=r"two vocabularies are named; got .*vocab\.json"):
            HuggingFaceTokenizer(path, **files)


def test_megatrons_call_reads_the_merges_file_that_it_is_given(gpt2):
    files = {"vocab_file": str(gpt2 / "vocab.json"), "merges_file": str(gpt2 / "merges.txt")}
    ours = MegatronTokenizer.from_pretrained(
        tokenizer_path="GPT2BPETokenizer",
        metadata_path={"library": "megatron"},
        additional_special_tokens=[f"<extra_id_{i}>" for i in range(100)],
        **files,
    )
    assert ours.vocab_size == named_gpt2(gpt2).vocab_size + 100
    assert len(ours.additional_special_tokens_ids) == 100
    assert ours.eod == ours.token_to_id(END)


def test_the_engine_is_checked(gpt2):
    assert named_gpt2(gpt2, engine="reference").engine == "reference"
    with pytest.raises(TokenizerError, match="unknown engine"):
        named_gpt2(gpt2, engine="warp")


def test_there_are_ten_names_and_bert_is_lower_case_by_name():
    assert len(MEGATRON_NAMES) == 10
    for name, known in MEGATRON_NAMES.items():
        cased = None if "gpt" in name.lower() else "uncased" in name or "LowerCase" in name
        assert known.lowercase == cased


@needs_published_files
@pytest.mark.parametrize(
    ("name", "folder", "options"),
    [
        ("GPT2BPETokenizer", "gpt2", {"vocab_file": "vocab.json", "merges_file": "merges.txt"}),
        ("BertWordPieceLowerCase", "bert_uncased", {"vocab_file": "vocab.txt"}),
    ],
)
def test_published_vocabulary_files_mean_what_their_tokenizer_json_does(name, folder, options):
    place = SHARED / "tokenizers" / folder
    ours = MegatronHFTokenizer(name, **{key: place / file for key, file in options.items()})
    theirs = HuggingFaceTokenizer(place)
    assert ours.fingerprint() == theirs.fingerprint()
    corpora = sorted((SHARED / "corpora" / "django_po").glob("*.conf.po"))
    texts = [file.read_text(encoding="utf-8")[:4000] for file in corpora]
    left, right = ours.text_to_flat_ids(texts), theirs.text_to_flat_ids(texts)
    assert left[0].tolist() == right[0].tolist()
    assert left[1].tolist() == right[1].tolist()
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (theirs.bos_id, theirs.eos_id, theirs.pad_id)
