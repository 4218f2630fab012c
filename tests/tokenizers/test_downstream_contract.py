"""What Megatron's code calls on a tokenizer, as it calls it, for every library.

Facts of the callers: megatron/training/datasets/{fim,sft}_dataset.py, tools/preprocess_data*.py,
megatron/core/inference (controllers, engines, servers), megatron/rl/rl_utils.py and
megatron/training/checkpointing.py, of core 0.16.1 and of main in August 2026.
"""

import inspect
import json
import pickle
import shutil
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers import TOKENIZER_LIBRARIES, MegatronTokenizer, MegatronTokenizerText

FILES = (
    "sentencepiece-v1",
    "sentencepiece-nfkc-bytes",
    "json-rank-list",
    "rank-file",
    "huggingface-byte-level",
    "huggingface-metaspace",
    "huggingface-unigram",
    "huggingface-wordpiece",
)
LIBRARIES = (*FILES, "byte-level", "null")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | length }} tools\n{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CONVERSATION = [{"role": "user", "content": "how many"}, {"role": "assistant", "content": "three"}]


@pytest.fixture(scope="session")
def plain(opened: Callable[..., MegatronTokenizerText]) -> Callable[..., MegatronTokenizerText]:
    """The same without options, built once."""
    return cache(opened)


def text_for(tokenizer: MegatronTokenizerText) -> str:
    return "17 4 0 12" if tokenizer.library == "null" else "the parser reads naïve café 🙂 again"


# tools/preprocess_data.py and the datasets.


@pytest.mark.parametrize("name", LIBRARIES)
def test_text_becomes_a_list_of_ints_inside_the_vocabulary(plain, name):
    tokenizer = plain(name)
    ids = tokenizer.tokenize(text_for(tokenizer))
    assert type(ids) is list
    assert {type(token_id) for token_id in ids} == {int}
    assert 0 <= min(ids) <= max(ids) < tokenizer.vocab_size
    assert type(tokenizer.vocab_size) is int
    assert tokenizer.tokenize("") == []


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_special_id_is_an_id_or_none_under_both_of_its_names(plain, name):
    # In 0.16.1 an alias that a library lacks calls itself until the stack ends.
    tokenizer = plain(name)
    for short in ("pad", "bos", "eos", "unk", "mask", "cls", "sep"):
        token_id = getattr(tokenizer, f"{short}_id")
        # Megatron's datasets take a padding of -1 for none, and no None.
        is_absent = short == "pad" and token_id is None and tokenizer.library != "huggingface"
        assert getattr(tokenizer, short) == (-1 if is_absent else token_id)
        assert token_id is None or 0 <= token_id < tokenizer.vocab_size
        assert getattr(tokenizer._tokenizer, f"{short}_id") == token_id
    assert tokenizer.eod == tokenizer.eos_id


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_vocabulary_is_a_list_in_id_order_and_its_inverse_a_dict(plain, name):
    tokenizer = plain(name)
    vocab, inv_vocab = tokenizer.vocab, tokenizer.inv_vocab
    assert isinstance(vocab, list)
    assert len(vocab) == len(inv_vocab) == tokenizer.vocab_size
    assert sorted(inv_vocab) == list(range(tokenizer.vocab_size))
    assert all(isinstance(token, str) for token in inv_vocab.values())
    for token_id in tokenizer.tokenize(text_for(tokenizer)):
        token = inv_vocab[token_id]
        assert vocab[token_id] == tokenizer.id_to_token(token_id) == token
        # megatron/rl asks the vocabulary of tiktoken for an id, which is a dict there.
        assert token in vocab
        assert inv_vocab[vocab[token]] == token
    assert "no such token" not in vocab
    assert vocab[:2] == [vocab[0], vocab[1]]
    with pytest.raises(KeyError):
        vocab["no such token"]


def test_special_ids_by_name_are_those_that_there_are(opened):
    tokenizer = opened("json-rank-list", num_special_tokens=20)
    assert tokenizer.special_tokens_dict == {
        "bos_token": 1,
        "eos_token": 2,
        "pad_token": 4,
        "unk_token": 0,
        "mask_token": 3,
        "cls_token": 5,
        "sep_token": 6,
    }
    assert opened("null", eod_id=3, pad_id=5).special_tokens_dict.items() >= {("pad_token", 5)}


# fim_dataset.py reaches inside.


@pytest.mark.parametrize("name", LIBRARIES)
def test_fim_finds_ids_of_tokens_and_text_without_special_tokens(opened, name):
    tokenizer = opened(name, additional_special_tokens=["<fim_prefix>", "<fim_suffix>"])
    inner = tokenizer._tokenizer
    prefix, suffix = inner.tokens_to_ids(["<fim_prefix>", "<fim_suffix>"])
    assert inner.tokens_to_ids("<fim_prefix>") == prefix
    assert isinstance(prefix, int)
    with pytest.raises(KeyError):
        inner.tokens_to_ids(["<fim_prefix>", "no such token"])
    ids = inner.text_to_ids(text_for(tokenizer))
    sample = np.array([prefix, *ids, suffix])
    text = inner.ids_to_text(ids)
    assert inner.ids_to_text(sample, remove_special_tokens=True) == text
    assert "<fim_prefix>" in inner.ids_to_text(sample, remove_special_tokens=False)
    assert np.array([*inner.text_to_ids(text)], dtype=np.int64).tolist() == ids


@pytest.mark.parametrize("name", LIBRARIES)
def test_tokens_and_text_convert_both_ways(plain, name):
    tokenizer = plain(name)
    inner, text = tokenizer._tokenizer, text_for(tokenizer)
    tokens = inner.text_to_tokens(text)
    assert inner.tokens_to_ids(tokens) == tokenizer.tokenize(text)
    assert inner.ids_to_tokens(tokenizer.tokenize(text)) == tokens
    assert inner.tokens_to_text(tokens) == tokenizer.detokenize(tokenizer.tokenize(text))


# Inference.


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_server_detokenizes_with_and_without_special_tokens(opened, name):
    tokenizer = opened(name, additional_special_tokens=["<end>"])
    # megatron/core looks for the parameter before it passes it.
    assert "skip_special_tokens" in inspect.signature(tokenizer.detokenize).parameters
    ids = [*tokenizer.tokenize(text_for(tokenizer)), tokenizer.token_to_id("<end>")]
    assert tokenizer.detokenize(ids).endswith("<end>")
    without = tokenizer.detokenize(ids, skip_special_tokens=True)
    assert "<end>" not in without
    assert without == tokenizer.detokenize(ids[:-1])
    for token_id in ids:
        assert isinstance(tokenizer.detokenize([token_id]), str)


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("skip", [True, False], ids=["skipped", "named"])
def test_segments_of_a_generated_stream_join_to_its_text(opened, name, skip):
    # As the controller cuts the text: offsets[i] to offsets[i + 1].
    tokenizer = opened(name, additional_special_tokens=["<end>"])
    end = tokenizer.token_to_id("<end>")
    ids = tokenizer.tokenize(text_for(tokenizer))
    for stream in (ids, [*ids[:3], end, *ids[3:], end], [end, *ids], ids[:-2], [end], []):
        text = tokenizer.detokenize(stream, skip_special_tokens=skip)
        offsets = tokenizer.offsets(stream, text)
        assert len(offsets) == len(stream)
        assert offsets == sorted(offsets)
        assert all(0 <= offset <= len(text) for offset in offsets)
        stops = [*offsets[1:], len(text)] if offsets else []
        segments = [text[begin:stop] for begin, stop in zip(offsets, stops, strict=True)]
        assert "".join(segments) == text
        ends = [segments[i].strip() for i, token_id in enumerate(stream) if token_id == end]
        assert set(ends) <= ({""} if skip else {"<end>"})


@pytest.mark.parametrize("name", ["tekken", "byte-level", "sentencepiece-v1", "json-rank-list"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_stream_has_offsets_in_its_text(plain, name, data):
    tokenizer = plain(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    text = tokenizer.detokenize(ids)
    offsets = tokenizer.offsets(ids, text)
    assert len(offsets) == len(ids)
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)


def test_offsets_are_characters_of_the_text_and_not_bytes(opened):
    tokenizer = opened("byte-level")
    assert tokenizer.offsets(tokenizer.tokenize("aé🙂b"), "aé🙂b") == [0, 1, 1, 2, 2, 2, 2, 3]
    cut = tokenizer.tokenize("a🙂")[:-1]
    assert tokenizer.detokenize(cut) == "a\ufffd"
    assert tokenizer.offsets(cut, "a\ufffd") == [0, 1, 1, 1]


def test_ids_of_another_text_have_no_offsets_in_this_one(opened):
    tokenizer = opened("tekken")
    with pytest.raises(TokenizerError, match="not a tokenization of the text; got ids that dec"):
        tokenizer.offsets(tokenizer.tokenize("one"), "another")


# The library's object by itself, as Megatron's own code and its users take it.


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_object_of_a_library_answers_what_the_tokenizer_does(plain, name):
    tokenizer = plain(name)
    library = tokenizer._tokenizer
    assert library.vocab == tokenizer.vocab
    assert library.inv_vocab == tokenizer.inv_vocab == dict(enumerate(tokenizer.vocab))
    text = text_for(tokenizer)
    ids = library.text_to_ids(text)
    assert library.offsets(ids, text) == tokenizer.offsets(ids, text)
    for role in ("bos", "eos", "pad", "unk", "mask", "cls", "sep"):
        token_id, token = getattr(library, f"{role}_id"), getattr(library, f"{role}_token")
        assert token == (None if token_id is None else library.id_to_token(token_id))


def test_the_object_of_a_library_writes_conversations_alone(tokenizer_path):
    library = TOKENIZER_LIBRARIES["sentencepiece"].build(tokenizer_path("sentencepiece-v1"))
    ids = library.apply_chat_template(CONVERSATION[:1], TEMPLATE, add_generation_prompt=True)
    assert ids == library.text_to_ids("user: how many\nassistant: ")
    with pytest.raises(TokenizerError, match="has no chat template"):
        library.apply_chat_template(CONVERSATION)


def test_the_object_of_the_huggingface_library_has_transformers_alone(tokenizer_path):
    transformers = pytest.importorskip("transformers")
    folder = tokenizer_path("huggingface-nfc")
    library = TOKENIZER_LIBRARIES["huggingface"].build(folder, {"include_special_tokens": True})
    assert library.include_special_tokens
    assert isinstance(library.tokenizer, transformers.PreTrainedTokenizerFast)
    assert library.tokenizer.convert_tokens_to_ids("<|end|>") == library.eos_id
    ids = library.tokenizer.apply_chat_template(CONVERSATION, chat_template=TEMPLATE)
    assert ids == library.apply_chat_template(CONVERSATION, TEMPLATE)


# Chat.


@pytest.mark.parametrize("name", [name for name in LIBRARIES if name != "null"])
def test_the_chat_server_finds_a_template_and_gets_ids(opened, name):
    # The server takes tokenizer._tokenizer.tokenizer where there is one. SentencePiece's and
    # tiktoken's processor has that name in Megatron, and no template is ever applied.
    tokenizer = opened(name, chat_template=TEMPLATE)
    inner = getattr(getattr(tokenizer, "_tokenizer", None), "tokenizer", None)
    chat = inner if inner is not None else tokenizer
    assert chat.chat_template == TEMPLATE
    ids = chat.apply_chat_template(
        CONVERSATION[:1], tokenize=True, add_generation_prompt=True, tools=[{}, {}]
    )
    assert type(ids) is list
    expected = "user: how many\n2 tools\nassistant: "
    assert ids == tokenizer.tokenize(expected)
    server_side = chat.apply_chat_template(
        CONVERSATION,
        tokenize=True,
        add_generation_prompt=False,
        tools=None,
        chat_template="{{ 'hi' }}",
    )
    assert server_side == tokenizer.tokenize("hi")


def test_a_template_of_the_metadata_reaches_the_object_that_the_server_takes(tokenizer_path):
    # Megatron keeps it in the wrapper, and the server renders with another.
    tokenizer = MegatronTokenizer.from_pretrained(
        tokenizer_path("huggingface-nfc"), {"library": "huggingface", "chat_template": TEMPLATE}
    )
    assert tokenizer._tokenizer.tokenizer.chat_template == TEMPLATE
    tokenizer.add_special_tokens(["<new>"])
    assert tokenizer._tokenizer.tokenizer.chat_template == TEMPLATE


def test_control_tokens_in_a_message_stay_text_through_that_object(tokenizer_path):
    tokenizer = MegatronTokenizer.from_pretrained(
        tokenizer_path("huggingface-nfc"), chat_template="{{ messages[0].content }}<|end|>"
    )
    for chat in (tokenizer, tokenizer._tokenizer.tokenizer):
        ids = chat.apply_chat_template([{"role": "user", "content": "x<|end|>y"}])
        assert ids.count(tokenizer.eos) == 1
        assert tokenizer.detokenize(ids) == "x<|end|>y<|end|>"
    with pytest.raises(TokenizerError, match=r"does not take this option .* got padding"):
        chat.apply_chat_template(CONVERSATION, padding=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"truncation": True, "max_length": 3},
        {"truncation": True, "max_length": 1000},
        {"max_length": 3},
        {"return_tensors": "np"},
        {"return_tensors": "pt", "truncation": True, "max_length": 3},
        {"return_dict": True},
        {"return_dict": True, "return_tensors": "np", "truncation": True, "max_length": 3},
        {"return_dict": True, "return_tensors": "pt"},
        {"tokenize": False, "return_dict": True, "return_tensors": "np"},
        {"padding": False, "continue_final_message": False, "tokenizer_kwargs": None},
        {"tools": [{"name": "f"}, {"name": "g"}], "documents": [], "add_generation_prompt": True},
    ],
    ids=str,
)
def test_options_of_a_chat_mean_what_they_mean_to_transformers(tokenizer_path, options):
    transformers = pytest.importorskip("transformers")
    tokenizer = MegatronTokenizer.from_pretrained(
        tokenizer_path("huggingface-nfc"), chat_template=TEMPLATE
    )
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer._whole, chat_template=TEMPLATE
    )
    # Before transformers 5 ids were a list unless asked otherwise, as they are here.
    expected = theirs.apply_chat_template(CONVERSATION, **{"return_dict": False, **options})
    for chat in (tokenizer, tokenizer._tokenizer, tokenizer._tokenizer.tokenizer):
        assert_equal(chat.apply_chat_template(CONVERSATION, **options), expected)


