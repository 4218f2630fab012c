"""Megatron's entry point and its metadata file."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections import OrderedDict

import pytest

from megatron_ext.errors import TokenizerError, UnknownNameError
from megatron_ext.tokenizers import MegatronTokenizer, MegatronTokenizerText


class OwnTokenizer(MegatronTokenizerText):
    """A user's class."""


@pytest.fixture
def folder(tokenizer_path, tmp_path):
    shutil.copytree(tokenizer_path("huggingface-nfc"), tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_without_metadata_the_library_is_told_from_the_file(folder):
    tokenizer = MegatronTokenizer.from_pretrained(folder)
    assert tokenizer.library == "huggingface"
    assert tokenizer.detokenize(tokenizer.tokenize("the parser")) == "the parser"


def test_metadata_is_written_beside_the_tokenizer_and_read_back(folder):
    MegatronTokenizer.write_metadata(folder, "huggingface", chat_template="{{ messages }}")
    assert json.loads((folder / "tokenizer_metadata.json").read_text(encoding="utf-8")) == {
        "library": "huggingface",
        "class_name": "MegatronTokenizerText",
        "class_path": "megatron.core.tokenizers.text.text_tokenizer",
        "chat_template": "{{ messages }}",
    }
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


def test_a_write_that_fails_leaves_the_old_file_and_no_other(folder, monkeypatch):
    MegatronTokenizer.write_metadata(folder, "huggingface")
    before = (folder / "tokenizer_metadata.json").read_bytes()

    def full_disk(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(TokenizerError, match="cannot write the file; got No space left"):
        MegatronTokenizer.write_metadata(folder, "huggingface", overwrite=True)
    assert (folder / "tokenizer_metadata.json").read_bytes() == before
    assert len(os.listdir(folder)) == 3


def test_a_dict_of_metadata_is_not_changed(folder):
    metadata = {"library": "huggingface", "extra": ["kept"]}
    before = copy.deepcopy(metadata)
    tokenizer = MegatronTokenizer.from_pretrained(folder, metadata_path=metadata)
    assert metadata == before
    tokenizer.config["extra"] = []
    assert metadata == before


def test_a_class_of_the_users_own_survives_the_metadata(folder):
    MegatronTokenizer.write_metadata(folder, "huggingface", tokenizer_class=OwnTokenizer)
    tokenizer = MegatronTokenizer.from_pretrained(folder)
    assert type(tokenizer) is OwnTokenizer
    assert tokenizer.unique_identifiers["class"].endswith("test_megatron_tokenizer.OwnTokenizer")


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({}, TokenizerError, "names no library; expected library, one of huggingface"),
        ({"library": "megatron-x"}, UnknownNameError, "got 'megatron-x'; expected one of hugg"),
        ({"library": 3}, TokenizerError, "key library is malformed; got 3"),
        ({"library": "huggingface", "class_name": "X"}, TokenizerError, "set both or neither"),
        (
            {"library": "huggingface", "class_name": "X", "class_path": "no.such.module"},
            TokenizerError,
            "no.such.module.X: cannot import",
        ),
        (
            {
                "library": "huggingface",
                "class_name": "Registri",
                "class_path": "megatron_ext.registry",
            },
            TokenizerError,
            "did you mean 'Registry'",
        ),
        (
            {
                "library": "huggingface",
                "class_name": "Registry",
                "class_path": "megatron_ext.registry",
            },
            TokenizerError,
            "no tokenizer class",
        ),
        ("absent.json", TokenizerError, "absent.json: there is no tokenizer metadata"),
        (7, TokenizerError, "neither a file nor a mapping; got int"),
    ],
    ids=["empty", "library", "type", "half", "module", "class", "not-a-tokenizer", "absent", "int"],
)
def test_metadata_that_cannot_be_used_is_refused(folder, metadata, error, message):
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


@pytest.mark.parametrize("name", ["sentencepiece-v1", "json-rank-list", "huggingface-nfc"])
def test_a_tokenizer_goes_to_another_process(tokenizer, name):
    ours = tokenizer(name)
    theirs = pickle.loads(pickle.dumps(ours))
    assert theirs.tokenize("the café 🙂") == ours.tokenize("the café 🙂")
    assert theirs.fingerprint() == ours.fingerprint()


def test_fingerprints_follow_the_vocabulary_and_not_the_path(folder, tokenizer):
    ours = MegatronTokenizer.from_pretrained(folder)
    assert ours.fingerprint() == tokenizer("huggingface-nfc").fingerprint()
    file = folder / "tokenizer.json"
    changed = file.read_text(encoding="utf-8").replace("<|end|>", "<|fin|>")
    file.write_text(changed, encoding="utf-8")
    assert MegatronTokenizer.from_pretrained(folder).fingerprint() != ours.fingerprint()


def test_importing_the_package_imports_no_tokenizer_library_and_no_torch():
    code = (
        "import sys, megatron_ext.tokenizers; "
        "heavy = {'torch', 'transformers', 'megatron', 'tokenizers', 'sentencepiece', 'tiktoken'}; "
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
