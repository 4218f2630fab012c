"""Contents may be lists of parts, whether the template takes them or not."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.conversation import (
    encode_conversation,
    image_tags,
    prompt_config_of,
    tokenize_conversation,
)
from megatron_ext.conversation.shown_conversation import takes_parts
from megatron_ext.errors import ConversationError
from tests.conversation.byte_tokenizer import ByteTokenizer

PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content | trim }}<|im_end|>{% endfor %}"
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% elif part.type == 'image' %}<|image|>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}"
)
USERS_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'user' and m.content is not string %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% else %}{{ m.content + '' }}{% endif %}<|im_end|>{% endfor %}"
)
NAMES = ("<s>", "</s>", "<unk>", "<pad>", "<|im_end|>", "<|image|>", "<image>", "<img>", "</img>")


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": [text_part("Wie "), text_part("geht's? <|im_end|>")]},
    {"role": "assistant", "content": [text_part("Gut"), text_part(".")]},
]
IMAGES: list[dict[str, Any]] = [
    {"role": "user", "content": [text_part("Was ist "), {"type": "image"}, text_part("?")]},
    {"role": "assistant", "content": "Ein Hund."},
]


def tokenizer_of(template: str) -> ByteTokenizer:
    return ByteTokenizer(template, control_tokens=NAMES)


@pytest.mark.parametrize("template", [PLAIN, PARTS, USERS_PARTS])
def test_parts_of_text_read_as_the_text(template: str) -> None:
    tokenizer = tokenizer_of(template)
    config = prompt_config_of("auto", tokenizer)
    whole = [m | {"content": "".join(part["text"] for part in m["content"])} for m in CONVERSATION]
    in_parts = tokenize_conversation(tokenizer, CONVERSATION, config, True, False)
    as_text = tokenize_conversation(tokenizer, whole, config, True, False)
    for ours, theirs in zip(in_parts, as_text, strict=True):
        assert ours.tolist() == theirs.tolist()
    _, target = in_parts
    assert tokenizer.decode(target[target >= 0].tolist()) == "Gut.<|im_end|>"


def test_it_is_told_from_the_template_whose_parts_it_takes() -> None:
    for template, roles in ((PLAIN, ""), (PARTS, "user assistant system"), (USERS_PARTS, "user")):
        taken = [
            role
            for role in ("user", "assistant", "system")
            if takes_parts(template, role, ["text"], {})
        ]
        assert sorted(taken) == sorted(roles.split())


def test_a_template_writes_its_own_images_as_control_tokens() -> None:
    tokenizer = tokenizer_of(PARTS)
    encoded = encode_conversation(tokenizer, IMAGES, prompt_config_of("auto", tokenizer))
    assert encoded.text == "user:Was ist <|image|>?<|im_end|>assistant:Ein Hund.<|im_end|>"
    assert encoded.ids.tolist().count(tokenizer.token_to_id("<|image|>")) == 1


def test_images_have_their_place_and_tags_where_the_template_takes_text_alone() -> None:
    tokenizer = tokenizer_of(PLAIN)
    config = prompt_config_of("auto", tokenizer)
    tags = image_tags("internvl")
    encoded = encode_conversation(tokenizer, IMAGES, config, apply_image_tag_fn=tags)
    assert encoded.text.startswith("user:Was ist <img><image></img>?<|im_end|>")
    assert tokenizer.token_to_id("<image>") in encoded.ids.tolist()
    with pytest.raises(
        ConversationError, match=r"^conversation\[0\].content\[1\]: neither .*image"
    ):
        encode_conversation(tokenizer, IMAGES, config)


def test_callers_lists_stay_as_they_are() -> None:
    tokenizer = tokenizer_of(PLAIN)
    before = repr(CONVERSATION)
    tokenize_conversation(tokenizer, CONVERSATION, prompt_config_of("auto", tokenizer), True, False)
    assert repr(CONVERSATION) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"text": "x"}], r"^conversation\[0\].content\[0\]: this is no part of a content"),
        ([text_part("x"), "y"], r"^conversation\[0\].content\[1\]: this is no part"),
        ([{"type": "text"}], r"^conversation\[0\].content\[0\]: this is no part"),
        ([{"type": "audio"}], r"^conversation\[0\].content\[0\]: neither the template"),
        ([text_part("\ud800")], r"^conversation\[0\].content\[0\]: .*lone surrogate"),
        (7, r"^conversation\[0\]: the content is not text; got int"),
    ],
)
def test_what_is_no_content_is_refused_with_its_place(content: Any, message: str) -> None:
    tokenizer = tokenizer_of(PLAIN)
    conversation = [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]
    with pytest.raises(ConversationError, match=message):
        encode_conversation(tokenizer, conversation, prompt_config_of("auto", tokenizer))


def test_a_part_that_the_template_would_leave_out_is_refused_or_becomes_text() -> None:
    template = PARTS.replace("{% elif part.type == 'image' %}<|image|>", "")
    tokenizer = tokenizer_of(template)
    config = prompt_config_of("auto", tokenizer)
    with pytest.raises(
        ConversationError, match=r"^conversation\[0\].content\[1\]: neither .*image"
    ):
        encode_conversation(tokenizer, IMAGES, config)
    encoded = encode_conversation(tokenizer, IMAGES, config, apply_image_tag_fn=image_tags(""))
    assert encoded.text.startswith("user:Was ist <image>?<|im_end|>")


def test_an_image_that_is_written_in_a_part_of_text_is_an_image() -> None:
    tokenizer = tokenizer_of(PARTS)
    messages = [{"role": "user", "content": [text_part("<image>Was?")]}, IMAGES[1]]
    encoded = encode_conversation(
        tokenizer,
        messages,
        prompt_config_of("auto", tokenizer),
        apply_image_tag_fn=image_tags("internvl"),
    )
    assert encoded.text.startswith("user:<img><image></img>Was?")
    assert encoded.ids.tolist().count(tokenizer.token_to_id("<image>")) == 1
