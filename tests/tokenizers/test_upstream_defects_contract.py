"""What Megatron's tokenizer wrapper, factory and HuggingFace library get wrong, and we must not.

Each test fails on the behaviour that its comment states, which megatron-core 0.16.1 or main of
August 2026 shows. Metadata and saved folders have tests of their own beside this file.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import UnknownNameError
from megatron_ext.tokenizers import MegatronTokenizer, MegatronTokenizerText

Open = Callable[..., MegatronTokenizerText]
BY_METADATA, GIVEN, OWN = "{{ 'metadata' }}", "{{ 'given' }}", "{{ 'own' }}"


@pytest.fixture
def opened(tokenizer_path: Callable[[str], Path]) -> Open:
    def built(name: str, **options: Any) -> MegatronTokenizerText:
        if name in ("null", "byte-level"):
            return MegatronTokenizer.from_pretrained(None, {"library": name}, **options)
        return MegatronTokenizer.from_pretrained(tokenizer_path(name), **options)

    return built


# The factory.


def test_an_unknown_library_is_not_taken_for_one_with_images():
    # main: whatever is no text library gets the class for images, which fails much later.
    with pytest.raises(UnknownNameError, match=r"got 'sentence-piece'.*mean 'sentencepiece'"):
        MegatronTokenizer.from_pretrained("x", {"library": "sentence-piece"})


def test_metadata_do_not_replace_members_of_the_tokenizer(opened):
    # Every key of the metadata becomes an attribute, whatever it hides.
    metadata = {"library": "byte-level", "tokenize": "x", "vocab_size": 3, "options": 1}
    tokenizer = MegatronTokenizer.from_pretrained(None, {**metadata, "model_type": "gpt"})
    assert (tokenizer.model_type, pickle.loads(pickle.dumps(tokenizer)).model_type) == ("gpt",) * 2
    with pytest.raises(AttributeError, match="no attribute 'class_name'"):
        _ = tokenizer.class_name
    assert tokenizer.tokenize("a") == [97]
    assert tokenizer.vocab_size == 512
    assert tokenizer.config["vocab_size"] == 3


def test_building_twice_from_one_mapping_gives_equal_tokenizers(opened, tokenizer_path):
    # 0.16.1 writes class_name, class_path and metadata_path into the mapping: the second call sees
    # other metadata than the first.
    metadata = {"library": "huggingface", "chat_template": None}
    before = copy.deepcopy(metadata)
    path = tokenizer_path("huggingface-nfc")
    one, other = (MegatronTokenizer.from_pretrained(path, metadata) for _ in range(2))
    assert metadata == before
    assert one.config == other.config == before
    assert one.unique_identifiers == other.unique_identifiers


# The wrapper.


@pytest.mark.parametrize("name", ["byte-level", "null", "sentencepiece-v1"])
@pytest.mark.parametrize("alias", ["cls", "sep", "mask", "cls_id", "sep_id", "mask_id"])
def test_an_id_that_a_library_lacks_is_none_and_no_endless_recursion(opened, name, alias):
    # 0.16.1: the library's alias calls itself, and a RecursionError passes every guard against
    # AttributeError; SentencePiece raises NameError instead.
    options = {"vocab_size": 300} if name == "null" else {}
    tokenizer = opened(name, **options)
    assert getattr(tokenizer, alias) is None
    assert getattr(tokenizer._tokenizer, f"{alias.removesuffix('_id')}_id") is None


def test_an_id_of_zero_is_found_wherever_an_id_is_looked_for(opened):
    # Megatron chains "a or b", which passes over the id 0.
    tokenizer = opened("null", vocab_size=300, pad_id=0, eod_id=0)
    assert (tokenizer.pad, tokenizer.eod) == (0, 0)
    assert tokenizer.special_tokens_dict["pad_token"] == 0
    tokenizer = opened("json-rank-list", num_special_tokens=20)
    assert tokenizer.unk == 0
    assert tokenizer.token_to_id("<unk>") == 0
    # Real Mistral vocabularies pad with the unknown token, whose id is 0; Megatron has None here.
    chat = opened("sentencepiece-v3", prompt_format="mistral")
    assert chat.unk == chat.pad == 0


def test_a_tokenizer_without_padding_does_not_pad_with_its_end_of_sequence(opened):
    # Proposed for main: every tokenizer has the prompt format default, whose padding is the EOS.
    tokenizer = opened("huggingface-byte-level")
    assert tokenizer.prompt_format is None
    assert tokenizer.pad_id is None
    assert tokenizer.eos is not None


def test_the_end_of_document_falls_back_to_the_end_of_sequence_and_then_to_none(opened):
    assert opened("huggingface-byte-level").eod == opened("huggingface-byte-level").eos
    assert opened("byte-level", eos_id=-1).eod is None


def test_special_tokens_are_left_out_of_text_on_request(opened):
    # 0.16.1: detokenize takes ids alone, and the server passes skip_special_tokens in vain.
    tokenizer = opened("huggingface-byte-level")
    ids = [*tokenizer.tokenize("text"), tokenizer.eos]
    assert tokenizer.detokenize(ids) == "text<|end|>"
    assert tokenizer.detokenize(ids, skip_special_tokens=True) == "text"


def test_adding_special_tokens_says_how_many_were_new(opened):
    # The wrapper returns None.
    assert opened("huggingface-nfc").add_special_tokens(["<|end|>", "<new>"]) == 1


@pytest.mark.parametrize("name", ["sentencepiece-v1", "rank-file", "byte-level", "null"])
def test_every_library_is_saved(opened, tmp_path, name):
    # Megatron: ValueError, save_pretrained is not supported with this library.
    tokenizer = opened(name, **({"vocab_size": 300} if name == "null" else {}))
    tokenizer.save_pretrained(tmp_path / "saved")
    theirs = MegatronTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs.fingerprint() == tokenizer.fingerprint()


@pytest.mark.parametrize("name", ["huggingface-byte-level", "byte-level", "sentencepiece-v1"])
def test_every_library_has_offsets(opened, name):
    # main: AttributeError with HuggingFace and byte-level; SentencePiece calls a method that is
    # gone. 0.16.1 has none at all.
    tokenizer = opened(name)
    text = "the parser"
    offsets = tokenizer.offsets(tokenizer.tokenize(text), text)
    assert offsets[0] == 0
    assert len(offsets) == len(tokenizer.tokenize(text))


@pytest.mark.parametrize("name", ["rank-file", "sentencepiece-v1", "huggingface-nfc", "byte-level"])
def test_every_library_has_conversations(opened, name):
    # main: NotImplementedError but for the library sft, which is HuggingFace's.
    tokenizer = opened(
        name,
        prompt_format="identity" if name != "huggingface-nfc" else "default",
        **({"chat_template": OWN} if name == "huggingface-nfc" else {}),
    )
    ids, target = tokenizer.tokenize_conversation(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], True, False
    )
    assert len(ids) == len(target)


def test_identifiers_name_the_library_and_a_class_that_does_not_move(opened):
    # Megatron leaves the library out, and names the class by its module, which every release moved.
    identifiers = opened("byte-level").unique_identifiers
    assert identifiers["library"] == "byte-level"
    assert identifiers["class"] == "megatron_ext.MegatronTokenizerText"
    assert opened("huggingface-nfc").unique_identifiers != opened("tekken").unique_identifiers


def test_identifiers_follow_the_chat_template_on_request(tokenizer_path):
    # What the metadata say is never part of them: the cache of another template is found.
    path = tokenizer_path("huggingface-nfc")
    one, other = (
        MegatronTokenizer.from_pretrained(
            path, {"library": "huggingface", "chat_template": template}, identify_by_content=True
        )
        for template in (BY_METADATA, OWN)
    )
    assert one.unique_identifiers != other.unique_identifiers


def test_a_given_template_goes_before_the_metadatas_and_that_before_the_tokenizers_own(
    tokenizer_path, tmp_path
):
    # 0.16.1 has the given one last, and main after the metadata's.
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    document = (tokenizer_path("huggingface-nfc") / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(document)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": OWN, "eos_token": "<|end|>"}), encoding="utf-8"
    )
    bare = {"library": "huggingface"}
    with_template = {**bare, "chat_template": BY_METADATA}
    for metadata, options, expected in (
        (with_template, {"chat_template": GIVEN}, "given"),
        (with_template, {}, "metadata"),
        (bare, {"chat_template": GIVEN}, "given"),
        (bare, {}, "own"),
    ):
        tokenizer = MegatronTokenizer.from_pretrained(folder, metadata, **options)
        conversation = [{"role": "user", "content": "x"}]
        assert tokenizer.apply_chat_template(conversation, tokenize=False) == expected


# The HuggingFace library.


def test_a_vocabulary_and_its_merges_reach_the_tokenizer(tokenizer_path, tmp_path):
    # 0.16.1 passes merge_files, which nobody reads, and takes the vocabulary's file for the merges.
    document = json.loads(
        (tokenizer_path("huggingface-byte-level") / "tokenizer.json").read_text(encoding="utf-8")
    )
    (tmp_path / "vocab.json").write_text(json.dumps(document["model"]["vocab"]), encoding="utf-8")
    (tmp_path / "merges.txt").write_text(
        "".join(" ".join(pair) + "\n" for pair in document["model"]["merges"]), encoding="utf-8"
    )
    files = {"vocab_file": tmp_path / "vocab.json", "merges_file": tmp_path / "merges.txt"}
    for library, path in (("huggingface", tmp_path), ("megatron", "GPT2BPETokenizer")):
        tokenizer = MegatronTokenizer.from_pretrained(path, {"library": library}, **files)
        expected = MegatronTokenizer.from_pretrained(tokenizer_path("huggingface-byte-level"))
        assert tokenizer.tokenize("the parser reads") == expected.tokenize("the parser reads")
        assert len(tokenizer.tokenize("the parser")) < len("the parser")


def test_sentinels_are_listed_whatever_transformers_is_installed(opened):
    # 0.16.1 asks transformers for an attribute that its version 5 does not have.
    sentinels = [f"<extra_id_{i}>" for i in range(3)]
    tokenizer = opened("huggingface-wordpiece", additional_special_tokens=sentinels)
    ids = tokenizer.additional_special_tokens_ids
    assert [tokenizer.id_to_token(token_id) for token_id in ids] == sentinels
    assert opened("huggingface-byte-level").additional_special_tokens_ids == []


def test_a_conversation_is_a_list_of_ids_and_no_batch(opened):
    # With transformers 5 it is a dictionary of a batch.
    tokenizer = opened("huggingface-byte-level", chat_template="{{ messages[0].content }}")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert type(ids) is list
    assert ids == tokenizer.tokenize("hi")


def test_a_vocabulary_with_unused_ids_has_a_list(tokenizer_path, tmp_path):
    # Megatron looks every id up in a dictionary that lacks the unused ones: KeyError.
    source = tokenizer_path("huggingface-byte-level") / "tokenizer.json"
    document = json.loads(source.read_text(encoding="utf-8"))
    last = max(row["id"] for row in document["added_tokens"])
    document["added_tokens"].append(
        {**document["added_tokens"][-1], "id": last + 3, "content": "<far>", "special": True}
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    tokenizer = MegatronTokenizer.from_pretrained(tmp_path)
    assert tokenizer.vocab_size == last + 4
    assert tokenizer.vocab[last + 1 : last + 4] == ["", "", "<far>"]


def test_a_missing_end_of_sequence_is_none(tokenizer_path, tmp_path):
    # Every other id is None where it is missing; this one raises.
    source = tokenizer_path("huggingface-byte-level") / "tokenizer.json"
    text = source.read_text(encoding="utf-8").replace("<|end|>", "<other>")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    tokenizer = MegatronTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos is tokenizer.eod is tokenizer._tokenizer.eos_id is None


def test_roles_are_completed_as_megatron_does_it_without_new_tokens(opened):
    tokenizer = opened("huggingface-wordpiece")
    assert tokenizer.bos == tokenizer.cls == tokenizer.token_to_id("[CLS]")
    size = tokenizer.vocab_size
    with_sep = opened("huggingface-wordpiece", sep_token="[SEP]")
    assert with_sep.eos == with_sep.sep == with_sep.token_to_id("[SEP]")
    assert with_sep.vocab_size == size


def test_tokens_around_a_text_are_there_on_request_and_never_otherwise(opened):
    # 0.16.1 leaves them out, main puts them in: the same command line, other ids.
    bare = opened("huggingface-metaspace")
    around = opened("huggingface-metaspace", include_special_tokens=True)
    ids = bare.tokenize("the parser")
    assert around.tokenize("the parser") == [
        bare.token_to_id("<s>"),
        *ids,
        bare.token_to_id("</s>"),
    ]


def test_options_of_megatrons_class_that_change_nothing_here_are_accepted(tokenizer_path):
    folder = tokenizer_path("huggingface-byte-level")
    ours = MegatronTokenizer.from_pretrained(folder, use_fast=False, trust_remote_code=True)
    plain = MegatronTokenizer.from_pretrained(folder)
    assert ours.tokenize("the parser ends") == plain.tokenize("the parser ends")
