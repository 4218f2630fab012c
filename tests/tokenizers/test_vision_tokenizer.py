"""Image tokens over every text library, in texts and in conversations."""

import copy
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.conversation import DEFAULT_IMAGE_TOKEN_INDEX, IGNORE_INDEX, IMAGE_TOKEN
from megatron_ext.conversation.images import IMAGE_TAGS
from megatron_ext.errors import ConfigError, ConversationError, TokenizerError
from megatron_ext.tokenizers import (
    MegatronTokenizer,
    MegatronTokenizerVision,
    TokenizerConfig,
    build_tokenizer,
)
from megatron_ext.tokenizers.vision_tokenizer import TaggedText
from tests.tokenizers.published import EVERY_STRETCH

LIBRARIES = {
    "sentencepiece-v3": "sentencepiece",
    **({"tekken": "tiktoken"} if EVERY_STRETCH else {}),
    "json-rank-list": "tiktoken",
    "rank-file": "tiktoken",
    "huggingface-byte-level": "huggingface",
    "huggingface-metaspace": "huggingface",
    "huggingface-wordpiece": "huggingface",
    "huggingface-unigram": "huggingface",
    "byte-level": "byte-level",
}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CONVERSATION = [
    {"role": "user", "content": "What is <image>, or <|end|>?"},
    {"role": "assistant", "content": "the parser"},
]


@pytest.fixture(scope="module")
def vision(tokenizer_path):
    """Name in ``LIBRARIES`` and options -> a multimodal tokenizer."""

    def built(name: str, **options: object) -> MegatronTokenizerVision:
        library = LIBRARIES[name]
        path = None if library == "byte-level" else tokenizer_path(name)
        return MegatronTokenizerVision(path, {"library": library}, **options)

    return built


@pytest.fixture(scope="module")
def chat(vision):
    """A byte-level BPE that tags images and has a prompt format."""
    return vision(
        "huggingface-byte-level",
        special_tokens=["<image>", "<img>", "</img>"],
        image_tag_type="internvl",
        chat_template=TEMPLATE,
        prompt_format="auto",
    )


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_image_token_is_inside_the_vocabulary_and_survives_decoding(vision, name):
    ours = vision(name)
    image = ours.image_token_id
    assert 0 <= image < ours.vocab_size == len(ours.vocab)
    assert ours.vocab[image] == ours.inv_vocab[image] == IMAGE_TOKEN
    ids = ours.tokenize("the parser <image> of")
    assert ids.count(image) == 1
    assert IMAGE_TOKEN in ours.detokenize(ids)
    assert IMAGE_TOKEN not in ours.detokenize(ids, skip_special_tokens=True)
    assert ours.convert_tokens_to_ids(IMAGE_TOKEN) == image
    assert ours.convert_tokens_to_ids([IMAGE_TOKEN, IMAGE_TOKEN]) == [image] * 2
    assert ours.get_special_tokens()[IMAGE_TOKEN] == image


@pytest.mark.parametrize("name", LIBRARIES)
def test_text_without_images_has_the_ids_of_the_text_tokenizer(vision, tokenizer, name):
    if name == "byte-level":
        plain = build_tokenizer(TokenizerConfig(library="byte-level"))
    else:
        plain = tokenizer(name)
    for text in ("the parser of é and 吾輩", "<s> the <|end|> </s>", ""):
        assert vision(name).tokenize(text) == plain.tokenize(text)
    assert vision(name).tokenize("<pad>") == plain.tokenize("<pad>")


@pytest.mark.parametrize("name", LIBRARIES)
def test_byte_ends_offsets_and_batches_agree_around_images(vision, name):
    ours = vision(name, special_tokens=["<img>", "</img>"], image_tag_type="internvl")
    text = "the <image> parser<img><image></img> é"
    ids, ends = ours.encode_with_byte_ends(text)
    assert ids.tolist() == ours.tokenize(text)
    assert sorted(ends) == ends.tolist()
    assert ends[-1] == len(text.encode())
    images = np.flatnonzero(ids == ours.image_token_id)
    assert [text[: ends[i]].endswith(IMAGE_TOKEN) for i in images] == [True, True]
    # The tags that were put in cover nothing; those in the text cover themselves.
    tags = [ours.token_to_id("<img>"), ours.token_to_id("</img>")]
    lengths = np.diff(ends, prepend=0)[np.isin(ids, tags)].tolist()
    assert lengths[:2] == [0, 0]
    assert lengths[2:] == [5, 6]
    offsets = ours.offsets(ids.tolist(), text)
    assert [text[offsets[i] :].lstrip().startswith(IMAGE_TOKEN) for i in images] == [True, True]
    flat, bounds = ours.text_to_flat_ids(["", text, "the"])
    rows = [flat[a:b].tolist() for a, b in pairwise(bounds)]
    assert rows == [ours.tokenize(part) for part in ("", text, "the")]
    assert [row.tolist() for row in ours.text_to_ids_batch([text, "the"])] == rows[1:]