def assert_equal(got, expected):
    if not isinstance(expected, (str, list)) and hasattr(expected, "keys"):
        assert got.keys() == expected.keys() == {"input_ids", "attention_mask"}
        for key in got:
            assert_equal(got[key], expected[key])
    elif isinstance(expected, (str, list)):
        assert got == expected
    else:
        assert (type(got), got.dtype) == (type(expected), expected.dtype)
        assert got.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncation": True}, "max_length: .*got None; expected how many ids to keep"),
        ({"truncation": True, "max_length": 0}, "max_length: .*got 0"),
        ({"truncation": "only_first"}, "truncation: .*got 'only_first'; expected True or False"),
        ({"return_tensors": "tf"}, "return_tensors: .*got 'tf'; expected np or pt"),
        ({"return_dict": "yes"}, "return_dict: "),
        ({"padding": "max_length"}, "got padding='max_length'; expected truncation, max_length"),
        ({"continue_final_message": True}, "got continue_final_message=True"),
        ({"return_assistant_tokens_mask": True}, "take the target of tokenize_conversation"),
        ({"sanitize_control_tokens": False}, "set allow_control_tokens_in_content"),
        ({"tokenizer_kwargs": {"padding": True}}, "got tokenizer_kwargs="),
    ],
    ids=str,
)
def test_an_option_of_a_chat_that_is_not_taken_is_refused_by_name(opened, options, message):
    tokenizer = opened("json-rank-list", chat_template=TEMPLATE)
    with pytest.raises(TokenizerError, match=message):
        tokenizer.apply_chat_template(CONVERSATION, **options)


