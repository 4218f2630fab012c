"""Answers are found in any template, by where the characters came from."""

import re
from dataclasses import replace
from typing import Any

import pytest

from megatron_ext.conversation import encode_conversation, prompt_config_of, tokenize_conversation
from megatron_ext.errors import ConversationError
from tests.conversation.byte_tokenizer import ByteTokenizer

USER = {"role": "user", "content": "Hi"}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye."},
]
THINKING = [
    USER,
    {"role": "assistant", "content": "<think>\nold\n</think>\n\nHello."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye.", "reasoning_content": "new"},
]
CALLS = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}],
    },
    {"role": "tool", "name": "f", "content": "<|im_end|>"},
    {"role": "assistant", "content": "Done."},
]
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

CASES: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "a loop": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
        CONVERSATION,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n[Hello.<|im_end|>\n]<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n[Bye.<|im_end|>\n]",
    ),
    "a default system message": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe nice.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
        CONVERSATION[1:3],
        "<|im_start|>system\nBe nice.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n[Hello.<|im_end|>\n]",
    ),
    "the system message within the first question": (
        "{% set system = messages[0].content %}{% for m in messages[1:] %}"
        "{% if m.role == 'user' %}[INST] {% if loop.first %}{{ system }}\n\n{% endif %}"
        "{{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        CONVERSATION,
        "(INST) Be brief.\n\nHi (/INST) [Hello.</s>](INST) Bye (/INST) [Bye.</s>]",
    ),
    "the header of an answer in the question's turn": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}\n"
        "{% else %}{{ m.role }}: {{ m.content }}\nassistant: {% endif %}{% endfor %}",
        CONVERSATION[1:],
        "user: Hi\nassistant: [Hello.\n]user: Bye\nassistant: [Bye.\n]",
    ),
    "what the generation prompt leaves to the model": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n"
        "{% endif %}{{ m.content.split('</think>')[-1].lstrip() }}<|im_end|>\n{% endfor %}"
        + PROMPT,
        THINKING,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello.<|im_end|>\n]"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
        "[<think>\nnew\n</think>\nBye.<|im_end|>\n]",
    ),
    "a generation prompt that history lacks": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
        CONVERSATION[1:3],
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello.<|im_end|>\n]",
    ),
    "tool calls": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.tool_calls or [] %}"
        "CALL {{ c.function | tojson }}{% endfor %}{{ m.content or '' }}<|im_end|>\n{% endfor %}",
        CALLS,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        '[CALL {"name": "f", "arguments": {"x": 1}}<|im_end|>\n]<|im_start|>tool\n<|im_end|>'
        "<|im_end|>\n<|im_start|>assistant\n[Done.<|im_end|>\n]",
    ),
    "tool calls after a generation prompt": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.tool_calls or [] %}"
        "CALL {{ c.function | tojson }}{% endfor %}{{ m.content or '' }}<|im_end|>\n{% endfor %}"
        + PROMPT,
        CALLS,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        '[CALL {"name": "f", "arguments": {"x": 1}}<|im_end|>\n]<|im_start|>tool\n'
        "<|im_end|><|im_end|>\n<|im_start|>assistant\n[Done.<|im_end|>\n]",
    ),
    "tool calls after the header of a question's turn": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% for c in m.tool_calls or [] %}"
        "<img>{{ c.function | tojson }}{% endfor %}{{ m.content or '' }}{{ eos_token }}"
        "{% else %}Q {{ m.content }} A{% endif %}{% endfor %}",
        CALLS,
        'Q Hi A[<img>{"name": "f", "arguments": {"x": 1}}</s>]Q <|im_end|> A[Done.</s>]',
    ),
    "a template that takes nothing without tools": (
        "{% for t in tools %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{% endfor %}"
        "{{ m.content or '' }}<|im_end|>\n{% endfor %}" + PROMPT,
        CALLS,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[CALL f<|im_end|>\n]"
        "<|im_start|>tool\n<|im_end|><|im_end|>\n<|im_start|>assistant\n[Done.<|im_end|>\n]",
    ),
    "another generation prompt in history": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<think></think>' if m.role == "
        "'assistant' }}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{{ '<think>\n' if enable_thinking | default(true) else '<think></think>' }}{% endif %}",
        CONVERSATION[1:3],
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think></think>[Hello.<|im_end|>\n]",
    ),
    "a part of the generation prompt": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.tool_calls or [] %}"
        "{{ '\n<tool>' }}{{ c.function.name }}{% endfor %}{{ m.content or '' }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
        CALLS,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[\n<tool>f<|im_end|>\n]"
        "<|im_start|>tool\n<|im_end|><|im_end|>\n<|im_start|>assistant\n[Done.<|im_end|>\n]",
    ),
    "a generation prompt that is always there": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n<img>{{ m.content }}<|im_end|>"
        "{% endfor %}<|im_start|>assistant{{ '\n' }}",
        CONVERSATION[1:3],
        "<|im_start|>user\n<img>Hi<|im_end|><|im_start|>assistant\n[<img>Hello.<|im_end|>]"
        "<|im_start|>assistant\n",
    ),
    "a tool's name that a tool's turn looks up": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}"
        "{% for a in messages %}{% for c in a.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
        "{% endfor %}: {% endif %}{{ m.content or m.tool_calls[0].function.name }}<|im_end|>\n"
        "{% endfor %}",
        CALLS,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[f<|im_end|>\n]<|im_start|>tool\n"
        "f: <|im_end|><|im_end|>\n<|im_start|>assistant\n[Done.<|im_end|>\n]",
    ),
    "an assistant's text in a tool's turn": (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "<|im_start|>{{ messages[loop.index0 - 1].tool_calls[0].function.name }}: {{ m.content }}\n"
        "{% else %}<|im_start|>{{ m.content or m.tool_calls | tojson }}<|im_end|>{% endif %}"
        "{% endfor %}",
        CALLS,
        "<|im_start|>Hi<|im_end|><|im_start|>"
        '[({"function": {"name": "f", "arguments": {"x": 1}}})<|im_end|>]'
        "<|im_start|>f: <|im_end|>\n<|im_start|>[Done.<|im_end|>]",
    ),
    "a user's text in an answer's turn": (
        "{% for m in messages if m.role == 'assistant' %}{{ m.content }} (to "
        "{{ messages[0].content }}){{ eos_token }}{% endfor %}",
        CONVERSATION[1:3],
        "[Hello. (to ]Hi[)</s>]",
    ),
    "answers in a row": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
        [USER, CONVERSATION[2], CONVERSATION[4]],
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello.<|im_end|>\n]"
        "<|im_start|>assistant\n[Bye.<|im_end|>\n]",
    ),
    "no loop over messages": (
        "{% for i in range(messages | length) %}<|im_start|>{{ messages[i].role }}\n"
        "{{ messages[i].content }}<|im_end|>\n{% endfor %}",
        CONVERSATION[1:],
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello.<|im_end|>\n]"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[Bye.<|im_end|>\n]",
    ),
    "no loop, two fields": (
        "<s>{{ messages[0].content }}</s>{% set m = messages[1] %}"
        "{{ m.content }}</think>{{ m.content }}</s> <s>",
        CONVERSATION[1:3],
        "<s>Hi</s>[Hello.</think>Hello.</s> ]<s>",
    ),
    "no loop, no stop marker": (
        "{{ messages[0].content }}: {{ messages[1].content }} end",
        CONVERSATION[1:3],
        "Hi: [Hello.] end",
    ),
    "a stop marker at the start of the next turn": (
        "{% for m in messages %}{% if loop.previtem and loop.previtem.role == 'assistant' %}"
        "<|im_end|>{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}",
        CONVERSATION[1:],
        "<|im_start|>user\nHi<|im_start|>assistant\n[Hello.<|im_end|>]<|im_start|>user\nBye"
        "<|im_start|>assistant\n[Bye.]",
    ),
    "the next turn as a stop marker": (
        "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|eot_id|>' }}\n"
        "{{ m.content }}\n{% endfor %}",
        CONVERSATION[1:],
        "<|im_start|>\nHi\n<|eot_id|>\n[Hello.\n<|im_start|>]\nBye\n<|eot_id|>\n[Bye.\n]",
    ),
    "text before the next control token": (
        "{% for m in messages %}{{ m.role }}<|im_start|>{{ m.content }}\n{% endfor %}",
        CONVERSATION[1:],
        "user<|im_start|>Hi\nassistant<|im_start|>[Hello.\n]user<|im_start|>Bye\n"
        "assistant<|im_start|>[Bye.\n]",
    ),
    "generation blocks": (
        "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}"
        "{{ eos_token }}{% endgeneration %};{% else %}U: {{ m.content }}\n{% endif %}{% endfor %}",
        CONVERSATION[1:3],
        "U: Hi\nA: [Hello.</s>];",
    ),
    "a macro for a message": (
        "{% macro say(m) %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>{% endmacro %}"
        "{% for m in messages %}{{ say(m) ~ '\n' }}{% endfor %}{{ eos_token }}",
        CONVERSATION[1:3],
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello.<|im_end|>\n]</s>",
    ),
}


