"""A tokenizer file that cannot be used is refused in one line that says what to do."""

import base64
import json
import sys

import pytest

from megatron_ext.errors import MissingDependencyError, TokenizerError, UnknownNameError
from megatron_ext.tokenizers import TOKENIZER_LIBRARIES, MegatronTokenizer
from megatron_ext.tokenizers.tokenizer_files import file_kind
from tests.tokenizers.tokenizer_files import MAKERS, byte_level, json_rank_list, mistral_file

KINDS = {
    "sentencepiece-v1": "sentencepiece",
    "sentencepiece-nfkc": "sentencepiece",
    "tekken": "tekken",
    "json-rank-list": "tiktoken-json",
    "rank-file": "tiktoken-ranks",
    "huggingface-byte-level": "huggingface",
    "huggingface-unigram": "huggingface",
}


FILE_LIBRARIES = ("huggingface", "sentencepiece", "tiktoken")


def refused(library, path, *words, **options):
    """The one-line message of a refusal, which must hold ``words``."""
    with pytest.raises(TokenizerError) as caught:
        TOKENIZER_LIBRARIES[library].build(path, options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


@pytest.mark.parametrize(("name", "kind"), KINDS.items(), ids=KINDS)
def test_a_file_is_recognised_by_its_contents(tokenizer_path, tmp_path, name, kind):
    assert file_kind(tokenizer_path(name)).format == kind
    renamed = tmp_path / "anything"
    renamed.write_bytes(file_kind(tokenizer_path(name)).file.read_bytes())
    assert file_kind(renamed).format == kind


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_every_file_of_a_huggingface_folder_may_have_a_byte_order_mark(
    tokenizer_path, tmp_path, mark
):
    for file in tokenizer_path("huggingface-byte-level").iterdir():
        (tmp_path / file.name).write_bytes(mark + file.read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(mark + b"{{ eos_token }}")
    ours = MegatronTokenizer.from_pretrained(tmp_path)
    assert (ours.eos_id is None, ours.chat_template) == (False, "{{ eos_token }}")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("library", FILE_LIBRARIES)
def test_the_wrong_library_is_told_the_right_one(tokenizer_path, name, library):
    right = file_kind(tokenizer_path(name)).library
    if library == right:
        assert TOKENIZER_LIBRARIES[library].build(tokenizer_path(name)).vocab_size > 256
    else:
        refused(library, tokenizer_path(name), f"use library '{right}'", str(tokenizer_path(name)))


@pytest.mark.parametrize("library", FILE_LIBRARIES)
def test_a_missing_file_is_named(tmp_path, library):
    refused(library, tmp_path / "absent.model", "absent.model", "does not exist")


@pytest.mark.parametrize("library", FILE_LIBRARIES)
@pytest.mark.parametrize(
    "contents", [b"", b"hello world\n", b"\x7fELF\x02\x01\x01"], ids=["empty", "prose", "binary"]
)
def test_a_file_of_another_sort_is_refused(tmp_path, library, contents):
    (tmp_path / "file").write_bytes(contents)
    refused(library, tmp_path / "file", "not a recognised tokenizer file", "expected")


@pytest.mark.parametrize("keep", [40, 1000, 400_000], ids=str)
def test_a_truncated_sentencepiece_model_is_refused(tmp_path, keep):
    file = tmp_path / "tokenizer.model"
    file.write_bytes(mistral_file("tokenizer.model.v1").read_bytes()[:keep])
    refused("sentencepiece", tmp_path, "truncated", str(file))


@pytest.mark.parametrize(
    ("name", "library"), [("json-rank-list", "tiktoken"), ("huggingface-nfc", "huggingface")]
)
def test_broken_json_is_refused_with_its_place(tokenizer_path, tmp_path, name, library):
    whole = file_kind(tokenizer_path(name)).file.read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    refused(library, tmp_path / "tokenizer.json", "not valid JSON", "column", "truncated")


def test_a_directory_with_files_of_two_libraries_serves_both(tokenizer_path, tmp_path):
    for name in ("tokenizer.json", "tokenizer.model"):
        maker = "sentencepiece-v1" if name.endswith("model") else "huggingface-nfc"
        (tmp_path / name).write_bytes(file_kind(tokenizer_path(maker)).file.read_bytes())
    for library in ("sentencepiece", "huggingface"):
        files = TOKENIZER_LIBRARIES[library].build(tmp_path).files()
        assert ("tokenizer.model" in files) == (library == "sentencepiece")
    assert file_kind(tmp_path).library == "huggingface"
    refused("tiktoken", tmp_path, "use library 'huggingface'")


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    refused("huggingface", tmp_path, "holds no tokenizer", "tokenizer.json")


def test_a_directory_with_several_models_asks_for_one(tmp_path):
    for name in ("a.model", "b.model"):
        (tmp_path / name).touch()
    refused("sentencepiece", tmp_path, "a.model, b.model", "name the file itself")


def test_a_directory_with_one_model_is_that_model(tokenizer_path):
    folder = tokenizer_path("sentencepiece-nfkc").parent
    assert file_kind(folder).file == tokenizer_path("sentencepiece-nfkc")


def test_a_slow_huggingface_vocabulary_is_no_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"a": 0, "b": 1}', encoding="utf-8")
    refused("huggingface", tmp_path, "not a recognised tokenizer file")


@pytest.mark.parametrize("token_id", [1 << 31, -1, 2.5])
def test_an_id_that_no_vocabulary_has_is_refused(tokenizer_path, tmp_path, token_id):
    document = json.loads(file_kind(tokenizer_path("huggingface-byte-level")).file.read_text())
    token = next(iter(document["model"]["vocab"]))
    document["model"]["vocab"][token] = token_id
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    refused("huggingface", tmp_path, "an id that no vocabulary has", str(token_id), repr(token))


@pytest.mark.parametrize("broken", ["model", "vocab"])
def test_a_tokenizer_json_without_a_part_is_refused(tmp_path, broken):
    file = byte_level(tmp_path) / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    del (document if broken == "model" else document["model"])[broken]
    file.write_text(json.dumps(document), encoding="utf-8")
    refused("huggingface", tmp_path, "incomplete", broken)


def test_a_tokenizer_json_that_its_library_refuses_is_refused(tmp_path):
    file = byte_level(tmp_path) / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    document["model"]["merges"].append(["never", "seen"])
    file.write_text(json.dumps(document), encoding="utf-8")
    refused("huggingface", tmp_path, "cannot build", str(file))


@pytest.mark.parametrize(
    ("line", "words"),
    [("onlyonefield", "malformed"), ("!!!! 300", "malformed"), ("YQ== x", "malformed")],
    ids=["one-field", "not-base64", "no-rank"],
)
def test_a_malformed_rank_line_is_named(tokenizer_path, tmp_path, line, words):
    lines = tokenizer_path("rank-file").read_text(encoding="ascii").splitlines()
    (tmp_path / "x.tiktoken").write_text("\n".join([*lines[:300], line]), encoding="ascii")
    refused("tiktoken", tmp_path / "x.tiktoken", words, "x.tiktoken:301", line)


def test_a_rank_file_without_every_byte_is_refused(tmp_path):
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    del lines[0x41]
    (tmp_path / "x.tiktoken").write_text("\n".join(lines), encoding="ascii")
    refused("tiktoken", tmp_path / "x.tiktoken", "0x41")


@pytest.mark.parametrize("rank", [7, -7], ids=["twice", "negative"])
def test_a_rank_that_is_taken_or_negative_is_refused(tokenizer_path, tmp_path, rank):
    lines = tokenizer_path("rank-file").read_text(encoding="ascii")
    (tmp_path / "x.tiktoken").write_text(f"{lines}YWJjZGVm {rank}\n", encoding="ascii")
    refused("tiktoken", tmp_path / "x.tiktoken", "share a rank")


@pytest.mark.parametrize("damage", ["gap", "keys", "base64"])
def test_a_malformed_rank_list_is_refused(tmp_path, damage):
    file = json_rank_list(tmp_path)
    rows = json.loads(file.read_text(encoding="utf-8"))
    if damage == "gap":
        del rows[300]
    else:
        rows[300] = {"rank": 300} if damage == "keys" else {**rows[300], "token_bytes": "a"}
    file.write_text(json.dumps(rows), encoding="utf-8")
    refused("tiktoken", file, "in order" if damage == "gap" else "a row of the rank list")


@pytest.mark.parametrize("part", ["pattern", "default_vocab_size", "default_num_special_tokens"])
def test_an_incomplete_tekken_file_is_refused(tmp_path, part):
    ranks = json.loads(json_rank_list(tmp_path).read_text(encoding="utf-8"))
    config = {"pattern": r"\s+|\S+", "default_vocab_size": 1300, "default_num_special_tokens": 100}
    del config[part]
    file = tmp_path / "tekken.json"
    file.write_text(json.dumps({"config": config, "vocab": ranks}), encoding="utf-8")
    refused("tiktoken", file, "Tekken file is incomplete", part)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pattern": "v3"}, ["v1, v2 or a regular expression", "'v3'"]),
        ({"pattern": "(unclosed"}, ["cannot use the pattern"]),
        ({"vocab_size": 10**6}, ["cannot fill", "1256 to 3000"]),
        ({"vocab_size": 1000}, ["cannot fill"]),
        ({"num_special_tokens": 3}, ["7 names", "at most num_special_tokens = 3"]),
        ({"special_tokens": ["<s>", "<s>"]}, ["named twice", "'<s>'"]),
        ({"special_tokens": ["<SPECIAL_1>"]}, ["named twice"]),
        ({"patern": "v1"}, ["no such option", "did you mean 'pattern'?"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_tiktoken_option_is_refused(tokenizer_path, options, words):
    refused("tiktoken", tokenizer_path("json-rank-list"), *words, **options)


def test_options_that_contradict_a_tekken_file_are_refused(tokenizer_path):
    path = tokenizer_path("tekken")
    refused("tiktoken", path, "differs from the file", num_special_tokens=10)
    same = TOKENIZER_LIBRARIES["tiktoken"].build(path, {"num_special_tokens": 1000})
    assert same.vocab_size == TOKENIZER_LIBRARIES["tiktoken"].build(path, {}).vocab_size


def test_an_option_of_another_library_is_told_the_own_ones(tokenizer_path):
    path = tokenizer_path("sentencepiece-v1")
    refused("sentencepiece", path, "no such option", "one of legacy, ", pattern="v1")


def test_a_pattern_that_leaves_text_out_is_found_at_the_text(tokenizer_path):
    ours = TOKENIZER_LIBRARIES["tiktoken"].build(
        tokenizer_path("json-rank-list"), {"pattern": "[a-z]+"}
    )
    assert ours.encode_with_byte_ends("abc")[1][-1] == 3
    with pytest.raises(TokenizerError, match="leaves out part of the text"):
        ours.encode_with_byte_ends("abc 123")


def test_an_unknown_library_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"huggingface, sentencepiece, tiktoken.*did you"):
        TOKENIZER_LIBRARIES["sentencepeice"]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("huggingface-nfc", "tokenizers"),
        ("sentencepiece-v1", "sentencepiece"),
        ("json-rank-list", "tiktoken"),
    ],
)
def test_a_library_that_is_not_installed_is_named(tokenizer_path, monkeypatch, name, module):
    path = tokenizer_path(name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"{module}.*pip install"):
        TOKENIZER_LIBRARIES[file_kind(path).library].build(path)


def test_every_maker_makes_a_file_that_is_recognised(tokenizer_path):
    assert {file_kind(tokenizer_path(name)).library for name in MAKERS} == set(FILE_LIBRARIES)