def test_images_in_a_message_are_tagged_through_that_object_too(tokenizer_path):
    # Megatron's class for images has no chat template at all.
    tokenizer = MegatronTokenizer.from_pretrained(
        tokenizer_path("huggingface-nfc"),
        {"library": "huggingface", "mode": "multimodal"},
        chat_template=TEMPLATE,
        image_tag_type="nvlm",
    )
    message = [{"role": "user", "content": "<image> what"}]
    ids = tokenizer._tokenizer.tokenizer.apply_chat_template(message)
    assert tokenizer.detokenize(ids) == "user: <Image><image></Image> what\n"
    assert ids.count(tokenizer.image_token_id) == 1


def test_a_huggingface_tokenizer_streams_as_the_server_does_it(tokenizer_path):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    if not hasattr(tokenizers.decoders, "DecodeStream"):
        pytest.skip("this release of tokenizers does not stream")
    tokenizer = MegatronTokenizer.from_pretrained(tokenizer_path("huggingface-byte-level"))
    inner = tokenizer._tokenizer.tokenizer
    assert isinstance(inner, transformers.PreTrainedTokenizerFast)
    assert len(inner.get_vocab()) == tokenizer.vocab_size
    ids = [*tokenizer.tokenize("naïve 🙂 café"), tokenizer.eos]
    stream = tokenizers.decoders.DecodeStream(ids=[], skip_special_tokens=True)
    shown = "".join(stream.step(inner._tokenizer, token_id) or "" for token_id in ids)
    assert shown == "naïve 🙂 café"
    assert pickle.loads(pickle.dumps(tokenizer)).tokenize("naïve") == tokenizer.tokenize("naïve")


