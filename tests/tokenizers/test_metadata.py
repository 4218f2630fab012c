"""Megatron's entry point, and its metadata file: read, written and written at once."""

import copy
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections import OrderedDict

import pytest

from megatron_ext.errors import TokenizerError, UnknownNameError
from megatron_ext.tokenizers import (
    MegatronTokenizer,
    MegatronTokenizerText,
    MegatronTokenizerVision,
)
from megatron_ext.tokenizers.metadata import read_metadata

FILE = "tokenizer_metadata.json"


class OwnTokenizer(MegatronTokenizerText):
    """A user's class, with the constructor that Megatron's documentation shows."""

    def __init__(self, path, config, **kwargs):
        super().__init__(path, config, **kwargs)


@pytest.fixture
def folder(tokenizer_path, tmp_path):
    shutil.copytree(tokenizer_path("huggingface-nfc"), tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize(
    "metadata",
    [
        {
            "library": "huggingface",
            "class_name": None,
            "class_path": None,
            "model_type": "gpt",
            "chat_template": None,
        },
        {
            "library": "huggingface",
            "class_name": "MegatronTokenizerText",
            "class_path": "megatron.core.tokenizers.text.text_tokenizer",
            "chat_template": "{{ messages }}",
        },
        {
            "library": "huggingface",
            "class_name": "GPTTokenizer",
            "class_path": "megatron.core.tokenizers.text.models.gpt_tokenizer",
            "model_type": None,
            "chat_template": None,
            "metadata_path": None,
        },
        {"library": "huggingface", "model_type": "default-text", "of_a_later_release": [1, 2]},
    ],
    ids=["0.16", "main", "0.16-after-it-was-loaded", "0.17"],
)
def test_the_metadata_of_every_release_are_read(folder, metadata):
    (folder / FILE).write_text(json.dumps(metadata), encoding="utf-8")
    tokenizer = MegatronTokenizer.from_pretrained(folder)
    assert type(tokenizer) is MegatronTokenizerText
    assert tokenizer.chat_template == metadata.get("chat_template")
    assert tokenizer.config == metadata


@pytest.mark.parametrize(
    ("name", "library", "mode"),
    [
        ("null", "null", "text"),
        ("null-text", "null", "text"),
        ("null-multimodal", "null", "multimodal"),
        ("byte-level", "byte-level", "text"),
        ("sft", "huggingface", "sft"),
        ("multimodal", "huggingface", "multimodal"),
        ("huggingface", "huggingface", "text"),
    ],
)
def test_the_libraries_have_the_names_of_every_release(folder, name, library, mode):
    path = folder if library == "huggingface" else None
    options = {"vocab_size": 300} if library == "null" else {}
    tokenizer = MegatronTokenizer.from_pretrained(path, {"library": name}, **options)
    assert (tokenizer.library, tokenizer.mode) == (library, mode)
    expected = MegatronTokenizerVision if mode == "multimodal" else MegatronTokenizerText
    assert type(tokenizer) is expected


TEXT_CLASS = {
    "class_name": "MegatronTokenizerText",
    "class_path": "megatron.core.tokenizers.text.text_tokenizer",
}


def test_what_is_written_is_what_main_writes(folder):
    MegatronTokenizer.write_metadata(folder, "huggingface")
    assert read_metadata(folder / FILE) == {
        "library": "huggingface",
        **TEXT_CLASS,
        "chat_template": None,
    }
    MegatronTokenizer.write_metadata(folder, "multimodal", overwrite=True)
    assert read_metadata(folder / FILE) == {
        "library": "multimodal",
        "class_name": "MegatronTokenizerVision",
        "class_path": "megatron.core.tokenizers.vision.vision_tokenizer",
        "chat_template": None,
    }
    assert type(MegatronTokenizer.from_pretrained(folder)) is MegatronTokenizerVision


def test_with_a_model_type_it_is_what_release_0_16_writes(folder):
    # 0.16.1 looks the model type up wherever it is written, and fails on null.
    MegatronTokenizer.write_metadata(
        folder, "huggingface", model_type="t5", chat_template="{{ x }}"
    )
    assert read_metadata(folder / FILE) == {
        "library": "huggingface",
        "class_name": None,
        "class_path": None,
        "model_type": "t5",
        "chat_template": "{{ x }}",
    }
    assert type(MegatronTokenizer.from_pretrained(folder)) is MegatronTokenizerText


def test_a_class_of_ones_own_is_written_and_found_again(folder):
    # Megatron 0.16.1 writes a null model_type beside it, and fails with KeyError: None.
    MegatronTokenizer.write_metadata(folder, "huggingface", tokenizer_class=OwnTokenizer)
    assert read_metadata(folder / FILE)["class_name"] == "OwnTokenizer"
    tokenizer = MegatronTokenizer.from_pretrained(folder, parse_special_tokens=True)
    assert type(tokenizer) is OwnTokenizer
    assert tokenizer.parse_special_tokens
    assert tokenizer.unique_identifiers["class"].endswith("test_metadata.OwnTokenizer")
    old = {**read_metadata(folder / FILE), "model_type": None}
    assert type(MegatronTokenizer.from_pretrained(folder, old)) is OwnTokenizer


def test_a_class_that_no_other_process_finds_is_refused_when_it_is_written(folder):
    class Local(MegatronTokenizerText):
        pass

    with pytest.raises(TokenizerError, match=r"cannot find the tokenizer class.*<locals>\.Local"):
        MegatronTokenizer.write_metadata(folder, "huggingface", tokenizer_class=Local)
    with pytest.raises(TokenizerError, match="tokenizer_class is not a class; got 'Local'"):
        MegatronTokenizer.write_metadata(folder, "huggingface", tokenizer_class="Local")
    assert not (folder / FILE).exists()


def test_a_class_in_the_place_of_the_model_type_is_refused(folder):
    # main has the class where 0.16 has the model type.
    with pytest.raises(TokenizerError, match=r"key model_type is malformed.*expected a string"):
        MegatronTokenizer.write_metadata(folder, "huggingface", OwnTokenizer)


@pytest.mark.parametrize("library", ["huggingface", "byte-level"])
def test_a_mapping_of_metadata_stays_as_it_was(folder, library):
    # Megatron adds metadata_path to it, and 0.16.1 the class as well.
    metadata = {"library": library, "extra": {"kept": [1]}}
    before = copy.deepcopy(metadata)
    path = folder if library == "huggingface" else None
    tokenizer = MegatronTokenizer.from_pretrained(path, metadata)
    tokenizer.add_special_tokens(["<more>"])
    tokenizer.config["extra"]["kept"].append(2)
    assert metadata == before


@pytest.mark.parametrize("name", ["some-org/some-model", "GPT2BPETokenizer"])
def test_a_name_that_is_no_path_gives_no_path_made_of_it(name, tmp_path, monkeypatch):
    # Megatron looks for some-org/some-model/tokenizer_metadata.json.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TokenizerError, match=f"{name}: .*metadata_path where to write"):
        MegatronTokenizer.write_metadata(name, "huggingface")
    file = tmp_path / "elsewhere" / FILE
    MegatronTokenizer.write_metadata(name, "huggingface", metadata_path=file)
    assert read_metadata(file)["library"] == "huggingface"
    assert os.listdir(tmp_path) == ["elsewhere"]


def test_options_that_nobody_takes_are_refused_and_not_discarded(folder):
    with pytest.raises(TokenizerError, match=r"no such option; got 'bos_tokn'.*mean 'bos_token'"):
        MegatronTokenizer.from_pretrained(folder, {"library": "huggingface"}, bos_tokn="<s>")
    with pytest.raises(
        TokenizerError, match=r"byte-level .* got 'prompt_formt'; .*; did you mean 'prompt_format'"
    ):
        MegatronTokenizer.from_pretrained(
            metadata_path={"library": "byte-level"}, prompt_formt="chatml"
        )


def test_a_library_that_reads_a_file_is_not_built_without_one():
    with pytest.raises(TokenizerError, match="no tokenizer is named"):
        MegatronTokenizer.from_pretrained(metadata_path={"library": "huggingface"})
    with pytest.raises(UnknownNameError, match="unknown tokenizer library"):
        MegatronTokenizer.from_pretrained(metadata_path={"library": "spacy"})


def write_over_and_over(folder, template, stop):
    while not stop.is_set():
        MegatronTokenizer.write_metadata(
            folder, "huggingface", chat_template=template, overwrite=True
        )


def test_ranks_that_write_and_read_metadata_at_once_never_see_half_of_it(folder):
    # Megatron opens the file for writing in place: a reader finds it empty (#6718).
    MegatronTokenizer.write_metadata(folder, "huggingface", chat_template="a" * 20_000)
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    writers = [
        context.Process(target=write_over_and_over, args=(folder, letter * 20_000, stop))
        for letter in "ab"
    ]
    deadline = time.monotonic() + 30
    for writer in writers:
        writer.start()
    try:
        seen = []
        while len(seen) < 300 or len(set(seen)) < 2:
            assert time.monotonic() < deadline, "a writer wrote nothing"
            seen.append(read_metadata(folder / FILE)["chat_template"])
    finally:
        stop.set()
        for writer in writers:
            writer.join(timeout=20)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert set(seen) == {"a" * 20_000, "b" * 20_000}
    assert sorted(os.listdir(folder)) == ["tokenizer.json", "tokenizer_config.json", FILE]


def test_the_first_rank_to_write_wins_where_overwriting_was_not_asked_for(folder):
    code = (
        "import sys; from megatron_ext.tokenizers import MegatronTokenizer\n"
        "from megatron_ext.errors import TokenizerError\n"
        "try: MegatronTokenizer.write_metadata(sys.argv[1], 'huggingface')\n"
        "except TokenizerError as error: assert 'exists already' in str(error)\n"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(folder)]) for _ in range(3)]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    assert read_metadata(folder / FILE)["library"] == "huggingface"