def test_other_special_tokens_stay_text_unless_they_are_asked_for(vision):
    for parse, count in ((False, 0), (True, 1)):
        ours = vision("huggingface-byte-level", parse_special_tokens=parse)
        ids = ours.tokenize("a <image> <|end|>")
        assert ids.count(ours.token_to_id("<|end|>")) == count
        assert ids.count(ours.image_token_id) == 1


def test_ids_around_a_text_stay_around_a_text_with_images(vision):
    ours = vision("huggingface-metaspace", include_special_tokens=True)
    ids = ours.tokenize("the <image>")
    assert (ids[0], ids[-2], ids[-1]) == (1, ours.image_token_id, 2)


def test_some_of_the_names_may_be_in_the_vocabulary_already(vision):
    ours = vision("huggingface-byte-level", special_tokens=["<|end|>", "<a>", "<image>", "<b>"])
    plain = vision("huggingface-byte-level", special_tokens=["<image>"])
    assert ours.token_to_id("<|end|>") == plain.token_to_id("<|end|>")
    new = [ours.token_to_id(name) for name in ("<a>", "<image>", "<b>")]
    assert new == [plain.vocab_size - 1, plain.vocab_size, plain.vocab_size + 1]
    assert vision("huggingface-byte-level", special_tokens=["<b>"]).image_token_id == new[1]


@given(
    st.lists(st.sampled_from(["<image>", "<img>", "</img>", "a", "é", " ", "<img><image></img>"]))
)
def test_tagging_is_idempotent_and_maps_every_byte_back(parts):
    text = "".join(parts)
    tagged = TaggedText.of(text, IMAGE_TAGS["internvl"])
    assert tagged.text == IMAGE_TAGS["internvl"](text)
    assert TaggedText.of(tagged.text, IMAGE_TAGS["internvl"]).text == tagged.text
    raw = tagged.text.encode()
    back = tagged.original_ends(np.arange(len(raw) + 1))
    moved = np.diff(back) == 1
    assert bytes(np.frombuffer(raw, np.uint8)[moved]) == text.encode()
    assert (back[0], back[-1]) == (0, len(text.encode()))


def test_a_conversation_is_tagged_like_its_texts_and_not_changed(chat):
    parts = [{"type": "image"}, {"type": "text", "text": IMAGE_TOKEN}]
    conversation = [
        {"role": "user", "content": f"{IMAGE_TOKEN}hello"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    before = copy.deepcopy(conversation)
    tagged = chat.apply_image_tag(conversation)
    assert tagged[0] == {"role": "user", "content": "<img><image></img>hello"}
    assert tagged[1]["content"] == [
        {"type": "image"},
        {"type": "text", "text": "<img><image></img>"},
    ]
    assert tagged[2] == conversation[2]
    assert conversation == before


@pytest.mark.parametrize(
    ("image_tag_type", "shown"),
    [("nvlm", "<Image><image></Image>hi"), ("internvl", "<img><image></img>hi"), ("", "<image>hi")],
)
def test_images_have_the_tags_of_their_type(vision, image_tag_type, shown):
    ours = vision("huggingface-byte-level", image_tag_type=image_tag_type)
    assert ours.detokenize(ours.tokenize("<image>hi")) == shown
    assert ours.detokenize(ours.tokenize(shown)) == shown


def test_a_conversation_shows_its_images_and_stays_as_it_is(chat):
    conversation = copy.deepcopy(CONVERSATION)
    for _ in range(2):
        ids, target = chat.tokenize_conversation(conversation, True, False)
        assert conversation == CONVERSATION
        assert chat.detokenize(ids) == (
            "user: What is <img><image></img>, or <|end|>?;assistant: the parser;"
        )
    assert ids.tolist().count(chat.image_token_id) == 1
    assert chat.token_to_id("<|end|>") not in ids
    trained = target[target != IGNORE_INDEX]
    assert chat.detokenize(trained) == " the parser;"
    prompt = chat.tokenize(conversation[:1])
    assert chat.detokenize(prompt).endswith("?;assistant: ")
    assert prompt[:-1] == ids[: len(prompt) - 1].tolist()


def test_a_chat_template_of_the_callers_shows_images_too(chat):
    ids = chat.apply_chat_template(CONVERSATION, "{{ messages[0].content }}")
    assert ids.count(chat.image_token_id) == 1
    text = chat.apply_chat_template(CONVERSATION, "{{ messages[0].content }}", tokenize=False)
    assert text == "What is <img><image></img>, or <|end|>?"


def test_an_image_in_an_answer_is_not_trained_on(chat):
    answer = [CONVERSATION[0], {"role": "assistant", "content": "<image>"}]
    with pytest.raises(ConversationError, match="an assistant message holds <image>"):
        chat.tokenize_conversation(answer, True, False)
    assert chat.image_token_id in chat.tokenize_conversation(answer, False, False)


def test_a_system_message_is_forced_only_where_the_format_has_one(vision):
    options = {"special_tokens": ["<|im_start|>", "<|im_end|>"], "pad_token": "<|end|>"}
    ours = vision(
        "huggingface-byte-level", prompt_format="qwen2p5", force_system_message=True, **options
    )
    shown = ours.detokenize(
        ours.tokenize([{"role": "system", "content": "Be brief."}, *CONVERSATION])
    )
    assert "You are Qwen" in shown
    assert "Be brief." not in shown
    with pytest.raises(ConfigError, match="force_system_message needs a system message"):
        vision(
            "huggingface-byte-level",
            prompt_format="auto",
            chat_template=TEMPLATE,
            force_system_message=True,
        )


def test_null_multimodal_has_megatrons_placeholder_for_an_image():
    ours = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "null-multimodal"}, vocab_size=10000
    )
    assert isinstance(ours, MegatronTokenizerVision)
    assert (ours.vocab_size, ours.eod, ours.eos_id, ours.pad) == (10001, 10000, 10000, -1)
    assert ours.tokenize("1 22 333") == [1, 22, 333]
    assert ours.detokenize([1, 22, 333]) == "1 22 333"
    for text in ("1 2 <image>", "1  2   <image>", "1 2\n<image> "):
        assert ours.tokenize(text) == ours.convert_tokens_to_ids(text) == [1, 2, -200]
    assert ours.convert_tokens_to_ids("<image>") == DEFAULT_IMAGE_TOKEN_INDEX
    assert ours.convert_tokens_to_ids("7") == 7
    assert ours.offsets([1, -200, 2], "1 <image> 2") == [0, 2, 10]
    assert ours.get_special_tokens() == {"<image>": -200}
    two = MegatronTokenizerVision(None, {"library": "null"}, vocab_size=5, add_eod=False)
    assert (two.vocab_size, two.eod) == (5, 4)