def test_without_transformers_the_server_takes_the_tokenizer_itself(tokenizer_path, monkeypatch):
    tokenizer = MegatronTokenizer.from_pretrained(tokenizer_path("huggingface-nfc"))
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert getattr(tokenizer._tokenizer, "tokenizer", None) is None


# megatron/rl.


def test_reinforcement_learning_chooses_a_padding_by_name(opened):
    tokenizer = opened("huggingface-byte-level")
    assert tokenizer.library == "huggingface"
    assert not tokenizer.pad
    assert "<tool>" in tokenizer._tokenizer.tokenizer.get_vocab()
    tokenizer._tokenizer.pad_token = "<tool>"
    assert tokenizer.pad == tokenizer.token_to_id("<tool>")
    assert tokenizer.detokenize([tokenizer.pad]) == "<tool>"
    with pytest.raises(KeyError):
        tokenizer._tokenizer.pad_token = "no such token"


def test_reinforcement_learning_chooses_a_padding_by_id(opened):
    # Megatron writes it, and its own tokenizer never reads it.
    tokenizer = opened("json-rank-list", num_special_tokens=300)
    assert tokenizer.library == "tiktoken"
    assert "<SPECIAL_233>" in tokenizer.vocab
    tokenizer._pad_id = tokenizer.vocab["<SPECIAL_233>"]
    assert tokenizer.pad == tokenizer.pad_id == 233
    assert tokenizer.detokenize([tokenizer.pad]) == "<SPECIAL_233>"
    tokenizer._pad_id = 0
    assert tokenizer.pad == 0