def test_metadata_is_written_beside_the_tokenizer_and_read_back(folder):
    MegatronTokenizer.write_metadata(folder, "huggingface", chat_template="{{ messages }}")
    for path in (folder, folder / "tokenizer.json"):
        assert MegatronTokenizer.from_pretrained(path).chat_template == "{{ messages }}"
    assert sorted(os.listdir(folder)) == [
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer_metadata.json",
    ]


def test_metadata_is_overwritten_only_on_request(folder, tmp_path):
    elsewhere = tmp_path / "metadata.json"
    MegatronTokenizer.write_metadata(folder, "huggingface", metadata_path=elsewhere)
    with pytest.raises(TokenizerError, match="exists already; pass overwrite=True"):
        MegatronTokenizer.write_metadata(folder, "huggingface", metadata_path=elsewhere)
    MegatronTokenizer.write_metadata(
        folder, "huggingface", model_type="gpt", overwrite=True, metadata_path=elsewhere
    )
    tokenizer = MegatronTokenizer.from_pretrained(folder, metadata_path=str(elsewhere))
    assert tokenizer.config["model_type"] == "gpt"


def test_a_write_that_fails_leaves_the_old_file_and_no_other(folder, fill_disk):
    MegatronTokenizer.write_metadata(folder, "huggingface")
    before = (folder / "tokenizer_metadata.json").read_bytes()
    fill_disk()
    with pytest.raises(TokenizerError, match="cannot write the file; got No space left"):
        MegatronTokenizer.write_metadata(folder, "huggingface", overwrite=True)
    assert (folder / "tokenizer_metadata.json").read_bytes() == before
    assert len(os.listdir(folder)) == 3