def shown(template: str, conversation: list[dict[str, Any]]) -> str:
    """The render, brackets around what is trained; its own brackets are parentheses."""
    tokenizer = ByteTokenizer(template)
    config = prompt_config_of("auto", tokenizer)
    encoded = encode_conversation(
        tokenizer,
        conversation,
        config,
        template_variables={"tools": [] if "tools" in template else None},
    )
    text = encoded.text.translate({ord("["): "(", ord("]"): ")"})
    for start, end in reversed(encoded.trained_ranges):
        text = f"{text[:start]}[{text[start:end]}]{text[end:]}"
    trained = re.findall(r"\[(.*?)\]", text, re.DOTALL)
    written = tokenizer.decode(encoded.ids[encoded.trained])
    assert written.translate({ord("["): "(", ord("]"): ")"}) == "".join(trained)
    return text


@pytest.mark.parametrize(("template", "conversation", "expected"), CASES.values(), ids=CASES)
def test_the_answer_and_its_stop_marker_are_trained(
    template: str, conversation: list[dict[str, Any]], expected: str
) -> None:
    assert shown(template, conversation) == expected


PROMPT_IN_THE_LAST_TURN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% if loop.last and add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("add_generation_prompt", [False, True], ids=["whole", "prompt"])
@pytest.mark.parametrize(
    "template",
    [CASES["a loop"][0] + PROMPT, PROMPT_IN_THE_LAST_TURN],
    ids=["after the loop", "in the last turn"],
)
def test_a_generation_prompt_is_never_trained(template: str, add_generation_prompt: bool) -> None:
    tokenizer = ByteTokenizer(template)
    config = prompt_config_of("auto", tokenizer)
    _, target = tokenize_conversation(tokenizer, CONVERSATION, config, True, add_generation_prompt)
    assert tokenizer.decode(target[target >= 0]) == "Hello.<|im_end|>\nBye.<|im_end|>\n"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content if not loop.last }};{% endfor %}",
        "{% for m in messages %}{% generation %}{% endgeneration %}{{ m.content }}{% endfor %}",
    ],
    ids=["no answers", "all but the last", "empty generation blocks"],
)
def test_an_answer_of_which_nothing_would_be_trained_is_refused(template: str) -> None:
    tokenizer = ByteTokenizer(template)
    config = prompt_config_of("auto", tokenizer)
    tokenize_conversation(tokenizer, CONVERSATION, config, False, False)
    with pytest.raises(
        ConversationError, match=r"^conversation\[[24]\]: .* leaves out what the assistant"
    ):
        tokenize_conversation(tokenizer, CONVERSATION, config, True, False)


