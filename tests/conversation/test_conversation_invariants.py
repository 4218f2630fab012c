"""What holds for every conversation, prompt format and library.

* Trained is what the assistant says with its stop marker, and nothing else.
* What stands before the first answer's tokens is the prompt that a server would send.
* No message is changed.
* A target is never all masked or all trained.
* Content makes no control token.
"""

import copy
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from megatron_ext.conversation import (
    IGNORE_INDEX,
    IMAGE_TOKEN,
    PROMPT_FORMAT_REGISTRY,
    ConversationTokenizer,
    EncodedConversation,
    PromptConfig,
    Rendered,
    Span,
    encode_conversation,
    prompt_config_of,
    tokenize_conversation,
)
from megatron_ext.conversation.message import byte_offsets
from megatron_ext.errors import ConversationError
from tests.conversation.byte_tokenizer import CONTROL_TOKENS, ByteTokenizer
from tests.conversation.library_tokenizers import LIBRARIES, OWN_TEMPLATE
from tests.conversation.random_conversations import conversations as random_conversations

Conversation = list[dict[str, Any]]
TokenizerOf = Callable[[str], ConversationTokenizer]
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
    lambda pair: [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
)
conversations = st.builds(
    lambda system, pairs: [*system, *(message for pair in pairs for message in pair)],
    st.lists(contents.map(lambda text: {"role": "system", "content": text}), max_size=1),
    st.lists(turns, min_size=1, max_size=3),
)

ALL_TEXT = bool(os.environ.get("MEGATRON_EXT_ALL_TEXT"))


def libraries_of(names: Iterable[str]) -> list[tuple[str, str]]:
    """Library and format: with bytes and in turn with one of the others, or with all of them."""
    others = [library for library in LIBRARIES if library != "bytes"]
    return [
        (library, name)
        for place, name in enumerate(names)
        for library in (LIBRARIES if ALL_TEXT else ("bytes", others[place % len(others)]))
    ]


across = pytest.mark.parametrize("library", LIBRARIES)
formats = pytest.mark.parametrize(("library", "name"), libraries_of(FORMATS))
every_format = pytest.mark.parametrize(("library", "name"), libraries_of(PROMPT_FORMAT_REGISTRY))
few_examples = settings(
    max_examples=60 if ALL_TEXT else 3,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
    ],
)
examples = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def config_of(name: str, tokenizer: ConversationTokenizer) -> PromptConfig:
    if name == "own":
        return PromptConfig(name=name, pad_token_id=0, custom_chat_template=OWN_CHATML)
    return prompt_config_of(name, tokenizer)


@cache
def conversations_for(name: str) -> st.SearchStrategy[Conversation]:
    """Random conversations of what a format has a place for."""
    tokenizer = ByteTokenizer(OWN_TEMPLATE)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    question = {"role": "user", "content": "x"}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}

    def takes(*messages: dict[str, Any]) -> bool:
        try:
            encode_conversation(tokenizer, messages, prompt_config_of(name, tokenizer))
        except ConversationError:
            return False
        return True

    return random_conversations(
        tools=takes(question, {"role": "tool", "content": "x"}), calls=takes(question, called)
    )


def encode_or_reject(
    tokenizer: ConversationTokenizer,
    conversation: Conversation,
    name: str,
    add_generation_prompt: bool = False,
) -> EncodedConversation:
    """What a format makes of a conversation; hypothesis tells if it refuses too many."""
    config = prompt_config_of(name, tokenizer)
    try:
        return encode_conversation(
            tokenizer, conversation, config, add_generation_prompt=add_generation_prompt
        )
    except ConversationError:
        reject()


def tokens_with_spans(encoded: EncodedConversation) -> Iterator[tuple[int, bool, list[Span]]]:
    """Id of each token, whether it is trained, and where its characters come from."""
    starts = byte_offsets(encoded.text)
    begins = np.concatenate(([0], encoded.byte_ends))[:-1]
    lows = np.array([starts[span.start] for span in encoded.spans])
    rows = zip(encoded.ids, encoded.trained, begins, encoded.byte_ends, strict=True)
    for token_id, trained, begin, end in rows:
        first = int(np.searchsorted(lows, begin, side="right")) - 1
        last = int(np.searchsorted(lows, end, side="left"))
        yield int(token_id), bool(trained), list(encoded.spans[max(first, 0) : last])