# sft_dataset.py.


@pytest.mark.parametrize("name", [name for name in LIBRARIES if name != "null"])
def test_conversations_become_ids_and_targets_of_the_same_length(opened, name):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer = opened(name, chat_template=template)
    if tokenizer.pad_id is None and tokenizer.eos is None:
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer = opened(name, chat_template=template, prompt_format="auto", **tokenizer.options)
    tokens, target = tokenizer.tokenize_conversation(
        CONVERSATION, return_target=True, add_generation_prompt=False
    )
    assert len(tokens.tolist()) == len(target.tolist())
    trained = [token_id for token_id in target.tolist() if token_id != -100]
    assert "three" in tokenizer.detokenize(trained)
    assert "many" not in tokenizer.detokenize(trained)
    assert isinstance(tokenizer.pad, int)


# Special tokens that are added.


@pytest.mark.parametrize("name", LIBRARIES)
def test_added_special_tokens_are_counted_and_found(opened, name):
    # Megatron's wrapper returns None, and SentencePiece's adapter refuses unless it is legacy.
    tokenizer = opened(name)
    ids = tokenizer.tokenize(text_for(tokenizer))
    size = tokenizer.vocab_size
    assert tokenizer.add_special_tokens(["<a>", "<b>", "<a>"]) == 2
    assert size <= tokenizer.vocab_size <= size + 2
    assert len(tokenizer.vocab) == tokenizer.vocab_size
    assert tokenizer.token_to_id("<a>") in tokenizer.additional_special_tokens_ids
    assert tokenizer.add_special_tokens(["<b>", "<c>"]) == 1
    found = [tokenizer.token_to_id(token) for token in ("<a>", "<b>", "<c>")]
    assert len({*found}) == 3
    assert tokenizer.inv_vocab[found[2]] == "<c>"
    assert tokenizer.tokenize(text_for(tokenizer)) == ids
    assert tokenizer.detokenize(found[:1], skip_special_tokens=True) == ""


