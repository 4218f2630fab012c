"""What holds for every conversation, prompt format and library.

* Trained is what the assistant says with its stop marker, and nothing else.
* What stands before the first answer's tokens is the prompt that a server would send.
* No message is changed.
* A target is never all masked or all trained.
* Content makes no control token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import CONTROL_TOKENS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from library_tokenizers import LIBRARIES

from megatron_ext.conversation import (
    IGNORE_INDEX,
    IMAGE_TOKEN,
    ConversationTokenizer,
    PromptConfig,
    encode_conversation,
    prompt_config_of,
    tokenize_conversation,
)
from megatron_ext.conversation.training_mask import byte_offsets

Conversation = list[dict[str, str]]
Pieces = Iterator[tuple[str, bool]]
"""Text, and whether it is trained."""


def identity(conversation: Conversation) -> Pieces:
    for message in conversation:
        yield message["content"], message["role"] == "assistant"


def nano_v2(conversation: Conversation) -> Pieces:
    for message in conversation:
        number = 10 if message["role"] == "system" else 11
        yield f"<SPECIAL_{number}>{message['role'].capitalize()}\n", False
        is_answer = message["role"] == "assistant"
        content = message["content"]
        if not is_answer:
            content = content.replace("/think", "").replace("/no_think", "")
        yield content.strip() + "\n" + "<SPECIAL_12>\n" * is_answer, is_answer


def mistral(conversation: Conversation) -> Pieces:
    yield "<s>", False
    for message in conversation:
        if message["role"] == "user":
            yield f"[INST] {message['content']}[/INST]", False
        elif message["role"] == "assistant":
            yield f" {message['content']}</s>", True


def llama(conversation: Conversation) -> Pieces:
    yield "<s>", False
    for message in conversation:
        yield f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False
        yield f"{message['content'].strip()}<|eot_id|>", message["role"] == "assistant"


def aligned(conversation: Conversation) -> Pieces:
    yield "<s>", False
    for message in conversation:
        yield f"{message['role'].capitalize()}\n", False
        yield f"{message['content']}\n[PREFIX]", message["role"] == "assistant"


def chatml(conversation: Conversation) -> Pieces:
    for message in conversation:
        yield f"<|im_start|>{message['role']}\n", False
        yield f"{message['content']}<|im_end|>\n", message["role"] == "assistant"


OWN_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORMATS: dict[str, Callable[[Conversation], Pieces]] = {
    "identity": identity,
    "nemotron-nano-v2": nano_v2,
    "mistral": mistral,
    "llama3p1": llama,
    "nemotron5-aligned": aligned,
    "qwen2p5": chatml,
    "own": chatml,
}

words = st.sampled_from(
    [
        *("Hello", " world", "2", " ", "\n", "\n\n", "é", "👍", "日本", "'s", "A", ".", "\t"),
        *("<|im_", "end|>", "<|", "[INST]", "[/INST]", "</s", "<SPECIAL_", "12>", "\\u003c"),
        *CONTROL_TOKENS,
    ]
)
contents = st.lists(words, max_size=6).map("".join)
answers = contents.filter(lambda text: text.strip() and IMAGE_TOKEN not in text)
turns = st.tuples(contents, answers).map(
    lambda pair: [
        {"role": "user", "content": pair[0]},
        {"role": "assistant", "content": pair[1]},
    ]
)
conversations = st.builds(
    lambda system, pairs: [*system, *(message for pair in pairs for message in pair)],
    st.lists(contents.map(lambda text: {"role": "system", "content": text}), max_size=1),
    st.lists(turns, min_size=1, max_size=3),
)

across = pytest.mark.parametrize("library", LIBRARIES)
formats = pytest.mark.parametrize("name", FORMATS)
examples = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def config_of(name: str, tokenizer: ConversationTokenizer) -> PromptConfig:
    if name == "own":
        return PromptConfig(name=name, pad_token_id=0, custom_chat_template=OWN_CHATML)
    return prompt_config_of(name, tokenizer)


@across
@formats
@examples
@given(conversation=conversations)
def test_trained_is_what_the_assistant_says_with_its_stop_marker(
    tokenizer_of: Callable[[str], ConversationTokenizer],
    library: str,
    name: str,
    conversation: Conversation,
) -> None:
    tokenizer = tokenizer_of(library)
    before = copy.deepcopy(conversation)
    encoded = encode_conversation(tokenizer, conversation, config_of(name, tokenizer))
    pieces = list(FORMATS[name](conversation))
    assert encoded.text == "".join(text for text, _ in pieces)
    assert conversation == before
    flags = np.repeat([flag for _, flag in pieces], [len(text.encode()) for text, _ in pieces])
    begins = np.concatenate(([0], encoded.byte_ends[:-1]))
    for begin, end, trained in zip(begins, encoded.byte_ends, encoded.trained, strict=True):
        inside = flags[begin:end]
        if begin == end or inside.all() == trained:
            continue
        # A first word that begins with white space of the template.
        assert trained
        assert encoded.text.encode()[begin:end][~inside].isspace()
        assert inside[-1]


@across
@formats
@examples
@given(conversation=conversations)
def test_the_masked_prefix_is_the_prompt(
    tokenizer_of: Callable[[str], ConversationTokenizer],
    library: str,
    name: str,
    conversation: Conversation,
) -> None:
    tokenizer = tokenizer_of(library)
    config = config_of(name, tokenizer)
    # The space at the end of Mistral's prompt is the answer's first character.
    add_generation_prompt = name != "mistral"
    prompt = tokenize_conversation(
        tokenizer, conversation[:-1], config, False, add_generation_prompt
    )
    ids, target = tokenize_conversation(tokenizer, conversation, config, True, False)
    if library == "bytes":
        np.testing.assert_array_equal(ids[: len(prompt)], prompt)
    if ids[: len(prompt)].tolist() != prompt.tolist():
        # The answer's first characters have merged with the prompt's last ones.
        return
    assert target[len(prompt)] == ids[len(prompt)]
    earlier = encode_conversation(tokenizer, conversation[:-1], config)
    last = int(np.flatnonzero(earlier.trained).max(initial=-1)) + 1
    assert (target[last : len(prompt)] == IGNORE_INDEX).all()


@across
@formats
@examples
@given(conversation=conversations)
def test_a_target_is_never_all_masked_or_all_trained(
    tokenizer_of: Callable[[str], ConversationTokenizer],
    library: str,
    name: str,
    conversation: Conversation,
) -> None:
    tokenizer = tokenizer_of(library)
    ids, target = tokenize_conversation(
        tokenizer, conversation, config_of(name, tokenizer), True, True
    )
    trained = target != IGNORE_INDEX
    np.testing.assert_array_equal(target[trained], ids[trained])
    assert ids.dtype == target.dtype == np.int64
    if name != "identity":
        assert trained.any()
        assert not trained.all()


@across
@formats
@examples
@given(conversation=conversations)
def test_content_makes_no_control_token(
    tokenizer_of: Callable[[str], ConversationTokenizer],
    library: str,
    name: str,
    conversation: Conversation,
) -> None:
    tokenizer = tokenizer_of(library)
    config = config_of(name, tokenizer)
    benign: list[Any] = [message | {"content": "x"} for message in conversation]
    controls = [
        [i for i in ids.tolist() if tokenizer.is_control(i)]
        for ids in (
            tokenize_conversation(tokenizer, messages, config, False, True)
            for messages in (conversation, benign)
        )
    ]
    assert controls[0] == controls[1]


@across
@examples
@given(text=st.text(st.characters(exclude_categories=["Cs"])), answer=st.text("ab", min_size=1))
def test_any_characters_may_be_said(
    tokenizer_of: Callable[[str], ConversationTokenizer], library: str, text: str, answer: str
) -> None:
    tokenizer = tokenizer_of(library)
    conversation = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    encoded = encode_conversation(tokenizer, conversation, config_of("qwen2p5", tokenizer))
    starts = byte_offsets(encoded.text)
    ((start, end),) = encoded.trained_ranges
    assert encoded.text[start:end] == f"{answer}<|im_end|>\n"
    begins = np.concatenate(([0], encoded.byte_ends[:-1]))[encoded.trained]
    assert begins.min() >= starts[start] - 1
    assert encoded.byte_ends[encoded.trained].max() == starts[end]
