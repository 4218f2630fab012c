"""The prompt formats: what they need, what they write, and what of it is trained."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.conversation import (
    IGNORE_INDEX,
    PROMPT_FORMAT_REGISTRY,
    PromptConfig,
    PromptFormat,
    assistant_prefix_len,
    encode_conversation,
    prompt_config_of,
    tokenize_conversation,
)
from megatron_ext.errors import ConfigError, ConversationError, UnknownNameError
from tests.conversation.byte_tokenizer import CONTROL_TOKENS, ByteTokenizer
from tests.conversation.prompt_goldens import GOLDENS, OWN_TEMPLATE, TURNS, golden, marked

ROWS = [row for row in PROMPT_FORMAT_REGISTRY.values() if isinstance(row, PromptFormat)]
NAMES = [row.name for row in ROWS]
WITH_TEMPLATE = [row for row in ROWS if row.template is not None]
WITH_OWN_TEMPLATE = [row.name for row in ROWS if row.template is None]
CHATML = (
    "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\nHi\n<|im_end|>\n"
    "<|im_start|>assistant\n⟦ Hello!\n<|im_end|>\n⟧<|im_start|>user\nBye<|im_end|>\n"
    "<|im_start|>assistant\n⟦Bye.<|im_end|>\n⟧"
)


def shown(name: str, tokenizer: ByteTokenizer, conversation: Any = TURNS) -> str:
    """The text of a conversation with ⟦ ⟧ around what is trained."""
    encoded = encode_conversation(tokenizer, conversation, prompt_config_of(name, tokenizer))
    return marked(tokenizer, encoded.ids, encoded.trained)


# What the formats write.


def test_every_format_has_its_golden() -> None:
    assert list(PROMPT_FORMAT_REGISTRY) == NAMES
    assert sorted(path.name for path in GOLDENS.iterdir()) == sorted(f"{n}.txt" for n in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_format_writes_and_trains_what_its_golden_shows(name: str) -> None:
    assert golden(name) == (GOLDENS / f"{name}.txt").read_text(encoding="utf-8"), (
        f"look at what this changes: python tests/conversation/prompt_goldens.py {name}"
    )


BEYOND_THE_HEADER = {"mistral": " ", "nemotron-h-5p5-reasoning-inference": "<think>\n"}
"""What a prompt goes on with that is a part of the answer when it is trained."""


@pytest.mark.parametrize("name", [name for name in NAMES if name != "default"])
def test_a_prompt_is_what_stands_before_the_answer_in_training(name: str) -> None:
    tokenizer = ByteTokenizer(OWN_TEMPLATE)
    config = prompt_config_of(name, tokenizer)
    prompt = tokenize_conversation(tokenizer, TURNS[:4], config, False, True)
    before, _, _ = shown(name, tokenizer).rpartition("⟦")
    before = before.replace("⟦", "").replace("⟧", "")
    assert tokenizer.decode(prompt) == before + BEYOND_THE_HEADER.get(name, "")
    assert prompt.dtype == np.int64


def test_a_target_is_the_ids_where_they_are_trained() -> None:
    tokenizer = ByteTokenizer()
    config = prompt_config_of("qwen2p5", tokenizer)
    ids, target = tokenize_conversation(tokenizer, TURNS, config, True, True)
    encoded = encode_conversation(tokenizer, TURNS, config, add_generation_prompt=True)
    np.testing.assert_array_equal(ids, encoded.ids)
    np.testing.assert_array_equal(target, np.where(encoded.trained, encoded.ids, IGNORE_INDEX))
    assert (ids.dtype, target.dtype) == (np.int64, np.int64)


# Formats for a vocabulary.


def test_an_id_of_zero_pads() -> None:
    class Zero(ByteTokenizer):
        pad_id = 0

    assert prompt_config_of("auto", Zero(OWN_TEMPLATE)).pad_token_id == 0
    assert prompt_config_of("default", Zero(OWN_TEMPLATE)).pad_token_id == 0


def test_without_a_pad_token_the_end_of_sequence_pads_where_the_format_says_so() -> None:
    names = {"eos_token": "</s>"}
    tokenizer = ByteTokenizer(OWN_TEMPLATE, special_token_names=names)
    assert prompt_config_of("default", tokenizer).pad_token_id == tokenizer.eos_id
    with pytest.raises(ConfigError, match="qwen2p5 needs a token to pad with: pad_id, which"):
        prompt_config_of("qwen2p5", tokenizer)


NEEDED = [
    (row.name, token)
    for row in ROWS
    for token in (
        *row.tokens,
        *(row.pad if row.pad[0] in CONTROL_TOKENS and not row.pad[1:] else ()),
    )
]
"""Each format with each control token that it cannot do without."""


@pytest.mark.parametrize(("name", "token"), NEEDED, ids=lambda value: value)
def test_a_vocabulary_without_a_token_of_the_format_is_refused(name: str, token: str) -> None:
    tokenizer = ByteTokenizer(
        OWN_TEMPLATE, control_tokens=[c for c in CONTROL_TOKENS if c != token]
    )
    with pytest.raises(ConfigError) as caught:
        prompt_config_of(name, tokenizer)
    added = f"add {token} to the special tokens"
    assert all(part in str(caught.value) for part in (name, added, "another format"))


def test_all_tokens_that_the_vocabulary_lacks_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match="add <SPECIAL_10>, <SPECIAL_11> to the special tokens"):
        prompt_config_of("nemotron-h-aligned", ByteTokenizer(control_tokens=["<s>"]))


@pytest.mark.parametrize("row", WITH_TEMPLATE, ids=lambda row: row.name)
def test_the_tokens_that_a_format_needs_are_those_that_its_template_writes(
    row: PromptFormat,
) -> None:
    tokenizer = ByteTokenizer()
    encoded = encode_conversation(tokenizer, TURNS, row(tokenizer))
    written = {CONTROL_TOKENS[i - 256] for i in encoded.ids.tolist() if i >= 256}
    roles = {tokenizer.special_token_names[role] for role in row.special_tokens}
    assert written == {*row.tokens, *roles}


def test_an_ordinary_token_of_that_name_is_not_enough() -> None:
    class Ordinary(ByteTokenizer):
        def is_control(self, token_id: int) -> bool:
            return token_id != self.token_to_id("<|im_end|>")

    with pytest.raises(ConfigError, match=r"needs control tokens: <\|im_end\|>, which"):
        prompt_config_of("qwen2p5", Ordinary())


@pytest.mark.parametrize("name", [r.name for r in ROWS if "bos_token" in r.special_tokens])
def test_a_tokenizer_without_bos_is_refused_where_the_format_writes_it(name: str) -> None:
    names = {"eos_token": "</s>", "pad_token": "<pad>"}
    with pytest.raises(ConfigError, match=f"{name} needs a bos_token"):
        prompt_config_of(name, ByteTokenizer(special_token_names=names))


@pytest.mark.parametrize("name", WITH_OWN_TEMPLATE)
def test_a_format_of_the_tokenizer_s_own_template_needs_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} needs a chat template of its own"):
        prompt_config_of(name, ByteTokenizer())
    config = prompt_config_of(name, ByteTokenizer(OWN_TEMPLATE))
    with pytest.raises(ConfigError, match="own chat template, and it has none"):
        tokenize_conversation(ByteTokenizer(), TURNS, config, False, False)


@pytest.mark.parametrize("name", NAMES)
def test_has_bos_says_whether_the_render_begins_with_it(name: str) -> None:
    tokenizer = ByteTokenizer("{{ bos_token }}" + OWN_TEMPLATE)
    config = prompt_config_of(name, tokenizer)
    ids = tokenize_conversation(tokenizer, TURNS, config, False, False)
    assert config.has_bos == (ids[0] == tokenizer.bos_id) or name == "chatml"


def test_an_unknown_format_is_refused_with_the_choices() -> None:
    with pytest.raises(UnknownNameError, match="got 'qwen'; expected one of default, auto, "):
        prompt_config_of("qwen", ByteTokenizer())


def test_a_factory_that_makes_no_configuration_is_named(monkeypatch) -> None:
    monkeypatch.setitem(PROMPT_FORMAT_REGISTRY._rows, "mine", lambda tokenizer: {"pad_token_id": 0})
    with pytest.raises(ConfigError, match=r"of the prompt format mine .* got dict; expected"):
        prompt_config_of("mine", ByteTokenizer())


def test_a_template_in_a_file_is_a_format(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(OWN_TEMPLATE, encoding="utf-8")
    assert f"file:{path}" in PROMPT_FORMAT_REGISTRY
    assert shown(f"file:{path}", ByteTokenizer()) == CHATML
    path.write_text(OWN_TEMPLATE, encoding="utf-8-sig")
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
    assert shown("mistral", ByteTokenizer()) == shown("mistral", ByteTokenizer(), TURNS[1:])


@pytest.mark.parametrize("begin", [0, 1], ids=["replaced", "put in front"])
def test_the_format_s_own_system_message_can_be_forced(begin: int) -> None:
    tokenizer = ByteTokenizer()
    config = replace(prompt_config_of("qwen2p5", tokenizer), force_system_message=True)
    encoded = encode_conversation(tokenizer, TURNS[begin:], config)
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    rest = CHATML[CHATML.index("<|im_start|>user") :].replace("⟦", "").replace("⟧", "")
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
    conversation = [TURNS[1], {"role": role, "content": "{}"}, TURNS[2]]
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
            tokenizer, [TURNS[1], call], prompt_config_of("qwen2p5", tokenizer), False, False
        )


def test_tools_that_the_template_would_not_list_are_refused() -> None:
    tokenizer = ByteTokenizer()
    config = prompt_config_of("qwen2p5", tokenizer)
    conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(ConversationError, match=r"^tools: the prompt format qwen2p5 has no place"):
        tokenize_conversation(
            tokenizer, conversation, config, True, False, template_variables={"tools": tools}
        )
    none = tokenize_conversation(
        tokenizer, conversation, config, False, False, template_variables={"tools": []}
    )
    plain = tokenize_conversation(tokenizer, conversation, config, False, False)
    assert none.tolist() == plain.tolist()


def test_template_variables_reach_the_template() -> None:
    tokenizer = ByteTokenizer("{{ date_string }}" + OWN_TEMPLATE)
    config = prompt_config_of("auto", tokenizer)
    config = replace(config, template_variables={"date_string": "today <s> "})
    encoded = encode_conversation(tokenizer, TURNS, config)
    assert encoded.text.startswith("today <s> <|im_start|>")
    assert tokenizer.token_to_id("<s>") not in encoded.ids


# The assistant prefix.


PREFIXES = {
    **dict.fromkeys(["auto", "chatml", "qwen2p5"], "<|im_start|>assistant\n"),
    **dict.fromkeys(["identity", "mistral", "nemotron-h-aligned", "nemotron-h-reasoning"], ""),
    **dict.fromkeys(
        ["nemotron-nano-v2", "nemotron-h-5p5-reasoning-inference"], "<SPECIAL_11>Assistant\n"
    ),
    **dict.fromkeys(
        ["llama3p1", "llama_nemotron_8b", "llama-nemotron-super-1p5"],
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "nemotron5": "<SPECIAL_14>assistant\n",
    "nemotron5-aligned": "Assistant\n",
    "default": "",
}


@pytest.mark.parametrize(("name", "prefix"), PREFIXES.items(), ids=PREFIXES)
def test_the_prefix_is_counted_in_the_render(name: str, prefix: str) -> None:
    tokenizer = ByteTokenizer(OWN_TEMPLATE)
    ids, _ = tokenizer.encode_with_control_spans(prefix, [(0, len(prefix))])
    assert assistant_prefix_len(tokenizer, prompt_config_of(name, tokenizer)) == len(ids)


def test_a_stated_prefix_is_compared_with_the_render() -> None:
    tokenizer = ByteTokenizer()
    config = prompt_config_of("qwen2p5", tokenizer)
    right = len("assistant\n") + 1
    stated = replace(config, assistant_prefix_len=right)
    _, target = tokenize_conversation(tokenizer, TURNS, stated, True, False)
    np.testing.assert_array_equal(
        target, tokenize_conversation(tokenizer, TURNS, config, True, False)[1]
    )
    with pytest.raises(
        ConfigError, match=rf"conversation\[2\]: assistant_prefix_len .* got 3; expected {right}"
    ):
        tokenize_conversation(
            tokenizer, TURNS, replace(config, assistant_prefix_len=3), True, False
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