LOOP = CASES["a loop"][0]
HIDES = (
    "{% for m in messages %}<|im_start|>"
    "{{ (m.role ~ m.content).center(30) if m.content == 'Hello.' else m.content }}"
    "<|im_end|>\n{% endfor %}"
)
DROPS = LOOP.replace("{{ m.content }}", "{{ m.content if m.content != 'Hello.' }}")


@pytest.mark.parametrize(
    ("template", "refusal", "reason"),
    [
        (
            HIDES,
            "changes text so that it cannot be told what is the message's",
            "it cannot be told what is the message's",
        ),
        (DROPS, "leaves out what the assistant says", "leaves out what it says"),
    ],
    ids=["hides", "drops"],
)
def test_an_answer_that_a_template_hides_or_drops_is_refused_or_left_out_with_its_reason(
    template: str, refusal: str, reason: str
) -> None:
    tokenizer = ByteTokenizer(template)
    config = prompt_config_of("auto", tokenizer)
    with pytest.raises(ConversationError, match=rf"^conversation\[2\]: .*{refusal}"):
        tokenize_conversation(tokenizer, CONVERSATION, config, True, False)
    config = replace(config, exclude_unknown=True)
    _, target = tokenize_conversation(tokenizer, CONVERSATION, config, True, False)
    assert tokenizer.decode(target[target >= 0]) == "Bye.<|im_end|>\n"
    excluded = encode_conversation(tokenizer, CONVERSATION, config).excluded
    assert sorted(excluded) == [0, 1, 2, 3]
    assert excluded[2].endswith(reason)
    with pytest.raises(
        ConversationError, match=rf"nothing to train on.*conversation\[2\].*{reason}"
    ):
        tokenize_conversation(tokenizer, CONVERSATION[:3], config, True, False)