@pytest.mark.parametrize("name", ["huggingface-nfc", "sentencepiece-v1", "rank-file"])
def test_special_tokens_get_ids_in_megatrons_order_and_keep_them(opened, name):
    given = {f"{role}_token": f"<{role}!>" for role in ("bos", "eos", "pad", "sep", "cls", "mask")}
    one = opened(name, **given, additional_special_tokens=["<a>"])
    ids = [
        one.token_to_id(token)
        for token in ("<mask!>", "<pad!>", "<sep!>", "<eos!>", "<bos!>", "<cls!>", "<a>")
    ]
    assert ids == list(range(ids[0], ids[0] + 7))
    assert one.additional_special_tokens_ids == ids[-1:]
    # Names that are added one after another get ids one after another, whatever their roles.
    tokenizer = opened(name)
    tokenizer.add_special_tokens(["<a>"])
    first = tokenizer.token_to_id("<a>")
    tokenizer.add_special_tokens({"bos_token": "<b>", "unk_token": "<u>", "pad_token": "<a>"})
    tokenizer.add_special_tokens({"additional_special_tokens": ["<c>"], "eos_token": "<e>"})
    ids = [tokenizer.token_to_id(token) for token in ("<a>", "<b>", "<u>", "<c>", "<e>")]
    assert ids == list(range(first, first + 5))
    assert [tokenizer.pad, tokenizer.bos, tokenizer.unk, tokenizer.eos] == [*ids[:3], ids[4]]
    assert tokenizer.additional_special_tokens_ids == ids[3:4]


def test_added_special_tokens_may_have_roles(opened):
    tokenizer = opened("huggingface-byte-level")
    assert tokenizer.additional_special_tokens_ids == []
    added = {"pad_token": "<pad>", "eos_token": "<|end|>", "additional_special_tokens": ["<a>"]}
    assert tokenizer.add_special_tokens(added) == 2
    assert tokenizer.pad == tokenizer.token_to_id("<pad>")
    assert tokenizer.eos == tokenizer.token_to_id("<|end|>")
    assert tokenizer.add_special_tokens({}) == 0
    assert added["additional_special_tokens"] == ["<a>"]


@pytest.mark.parametrize(
    ("given_tokens", "message"),
    [
        ("<a>", "one string"),
        ({"padding_token": "<a>"}, "no such special token; got 'padding_token'.*mean 'pad"),
        ([""], "has no name"),
        ({"pad_token": 3}, "has no name; got 3"),
    ],
    ids=["string", "key", "empty", "number"],
)
def test_special_tokens_that_cannot_be_added_are_refused(opened, given_tokens, message):
    tokenizer = opened("huggingface-byte-level")
    before = tokenizer.fingerprint()
    with pytest.raises(TokenizerError, match=message):
        tokenizer.add_special_tokens(given_tokens)
    assert tokenizer.fingerprint() == before


# Smaller members.


