"""The prompt formats: what they need, what they write, and what of it is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import CONTROL_TOKENS, ByteTokenizer

from megatron_ext.conversation import (
    IGNORE_INDEX,
    PROMPT_FORMAT_REGISTRY,
    PromptConfig,
    assistant_prefix_len,
    encode_conversation,
    prompt_config_of,
    tokenize_conversation,
)
from megatron_ext.errors import ConfigError, ConversationError, UnknownNameError

OWN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hi\n"},
    {"role": "assistant", "content": " Hello!\n"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye."},
]
CHATML = (
    "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\nHi\n<|im_end|>\n"
    "<|im_start|>assistant\n[ Hello!\n<|im_end|>\n]<|im_start|>user\nBye<|im_end|>\n"
    "<|im_start|>assistant\n[Bye.<|im_end|>\n]"
)
LLAMA = (
    "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[Hello!<|eot_id|>]"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[Bye.<|eot_id|>]"
)
RENDERS = {
    "default": "[" + CHATML.replace("[", "").replace("]", "") + "]",
    "auto": CHATML,
    "identity": " Be brief. Hi\n[ Hello!\n]Bye[Bye.]",
    "nemotron-nano-v2": "<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\nHi\n"
    "<SPECIAL_11>Assistant\n[Hello!\n<SPECIAL_12>\n]<SPECIAL_11>User\nBye\n"
    "<SPECIAL_11>Assistant\n[Bye.\n<SPECIAL_12>\n]",
    "nemotron-h-aligned": "<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\nHi\n"
    "<SPECIAL_11>Assistant\n[Hello!\n]<SPECIAL_11>User\nBye\n<SPECIAL_11>Assistant\n[Bye.\n]",
    "mistral": "<s>[INST] Hi\n[/INST][  Hello!\n</s>][INST] Bye[/INST][ Bye.</s>]",
    "llama3": CHATML,
    "llama3p1": LLAMA,
    "llama3p2": LLAMA,
    "nvlm-yi-34b": "<s>" + CHATML,
    "chatml": CHATML,
    "nemotron5": "<s>"
    + CHATML.replace("<|im_start|>", "<SPECIAL_14>").replace("<|im_end|>", "<SPECIAL_15>"),
    "nemotron5-aligned": "<s>System\n Be brief. \n[PREFIX]User\nHi\n\n[PREFIX]Assistant\n"
    "[ Hello!\n\n[PREFIX]]User\nBye\n[PREFIX]Assistant\n[Bye.\n[PREFIX]]",
    "qwen2p0": CHATML,
    "qwen2p5": CHATML,
    "nemotron6-moe": CHATML,
}
"""What each format writes; brackets stand around what is trained."""

GENERATION_PROMPTS = {
    **dict.fromkeys(
        ["default", "auto", "llama3", "chatml", "nvlm-yi-34b"], "<|im_start|>assistant\n"
    ),
    **dict.fromkeys(["qwen2p0", "qwen2p5", "nemotron6-moe"], "<|im_start|>assistant\n"),
    **dict.fromkeys(["llama3p1", "llama3p2"], "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    **dict.fromkeys(["identity", "nemotron-h-aligned"], ""),
    "nemotron-nano-v2": "<SPECIAL_11>Assistant\n",
    "nemotron5": "<SPECIAL_14>assistant\n",
    "nemotron5-aligned": "Assistant\n",
    "mistral": " ",
}


def shown(name: str, tokenizer: ByteTokenizer, conversation: Any = CONVERSATION) -> str:
    """The text of a conversation with brackets around what is trained."""
    encoded = encode_conversation(tokenizer, conversation, prompt_config_of(name, tokenizer))
    edges = np.flatnonzero(np.diff(np.concatenate(([False], encoded.trained, [False]))))
    pieces = [tokenizer.decode(part) for part in np.split(encoded.ids, edges)]
    return "".join(f"[{piece}]" if odd % 2 else piece for odd, piece in enumerate(pieces))


def test_every_format_has_its_golden_here() -> None:
    assert list(PROMPT_FORMAT_REGISTRY) == list(RENDERS)
    assert set(GENERATION_PROMPTS) == set(RENDERS)


@pytest.mark.parametrize(("name", "expected"), RENDERS.items(), ids=RENDERS)
def test_a_format_writes_and_trains_what_it_should(name: str, expected: str) -> None:
    assert shown(name, ByteTokenizer(OWN)) == expected


@pytest.mark.parametrize(("name", "expected"), GENERATION_PROMPTS.items(), ids=GENERATION_PROMPTS)
def test_a_prompt_ends_with_the_header_of_an_answer(name: str, expected: str) -> None:
    tokenizer = ByteTokenizer(OWN)
    config = prompt_config_of(name, tokenizer)
    ids = [
        tokenize_conversation(tokenizer, CONVERSATION[:4], config, False, add)
        for add in (False, True)
    ]
    assert tokenizer.decode(ids[1]) == tokenizer.decode(ids[0]) + expected
    assert [array.dtype for array in ids] == [np.int64, np.int64]


def test_a_target_is_the_ids_where_they_are_trained() -> None:
    tokenizer = ByteTokenizer()
    config = prompt_config_of("qwen2p5", tokenizer)
    ids, target = tokenize_conversation(tokenizer, CONVERSATION, config, True, True)
    encoded = encode_conversation(tokenizer, CONVERSATION, config, add_generation_prompt=True)
    np.testing.assert_array_equal(ids, encoded.ids)
    np.testing.assert_array_equal(target, np.where(encoded.trained, encoded.ids, IGNORE_INDEX))
    assert (ids.dtype, target.dtype) == (np.int64, np.int64)


# Formats for a vocabulary.

PADS = {
    "identity": "<unk>",
    "nemotron-nano-v2": "<unk>",
    "nemotron-h-aligned": "<SPECIAL_233>",
    "mistral": "<unk>",
    "llama3": "<|end_of_text|>",
    "llama3p1": "<|finetune_right_pad_id|>",
    "llama3p2": "<|finetune_right_pad_id|>",
    "nemotron5": "<SPECIAL_233>",
    "nemotron5-aligned": "<SPECIAL_233>",
    "nemotron6-moe": "<unk>",
}


@pytest.mark.parametrize("name", RENDERS)
def test_a_format_pads_with_its_token(name: str) -> None:
    tokenizer = ByteTokenizer(OWN)
    config = prompt_config_of(name, tokenizer)
    assert config.pad_token_id == tokenizer.token_to_id(PADS.get(name, "<pad>"))
    assert config.name == name


def test_an_id_of_zero_pads() -> None:
    class Zero(ByteTokenizer):
        pad_id = 0

    assert prompt_config_of("auto", Zero(OWN)).pad_token_id == 0
    assert prompt_config_of("default", Zero(OWN)).pad_token_id == 0


def test_without_a_pad_token_the_end_of_sequence_pads_where_the_format_says_so() -> None:
    names = {"eos_token": "</s>"}
    tokenizer = ByteTokenizer(OWN, special_token_names=names)
    assert prompt_config_of("default", tokenizer).pad_token_id == tokenizer.eos_id
    with pytest.raises(ConfigError, match="qwen2p5 needs a token to pad with: pad_id, which"):
        prompt_config_of("qwen2p5", tokenizer)


NEEDED = [
    ("nemotron-nano-v2", "<SPECIAL_12>"),
    ("nemotron-h-aligned", "<SPECIAL_10>"),
    ("nemotron-h-aligned", "<SPECIAL_233>"),
    ("llama3", "<|end_of_text|>"),
    ("llama3p2", "<|eot_id|>"),
    ("chatml", "<|im_end|>"),
    ("qwen2p0", "<|im_start|>"),
    ("nvlm-yi-34b", "<|im_start|>"),
    ("nemotron5", "<SPECIAL_15>"),
    ("nemotron5-aligned", "[PREFIX]"),
]


@pytest.mark.parametrize(("name", "token"), NEEDED, ids=lambda value: value)
def test_a_vocabulary_without_a_token_of_the_format_is_refused(name: str, token: str) -> None:
    tokenizer = ByteTokenizer(OWN, control_tokens=[c for c in CONTROL_TOKENS if c != token])
    with pytest.raises(ConfigError) as caught:
        prompt_config_of(name, tokenizer)
    assert all(part in str(caught.value) for part in (name, token, "another format"))


def test_an_ordinary_token_of_that_name_is_not_enough() -> None:
    class Ordinary(ByteTokenizer):
        def is_control(self, token_id: int) -> bool:
            return token_id != self.token_to_id("<|im_end|>")

    with pytest.raises(ConfigError, match=r"needs the control token <\|im_end\|>"):
        prompt_config_of("qwen2p5", Ordinary())


@pytest.mark.parametrize("name", ["mistral", "nemotron5", "llama3p1", "nvlm-yi-34b"])
def test_a_tokenizer_without_bos_is_refused_where_the_format_writes_it(name: str) -> None:
    names = {"eos_token": "</s>", "pad_token": "<pad>"}
    with pytest.raises(ConfigError, match=f"{name} needs a bos_token"):
        prompt_config_of(name, ByteTokenizer(special_token_names=names))


@pytest.mark.parametrize("name", ["default", "auto", "chatml", "llama3", "nemotron6-moe"])
def test_a_format_of_the_tokenizer_s_own_template_needs_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} needs a chat template of its own"):
        prompt_config_of(name, ByteTokenizer())
    config = prompt_config_of(name, ByteTokenizer(OWN))
    with pytest.raises(ConfigError, match="own chat template, and it has none"):
        tokenize_conversation(ByteTokenizer(), CONVERSATION, config, False, False)


@pytest.mark.parametrize("name", RENDERS)
def test_has_bos_says_whether_the_render_begins_with_it(name: str) -> None:
    tokenizer = ByteTokenizer("{{ bos_token }}" + OWN)
    config = prompt_config_of(name, tokenizer)
    ids = tokenize_conversation(tokenizer, CONVERSATION, config, False, False)
    assert config.has_bos == (ids[0] == tokenizer.bos_id) or name == "chatml"


def test_an_unknown_format_is_refused_with_the_choices() -> None:
    with pytest.raises(UnknownNameError, match="got 'qwen'; expected one of default, auto, "):
        prompt_config_of("qwen", ByteTokenizer())


def test_a_template_in_a_file_is_a_format(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(OWN, encoding="utf-8")
    assert f"file:{path}" in PROMPT_FORMAT_REGISTRY
    assert shown(f"file:{path}", ByteTokenizer()) == CHATML
    with pytest.raises(
        ConfigError, match=r"missing\.jinja: cannot read the template .*No such file"
    ):
        prompt_config_of(f"file:{tmp_path / 'missing.jinja'}", ByteTokenizer())
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="bytes that are not UTF-8"):
        prompt_config_of(f"file:{path}", ByteTokenizer())


# Options of a format.


def test_a_system_message_is_dropped_where_the_format_has_no_role_for_it() -> None:
    assert shown("mistral", ByteTokenizer()) == shown("mistral", ByteTokenizer(), CONVERSATION[1:])


@pytest.mark.parametrize("begin", [0, 1], ids=["replaced", "put in front"])
def test_the_format_s_own_system_message_can_be_forced(begin: int) -> None:
    tokenizer = ByteTokenizer()
    config = replace(prompt_config_of("qwen2p5", tokenizer), force_system_message=True)
    encoded = encode_conversation(tokenizer, CONVERSATION[begin:], config)
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    rest = CHATML[CHATML.index("<|im_start|>user") :].replace("[", "").replace("]", "")
    assert encoded.text == f"<|im_start|>system\n{system}<|im_end|>\n{rest}"
    messages = {s.provenance.message for s in encoded.spans if s.provenance.field == "content"}
    assert messages == {1 - begin, 2 - begin, 3 - begin, 4 - begin}
    trained = tokenizer.decode(encoded.ids[encoded.trained])
    assert trained == " Hello!\n<|im_end|>\nBye.<|im_end|>\n"


def test_forcing_a_system_message_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="force_system_message needs a system message to force"):
        PromptConfig(pad_token_id=0, force_system_message=True)


@pytest.mark.parametrize("name", ["nemotron-nano-v2", "nemotron-h-aligned", "mistral"])
@pytest.mark.parametrize("role", ["tool", "developer"])
def test_a_message_that_the_template_would_drop_is_refused(name: str, role: str) -> None:
    tokenizer = ByteTokenizer()
    conversation = [CONVERSATION[1], {"role": role, "content": "{}"}, CONVERSATION[2]]
    with pytest.raises(
        ConversationError, match=rf"^conversation\[1\]: the prompt format {name} has no place"
    ):
        tokenize_conversation(
            tokenizer, conversation, prompt_config_of(name, tokenizer), False, False
        )


def test_tool_calls_that_the_template_would_drop_are_refused() -> None:
    tokenizer = ByteTokenizer()
    call = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}
    with pytest.raises(ConversationError, match=r"^conversation\[1\]: .* no place for tool calls"):
        tokenize_conversation(
            tokenizer, [CONVERSATION[1], call], prompt_config_of("qwen2p5", tokenizer), False, False
        )


def test_thinking_switches_leave_the_messages_of_nano_v2() -> None:
    conversation = [
        {"role": "system", "content": "/think Be brief."},
        {"role": "user", "content": "/no_think"},
        {"role": "assistant", "content": "/think"},
    ]
    assert shown("nemotron-nano-v2", ByteTokenizer(), conversation) == (
        "<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\n\n<SPECIAL_11>Assistant\n"
        "[/think\n<SPECIAL_12>\n]"
    )


def test_template_variables_reach_the_template() -> None:
    tokenizer = ByteTokenizer("{{ date_string }}" + OWN)
    config = prompt_config_of("auto", tokenizer)
    config = replace(config, template_variables={"date_string": "today <s> "})
    encoded = encode_conversation(tokenizer, CONVERSATION, config)
    assert encoded.text.startswith("today <s> <|im_start|>")
    assert tokenizer.token_to_id("<s>") not in encoded.ids


# The assistant prefix.


@pytest.mark.parametrize("name", RENDERS)
def test_the_prefix_is_counted_in_the_render(name: str) -> None:
    tokenizer = ByteTokenizer(OWN)
    config = prompt_config_of(name, tokenizer)
    prompt = GENERATION_PROMPTS[name]
    ids, _ = tokenizer.encode_with_control_spans(prompt, [(0, len(prompt))])
    expected = 0 if name in ("default", "mistral") else len(ids)
    assert assistant_prefix_len(tokenizer, config) == expected


def test_a_stated_prefix_is_compared_with_the_render() -> None:
    tokenizer = ByteTokenizer()
    config = prompt_config_of("qwen2p5", tokenizer)
    right = len("assistant\n") + 1
    stated = replace(config, assistant_prefix_len=right)
    _, target = tokenize_conversation(tokenizer, CONVERSATION, stated, True, False)
    np.testing.assert_array_equal(
        target, tokenize_conversation(tokenizer, CONVERSATION, config, True, False)[1]
    )
    with pytest.raises(
        ConfigError, match=rf"conversation\[2\]: assistant_prefix_len .* got 3; expected {right}"
    ):
        tokenize_conversation(
            tokenizer, CONVERSATION, replace(config, assistant_prefix_len=3), True, False
        )


# Tools of Llama 3.1.

TOOLS = [{"name": "weather", "parameters": {"city": "string"}}]
LISTED = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and '
    'its value}.Do not use variables.\n\n{\n    "name": "weather",\n    "parameters": {\n'
    '        "city": "string"\n    }\n}\n\n'
)
TOOL_CONVERSATION = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Paris"}}}],
    },
    {"role": "tool", "content": '{"t": 21}'},
    {"role": "assistant", "content": "21 degrees."},
]


def header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


VARIANTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "tools in the question": (
        {"tools": TOOLS},
        header("user")
        + "Given the following functions, please respond with a JSON for a function call with its "
        "proper arguments that best answers the given prompt.\n\n" + LISTED + "Weather?<|eot_id|>",
        '{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>',
    ),
    "no tools": (
        {},
        header("user") + "Weather?<|eot_id|>",
        '{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>',
    ),
    "a built-in tool": (
        {"builtin_tools": ["weather"]},
        header("user") + "Weather?<|eot_id|>",
        '<|python_tag|>weather.call(city="Paris")<|eom_id|>',
    ),
}


@pytest.mark.parametrize(("variables", "question", "call"), VARIANTS.values(), ids=VARIANTS)
def test_llama_calls_tools(variables: dict[str, Any], question: str, call: str) -> None:
    tokenizer = ByteTokenizer()
    config = replace(prompt_config_of("llama3p1", tokenizer), template_variables=variables)
    encoded = encode_conversation(tokenizer, TOOL_CONVERSATION, config)
    assert encoded.text == (
        f"<s>{question}{header('assistant')}{call}{header('ipython')}"
        f'"{{\\"t\\": 21}}"<|eot_id|>{header("assistant")}21 degrees.<|eot_id|>'
    )
    trained = tokenizer.decode(encoded.ids[encoded.trained])
    assert trained == call + "21 degrees.<|eot_id|>"


def test_llama_lists_tools_in_the_system_message_where_asked() -> None:
    tokenizer = ByteTokenizer()
    variables = {
        "tools": TOOLS,
        "tools_in_user_message": False,
        "builtin_tools": ["a", "code_interpreter"],
    }
    config = replace(prompt_config_of("llama3p1", tokenizer), template_variables=variables)
    conversation = [{"role": "system", "content": "Be brief."}, TOOL_CONVERSATION[0]]
    assert encode_conversation(tokenizer, conversation, config).text == (
        f"<s>{header('system')}Environment: ipython\nTools: a\n\n"
        "You have access to the following functions. To call a function, please respond with JSON "
        f"for a function call.{LISTED}Be brief.<|eot_id|>{header('user')}Weather?<|eot_id|>"
    )


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        (
            [TOOL_CONVERSATION[0], TOOL_CONVERSATION[1] | {"tool_calls": [1, 2]}],
            "one tool call at most",
        ),
        ([{"role": "system", "content": "x"}], "no user message to list the tools in"),
    ],
    ids=["two calls", "no question"],
)
def test_llama_refuses_what_it_cannot_say(conversation: Any, message: str) -> None:
    tokenizer = ByteTokenizer()
    config = replace(prompt_config_of("llama3p1", tokenizer), template_variables={"tools": TOOLS})
    with pytest.raises(ConversationError, match=message):
        tokenize_conversation(tokenizer, conversation, config, False, False)