def test_placeholders_decode_to_images_and_padding_to_nothing(vision):
    ours = vision("huggingface-byte-level")
    a = ours.token_to_id("a")
    ids = np.array([a, DEFAULT_IMAGE_TOKEN_INDEX, -1, IGNORE_INDEX, a])
    assert ours.detokenize(ids) == "a<image>a"
    with pytest.raises(TokenizerError, match="outside the vocabulary"):
        ours.detokenize([ours.vocab_size])


def test_what_megatrons_vision_tokenizers_lack_is_there(vision):
    ours = vision("huggingface-byte-level", special_tokens=["<image>"], pad_token="<pad>")
    end = ours.token_to_id("<|end|>")
    assert (ours.eos, ours.eos_id, ours.eod, ours.bos, ours.bos_id) == (end, end, end, None, None)
    assert ours.pad == ours.pad_id == ours.token_to_id("<pad>")
    plain = vision("huggingface-byte-level").unique_identifiers
    tagged = vision("huggingface-byte-level", image_tag_type="nvlm").unique_identifiers
    assert (plain["image_tag_type"], tagged["image_tag_type"]) == ("", "nvlm")
    assert ours.add_special_tokens(["<video>", "<image>"]) == 1
    assert ours.vocab_size == ours.token_to_id("<video>") + 1
    assert ours.tokenize("a<image>")[-1] == ours.image_token_id


def test_a_saved_multimodal_tokenizer_comes_back_whole(chat, tmp_path):
    chat.save_pretrained(tmp_path / "saved")
    again = MegatronTokenizer.from_pretrained(tmp_path / "saved")
    assert isinstance(again, MegatronTokenizerVision)
    assert again.unique_identifiers["image_tag_type"] == "internvl"
    assert again.get_special_tokens() == chat.get_special_tokens()
    ids, target = again.tokenize_conversation(CONVERSATION, True, False)
    own_ids, own_target = chat.tokenize_conversation(CONVERSATION, True, False)
    assert ids.tolist() == own_ids.tolist()
    assert target.tolist() == own_target.tolist()


def test_it_is_built_from_a_configuration_and_from_megatrons_call(tokenizer_path):
    path = str(tokenizer_path("huggingface-byte-level"))
    options = {"image_tag_type": "nvlm", "prompt_format": "auto", "chat_template": TEMPLATE}
    config = TokenizerConfig(
        model=path, mode="multimodal", special_tokens=("<image>", "<a>"), **options
    )
    called = MegatronTokenizer.from_pretrained(
        tokenizer_path=path,
        metadata_path={"library": "multimodal"},
        special_tokens=["<image>", "<a>"],
        **options,
    )
    built = build_tokenizer(config)
    for ours in (built, called):
        assert isinstance(ours, MegatronTokenizerVision)
        assert ours.detokenize(ours.tokenize("<image>hello")) == "<Image><image></Image>hello"
    assert built.get_special_tokens() == called.get_special_tokens()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"image_tag_type": "png"}, ConfigError, "unknown image tag type; got 'png'"),
        ({"no_such": 1}, TokenizerError, "has no such option; got 'no_such'"),
    ],
)
def test_options_that_cannot_be_are_refused(vision, options, error, message):
    with pytest.raises(error, match=message):
        vision("huggingface-byte-level", **options)


@pytest.mark.parametrize("tokens", ["<none>", ["a", "<none>"]])
def test_a_token_that_is_not_there_never_becomes_the_unknown_one(vision, tokens):
    with pytest.raises(TokenizerError, match="the vocabulary has no such token; got '<none>'"):
        vision("huggingface-byte-level").convert_tokens_to_ids(tokens)
