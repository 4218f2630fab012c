"""A policy says which messages are trained, and which parts of them."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_ext.conversation import (
    EncodedConversation,
    TrainingPolicy,
    encode_conversation,
    prompt_config_of,
    tokenize_conversation,
)
from megatron_ext.errors import ConfigError, ConversationError
from tests.conversation.byte_tokenizer import ByteTokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
CALL_TEXT = '<call>{"name": "f", "arguments": {}}</call>'
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello.", "tool_calls": [CALL]},
    {"role": "tool", "content": "21"},
    {"role": "assistant", "content": "Done.", "reasoning_content": "Hm."},
]


def encoded(
    messages: list[dict[str, Any]], policy: TrainingPolicy, template: str = TEMPLATE
) -> EncodedConversation:
    tokenizer = ByteTokenizer(template)
    config = replace(prompt_config_of("auto", tokenizer), policy=policy)
    return encode_conversation(tokenizer, messages, config)


def trained(
    messages: list[dict[str, Any]], policy: TrainingPolicy, template: str = TEMPLATE
) -> list[str]:
    """The trained stretches of text, by tokens."""
    result = encoded(messages, policy, template)
    text = ByteTokenizer(template).decode
    stretches: list[list[int]] = []
    before = False
    for token, is_trained in zip(result.ids.tolist(), result.trained.tolist(), strict=True):
        if is_trained:
            stretches = stretches if before else [*stretches, []]
            stretches[-1].append(token)
        before = is_trained
    return [text(stretch) for stretch in stretches]


FIRST = f"Hello.{CALL_TEXT}<|im_end|>\n"
LAST = "<think>\nHm.\n</think>\n\nDone.<|im_end|>\n"


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (TrainingPolicy(), [FIRST, LAST]),
        (TrainingPolicy.of("all-assistant"), [FIRST, LAST]),
        (TrainingPolicy.of("last-assistant"), [LAST]),
        (TrainingPolicy.of("tool"), ["21<|im_end|>\n"]),
        (TrainingPolicy.of("assistant, user"), ["Hi<|im_end|>\n", FIRST, LAST]),
        (TrainingPolicy.of("system,tool"), ["Be brief.<|im_end|>\n", "21<|im_end|>\n"]),
        (TrainingPolicy(thinking=False), [FIRST, "Done.<|im_end|>\n"]),
        (TrainingPolicy(tool_calls=False), ["Hello.", "<|im_end|>\n", LAST]),
        (
            TrainingPolicy.of("last-assistant", thinking=False, tool_calls=False),
            ["Done.<|im_end|>\n"],
        ),
    ],
)
def test_a_policy_names_messages_and_their_parts(
    policy: TrainingPolicy, expected: list[str]
) -> None:
    assert trained(TURNS, policy) == expected


@pytest.mark.parametrize(
    ("stated", "policy", "expected"),
    [
        ({2: False}, TrainingPolicy(), [LAST]),
        ({4: False}, TrainingPolicy(), [FIRST]),
        ({3: True}, TrainingPolicy(), [FIRST, "21<|im_end|>\n", LAST]),
        ({2: True}, TrainingPolicy.of("last-assistant"), [FIRST, LAST]),
        ({2: True, 4: None}, TrainingPolicy.of("user"), ["Hi<|im_end|>\n", FIRST]),
    ],
)
def test_what_a_message_says_of_itself_wins(
    stated: dict[int, bool | None], policy: TrainingPolicy, expected: list[str]
) -> None:
    messages = [m | {"train": stated[i]} if i in stated else m for i, m in enumerate(TURNS)]
    assert trained(messages, policy) == expected


def test_no_template_sees_what_a_message_says_of_its_training() -> None:
    template = "{% for m in messages %}{{ m.content }}{{ m.train }}{{ m | length }}{% endfor %}"
    messages = [{"role": "user", "content": "x", "train": False}]
    assert encoded(messages, TrainingPolicy(), template).text == "x2"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_thinking_is_trained_or_left_out_whatever_the_name_of_its_field(
    field: str, read: str
) -> None:
    template = TEMPLATE.replace("reasoning_content", read)
    messages = [TURNS[1], {"role": "assistant", "content": "Done.", field: "Hm."}]
    whole = trained(messages, TrainingPolicy(), template)
    assert whole == ["<think>\nHm.\n</think>\n\nDone.<|im_end|>\n"]
    assert trained(messages, TrainingPolicy(thinking=False), template) == ["Done.<|im_end|>\n"]


def test_every_message_that_is_not_trained_has_a_reason() -> None:
    reasons = encoded(TURNS, TrainingPolicy.of("last-assistant")).excluded
    assert reasons == {
        0: "the role system is not trained",
        1: "the role user is not trained",
        2: "only the last message of the role assistant is trained",
        3: "the role tool is not trained",
    }
    calls_only = [*TURNS[:2], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert encoded(calls_only, TrainingPolicy(tool_calls=False)).excluded[2] == (
        "the policy trains nothing of what it says"
    )
    silent = [*TURNS[:2], TURNS[4] | {"train": False}]
    assert encoded(silent, TrainingPolicy()).excluded[2] == (
        "the message says that it is not trained"
    )


INLINE = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
OPENED = INLINE + "{% if add_generation_prompt %}assistant:<think>{% endif %}"


@pytest.mark.parametrize(
    ("content", "template", "expected"),
    [
        ("<think>a</think>\n\nb", INLINE, "b<|im_end|>"),
        ("\n<think>a</think> b", INLINE, " b<|im_end|>"),
        ("[THINK]a[/THINK]b", INLINE, "b<|im_end|>"),
        ("no thought: </think>", INLINE, "no thought: </think><|im_end|>"),
        ("said, then <think>a</think>", INLINE, "said, then <think>a</think><|im_end|>"),
        ("<think>never closed", INLINE, "<think>never closed<|im_end|>"),
        ("<think>a</think>b<think>c</think>", INLINE, "b<think>c</think><|im_end|>"),
        ("<think>a</think>b", OPENED, "b<|im_end|>"),
    ],
)
def test_thinking_between_tags_at_the_start_can_be_left_out(
    content: str, template: str, expected: str
) -> None:
    messages = [TURNS[1], {"role": "assistant", "content": content}]
    assert trained(messages, TrainingPolicy(thinking=False), template) == [expected]


def test_a_message_of_which_nothing_is_left_loses_its_stop_marker_too() -> None:
    messages = [
        TURNS[1],
        {"role": "assistant", "content": "<think>a</think>"},
        TURNS[1],
        {"role": "assistant", "content": "b"},
    ]
    assert trained(messages, TrainingPolicy(thinking=False), INLINE) == ["b<|im_end|>"]


def test_a_block_of_the_template_and_a_policy_agree() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    )
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "<think>t</think>last"},
    ]
    both = ["first<|im_end|>", "<think>t</think>last<|im_end|>"]
    assert trained(turns, TrainingPolicy(), template) == both
    assert trained(turns, TrainingPolicy.of("last-assistant"), template) == both[1:]
    assert trained(turns, TrainingPolicy(thinking=False), template) == [both[0], "last<|im_end|>"]
    assert trained(turns, TrainingPolicy.of("user"), template) == ["q\n", "r\n"]


def test_nothing_left_to_train_is_refused() -> None:
    tokenizer = ByteTokenizer(TEMPLATE)
    config = prompt_config_of("auto", tokenizer)
    silent = [m | {"train": False} for m in TURNS]
    reason = r"^there is nothing to train on; got the roles .*, with train false .* in 5 of 5 mess"
    with pytest.raises(ConversationError, match=reason):
        tokenize_conversation(tokenizer, silent, config, True, False)
    calls = [*TURNS[:2], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    config = replace(config, policy=TrainingPolicy(tool_calls=False))
    with pytest.raises(ConversationError, match=r"nothing to train on.*conversation\[2\]: the pol"):
        tokenize_conversation(tokenizer, calls, config, True, False)


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown role to train on; got 'asistant'.*assistant"):
        TrainingPolicy.of("asistant")
    with pytest.raises(ConversationError, match=r"conversation\[0\]: train says whether"):
        encoded([{"role": "user", "content": "x", "train": "no"}], TrainingPolicy())
    tokenizer = ByteTokenizer(TEMPLATE)
    config = prompt_config_of("default", tokenizer)
    with pytest.raises(ConfigError, match=r"^default: the prompt format trains every token"):
        replace(config, policy=TrainingPolicy.of("user"))
    silent = [TURNS[1], TURNS[4] | {"train": False}]
    with pytest.raises(ConversationError, match=r"conversation\[1\]: .* trains every token"):
        tokenize_conversation(tokenizer, silent, config, True, False)