REFUSED = {
    # Megatron takes it for no metadata at all, and looks for a file.
    "empty": ({}, TokenizerError, "names no library; expected library, one of huggingface"),
    "library": ({"library": "megatron-x"}, UnknownNameError, "got 'megatron-x'; expected one of"),
    "type": ({"library": 3}, TokenizerError, "key library is malformed; got 3"),
    "half": ({"class_name": "X"}, TokenizerError, "set both or neither"),
    "module": (
        {"class_name": "X", "class_path": "no.such.module"},
        TokenizerError,
        "no.such.module.X: cannot import",
    ),
    "class": (
        {"class_name": "Registri", "class_path": "megatron_ext.registry"},
        TokenizerError,
        "did you mean 'Registry'",
    ),
    "no tokenizer": (
        {"class_name": "Registry", "class_path": "megatron_ext.registry"},
        TokenizerError,
        "not a tokenizer class",
    ),
    "mode": (
        {"library": "huggingface", "mode": "chat"},
        TokenizerError,
        "unknown mode; got 'chat'; expected one of text, sft",
    ),
    "absent": ("absent.json", TokenizerError, "absent.json: there is no tokenizer metadata"),
    "int": (7, TokenizerError, "neither a file nor a mapping; got int"),
    "list": (["huggingface"], TokenizerError, "neither a file nor a mapping; got list"),
    "bool": (True, TokenizerError, "neither a file nor a mapping; got bool"),
}