@formats
@examples
@given(conversation=conversations)
def test_trained_is_what_the_assistant_says_with_its_stop_marker(
    tokenizer_of: TokenizerOf, library: str, name: str, conversation: Conversation
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


@every_format
@few_examples
@given(data=st.data())
def test_a_trained_token_is_of_an_answer_and_a_target_is_never_all_masked_nor_all_trained(
    tokenizer_of: TokenizerOf, library: str, name: str, data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(library)
    conversation = data.draw(conversations_for(name))
    before = copy.deepcopy(conversation)
    encoded = encode_or_reject(tokenizer, conversation, name)
    assert conversation == before
    config = prompt_config_of(name, tokenizer)
    assert_trained_is_of_answers(encoded, conversation, config)
    try:
        ids, target = tokenize_conversation(tokenizer, conversation, config, True, True)
    except ConversationError:
        # An answer that says nothing, or that the template leaves out, is refused by name.
        reject()
    assert conversation == before
    trained = target != IGNORE_INDEX
    np.testing.assert_array_equal(target[trained], ids[trained])
    assert ids.dtype == target.dtype == np.int64
    assert trained.any()
    assert trained.all() == config.skip_masking or name == "identity"


def assert_trained_is_of_answers(
    encoded: EncodedConversation, conversation: Conversation, config: PromptConfig
) -> None:
    """A trained token is of an answer, and an answer is trained."""
    if config.skip_masking:
        assert encoded.trained.all()
        return
    answers = {i for i, message in enumerate(conversation) if message["role"] == "assistant"}
    for _, trained, spans in tokens_with_spans(encoded):
        sources = [span.provenance for span in spans]
        says = [p.message in answers and p.field not in ("role", "name") for p in sources]
        if not spans:
            # A space that the library puts before a word has no character of its own.
            continue
        if trained:
            # The last character decides: a first word may bring white space of the template.
            assert says[-1] or (spans[-1].is_template and sources[-1].turn in answers)
            assert all(p.source in ("template", "message") for p in sources)
            assert all(p.message in {None, *answers} for p in sources)
        else:
            assert not all(says)


@every_format
@few_examples
@given(data=st.data())
def test_the_masked_prefix_is_the_prompt(
    tokenizer_of: TokenizerOf, library: str, name: str, data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(library)
    conversation = data.draw(conversations_for(name))
    answer = {"role": "assistant", "content": data.draw(st.sampled_from(["Yes.", "é", "2\n3"]))}
    while conversation[-1]["role"] == "assistant":
        del conversation[-1]
    # The space at the end of Mistral's prompt is the answer's first character.
    prompt = encode_or_reject(tokenizer, conversation, name, name != "mistral")
    full = encode_or_reject(tokenizer, [*conversation, answer], name)
    shared = prompt.text
    if not full.text.startswith(shared):
        # The prompt goes on with the begin of the thinking, which history is shown without.
        shared = shared[: shared.rindex("<think>")]
        assert full.text.startswith(shared)
    length = int(np.searchsorted(prompt.byte_ends, len(shared.encode()), side="right"))
    if library == "bytes":
        np.testing.assert_array_equal(full.ids[:length], prompt.ids[:length])
    if full.ids[:length].tolist() != prompt.ids[:length].tolist():
        # The answer's first characters have merged with the prompt's last ones.
        return
    assert full.trained[length]
    np.testing.assert_array_equal(full.trained[:length], prompt.trained[:length])


@every_format
@few_examples
@given(data=st.data())
def test_content_makes_no_control_token(
    tokenizer_of: TokenizerOf, library: str, name: str, data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(library)
    conversation = data.draw(conversations_for(name))
    encoded = encode_or_reject(tokenizer, conversation, name, data.draw(st.booleans()))
    for token_id, _, spans in tokens_with_spans(encoded):
        if tokenizer.is_control(token_id):
            sources = {span.provenance.field for span in spans if not span.is_template}
            assert sources <= {"role"}
    # Each marker that the template has written is there: content breaks none of them.
    if library == "bytes":
        written = [
            encoded.text[start:end]
            for start, end in Rendered(encoded.text, encoded.spans, False).control_ranges
        ]
        names = "|".join(map(re.escape, sorted(CONTROL_TOKENS, key=len, reverse=True)))
        markers = sum(len(re.findall(names, text)) for text in written)
        assert markers == sum(map(tokenizer.is_control, encoded.ids.tolist()))


@across
@examples
@given(text=st.text(st.characters(exclude_categories=["Cs"])), answer=st.text("ab", min_size=1))
def test_any_characters_may_be_said(
    tokenizer_of: TokenizerOf, library: str, text: str, answer: str
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