def test_the_files_that_were_named_are_told(tokenizer_path, tmp_path):
    document = json.loads(
        (tokenizer_path("huggingface-byte-level") / "tokenizer.json").read_text(encoding="utf-8")
    )
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.write_text(json.dumps(document["model"]["vocab"]), encoding="utf-8")
    merges.write_text(
        "#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in document["model"]["merges"]),
        encoding="utf-8",
    )
    tokenizer = MegatronTokenizer.from_pretrained(
        "GPT2BPETokenizer", {"library": "megatron"}, vocab_file=str(vocab), merges_file=str(merges)
    )
    assert (tokenizer.vocab_file, tokenizer.merges_file) == (str(vocab), str(merges))
    tokenizer.save_pretrained(tmp_path / "saved")
    theirs = MegatronTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs.vocab_file == str(tmp_path / "saved" / "vocab.json")
    assert theirs.tokenize("the parser") == tokenizer.tokenize("the parser")
    assert theirs.fingerprint() == tokenizer.fingerprint()
    theirs.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer_metadata.json").read_bytes() == (
        tmp_path / "saved" / "tokenizer_metadata.json"
    ).read_bytes()


@pytest.mark.parametrize(
    ("name", "sensitive"),
    [("sentencepiece-v1", False), ("huggingface-byte-level", True), ("huggingface-metaspace", 0)],
)
def test_it_is_told_whether_words_depend_on_the_space_before_them(opened, name, sensitive):
    assert opened(name).space_sensitive == bool(sensitive)


@pytest.mark.parametrize("name", ["huggingface-byte-level", "sentencepiece-v1", "rank-file"])
def test_files_of_documents_become_one_array(opened, tmp_path, name):
    awkward = pytest.importorskip("awkward")
    tokenizer = opened(name)
    texts = ["one", "", "naïve 🙂\nlines", "four"]
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, rows in zip(files, (texts[:3], texts[3:]), strict=True):
        file.write_text("\n\n".join(json.dumps({"body": text}) for text in rows), encoding="utf-8")
    documents = tokenizer.tokenize_files([str(file) for file in files], "body")
    assert documents.to_list() == [tokenizer.tokenize(text) for text in texts]
    # IndexedDatasetBuilder.add_documents of main.
    chunk = documents[1:4]
    assert np.asarray(awkward.num(chunk, axis=1)).tolist() == [
        len(tokenizer.tokenize(text)) for text in texts[1:4]
    ]
    flat = np.asarray(awkward.flatten(chunk), dtype=np.int32)
    assert flat.tolist() == [i for text in texts[1:4] for i in tokenizer.tokenize(text)]
    assert tokenizer.tokenize_files(str(files[1]), field="body").to_list() == [
        tokenizer.tokenize("four")
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "jsonl:2: the line is not JSON"), ('{"body": 3}', "jsonl:2: .*no such text; got body")],
    ids=["broken", "number"],
)
def test_a_line_that_holds_no_document_is_named(opened, tmp_path, line, message):
    file = tmp_path / "a.jsonl"
    file.write_text('{"body": "x"}\n' + line, encoding="utf-8")
    with pytest.raises(TokenizerError, match=message):
        opened("byte-level").tokenize_files(file, "body")
    with pytest.raises(TokenizerError, match=r"b\.jsonl: cannot read the file; got No such"):
        opened("byte-level").tokenize_files(tmp_path / "b.jsonl")


def test_a_tokenizer_does_not_mind_what_becomes_of_its_files(tokenizer_path, tmp_path):
    for name in ("huggingface-byte-level", "huggingface-metaspace", "json-rank-list", "rank-file"):
        folder = tmp_path / name
        source = tokenizer_path(name)
        shutil.copytree(source if source.is_dir() else source.parent, folder)
        ours = MegatronTokenizer.from_pretrained(
            folder if source.is_dir() else folder / source.name
        )
        shutil.rmtree(folder)
        text = "the parser ends here"
        ids, _ = ours.encode_with_byte_ends(text, parse_special=True)
        assert ours.detokenize(ids.tolist()) == text
        again = pickle.loads(pickle.dumps(ours))
        assert again.detokenize(ids.tolist()) == text