@pytest.mark.parametrize(("metadata", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_metadata_that_cannot_be_used_is_refused(folder, metadata, error, message):
    if isinstance(metadata, dict) and "class_name" in metadata:
        metadata = {"library": "huggingface", **metadata}
    with pytest.raises(error, match=message):
        MegatronTokenizer.from_pretrained(folder, metadata_path=metadata)


@pytest.mark.parametrize("contents", ["", "{", "[1]"], ids=["empty", "broken", "list"])
def test_a_broken_metadata_file_is_refused(folder, contents):
    (folder / "tokenizer_metadata.json").write_text(contents, encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer_metadata\.json: the"):
        MegatronTokenizer.from_pretrained(folder)


def test_metadata_for_a_tokenizer_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match="does not exist"):
        MegatronTokenizer.write_metadata(tmp_path / "absent", "huggingface")
    with pytest.raises(UnknownNameError):
        MegatronTokenizer.write_metadata(tmp_path, "fast")
    with pytest.raises(TokenizerError, match="pass tokenizer_path"):
        MegatronTokenizer.from_pretrained()


def test_the_factory_has_no_instances():
    with pytest.raises(TokenizerError, match=r"call MegatronTokenizer\.from_pretrained"):
        MegatronTokenizer()


def test_unique_identifiers_name_what_decides_the_ids(tokenizer_path):
    path = tokenizer_path("json-rank-list")
    tokenizer = MegatronTokenizer.from_pretrained(path, num_special_tokens=20, pattern="v1")
    assert tokenizer.unique_identifiers == OrderedDict(
        {
            "class": "megatron_ext.MegatronTokenizerText",
            "library": "tiktoken",
            "tokenizer_path": str(path),
            "num_special_tokens": "20",
            "pattern": "v1",
        }
    )
    assert json.loads(json.dumps(tokenizer.unique_identifiers)) == tokenizer.unique_identifiers


def test_fingerprints_follow_the_vocabulary_and_not_the_path(folder, tokenizer):
    ours = MegatronTokenizer.from_pretrained(folder)
    assert ours.fingerprint() == tokenizer("huggingface-nfc").fingerprint()
    file = folder / "tokenizer.json"
    changed = file.read_text(encoding="utf-8").replace("<|end|>", "<|fin|>")
    file.write_text(changed, encoding="utf-8")
    assert MegatronTokenizer.from_pretrained(folder).fingerprint() != ours.fingerprint()