def test_a_message_that_is_not_trained_and_not_shown_either_has_both_reasons() -> None:
    template = LOOP.replace("in messages", "in messages if m.role != 'tool'")
    tokenizer = ByteTokenizer(template)
    messages = [USER, {"role": "tool", "content": "21"}, CONVERSATION[2]]
    config = prompt_config_of("auto", tokenizer)
    assert encode_conversation(tokenizer, messages, config).excluded == {
        0: "the role user is not trained",
        1: "the role tool is not trained, and the template leaves out what it says",
    }


IM = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
TWO = [
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1", "name": "bob"},
    {"role": "user", "content": "Q2"},
    {"role": "assistant", "content": "A2", "name": "bob"},
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{% for m in messages %}[Round {{ loop.index0 // 2 }}] {{ m.role }}: {{ m.content }}\n"
            "{% endfor %}{% if add_generation_prompt %}[Round 0] assistant: {% endif %}",
            ["A1\n", "A2\n"],
        ),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name }}\n"
            "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT,
            ["A1<|im_end|>\n", "A2<|im_end|>\n"],
        ),
        (
            f"{{% for m in messages %}}{IM}{{% if loop.last %}}<|im_start|>assistant\n{{% endif %}}"
            "{% endfor %}" + PROMPT,
            ["A1<|im_end|>\n", "A2<|im_end|>\n"],
        ),
        (
            f"{{% for m in messages %}}{{% generation %}}{IM}{{% endgeneration %}}{{% endfor %}}",
            [f"<|im_start|>assistant\n{answer}<|im_end|>\n" for answer in ("A1", "A2")],
        ),
    ],
    ids=["numbered rounds", "a name in the header", "a prompt in the last turn", "all in blocks"],
)
def test_headers_and_others_are_not_trained(template: str, expected: list[str]) -> None:
    tokenizer = ByteTokenizer(template)
    encoded = encode_conversation(tokenizer, TWO, prompt_config_of("auto", tokenizer))
    assert [encoded.text[start:end] for start, end in encoded.trained_ranges] == expected


def test_a_block_does_not_train_what_a_message_says_is_not_trained() -> None:
    tokenizer = ByteTokenizer(
        f"{{% for m in messages %}}{{% generation %}}{IM}{{% endgeneration %}}{{% endfor %}}"
    )
    messages = [m | {"train": i == 1} for i, m in enumerate(TWO)]
    encoded = encode_conversation(tokenizer, messages, prompt_config_of("auto", tokenizer))
    trained = tokenizer.decode(encoded.target[encoded.trained].tolist())
    assert trained == "<|im_start|>assistant\nA1<|im_end|>\n"
