"""Options of conversations reach the mask, travel with the tokenizer and enter its identity."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers import (
    MegatronTokenizer,
    MegatronTokenizerText,
    TokenizerConfig,
    build_tokenizer,
)

Built = Callable[..., MegatronTokenizerText]
TEMPLATE = "{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
CONVERSATION = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "[INST]Yes"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "No"},
]


@pytest.fixture
def built(tokenizer_path: Callable[[str], Path]) -> Built:
    model = str(tokenizer_path("huggingface-byte-level"))
    known = {"mode": "sft", "chat_template": TEMPLATE, "special_tokens": ("[INST]", "[/INST]")}
    return lambda **options: build_tokenizer(TokenizerConfig(model=model, **(known | options)))


def trained_text(tokenizer: MegatronTokenizerText) -> str:
    _, target = tokenizer.tokenize_conversation(CONVERSATION, True, False)
    return tokenizer.detokenize(target[target >= 0].tolist())


def test_the_policy_of_the_options_is_that_of_the_mask(built: Built) -> None:
    assert trained_text(built()) == "[INST]Yes[/INST]No[/INST]"
    assert trained_text(built(train_on="last-assistant")) == "No[/INST]"
    assert trained_text(built(train_on="user")) == "Hi[/INST]Bye[/INST]"


def test_names_of_control_tokens_in_messages_are_text_unless_allowed(built: Built) -> None:
    counts = {}
    for allowed in (False, True):
        tokenizer = built(allow_control_tokens_in_content=allowed)
        ids = tokenizer.tokenize_conversation(CONVERSATION, False, False).tolist()
        counts[allowed] = ids.count(tokenizer.token_to_id("[INST]"))
    assert counts == {False: 4, True: 5}


def test_a_template_on_its_own_has_the_options_too(built: Built) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{{ sign }}{{ m.train is defined }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "[INST]", "train": False}]
    tokenizer = built(template_variables=("sign=!",), allow_control_tokens_in_content=True)
    assert tokenizer.apply_chat_template(messages, template, tokenize=False) == "[INST]!False"
    ids = tokenizer.apply_chat_template(messages, template)
    assert tokenizer.token_to_id("[INST]") in ids
    plain = built().apply_chat_template(messages, template, sign="?")
    assert tokenizer.token_to_id("[INST]") not in plain


@pytest.mark.parametrize(
    ("option", "value"), [("train_on", 5), ("train_thinking", "no"), ("template_variables", 5)]
)
def test_a_value_of_another_type_is_refused(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{option}: the value has the wrong type"):
        TokenizerConfig(model="m", mode="sft", **{option: value})


def test_template_variables_reach_every_template(built: Built) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ sign }}{{ count }}{% endfor %}"
    tokenizer = built(
        chat_template=template, template_variables=("sign=!", "count=3", 'x={"a": [1]}')
    )
    assert tokenizer.prompt_config.template_variables == {"sign": "!", "count": 3, "x": {"a": [1]}}
    ids = tokenizer.tokenize_conversation(CONVERSATION[:1], False, False)
    assert tokenizer.detokenize(ids.tolist()) == "Hi!3"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "enable_thinking",
            r"^template_variables: this is not a template variable; got 'enable_th",
        ),
        ("=1", "^template_variables: this is not a template variable"),
        ("x={", "^template_variables, x: the value of the template variable is not JSON"),
    ],
)
def test_what_is_no_template_variable_is_refused(said: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TokenizerConfig(model="m", mode="sft", template_variables=(said,))


def test_options_travel_with_a_saved_tokenizer_and_enter_its_identity(
    built: Built, tmp_path: Path
) -> None:
    tokenizer = built(train_on="last-assistant", train_thinking=False, template_variables=("x=1",))
    assert tokenizer.unique_identifiers["train_on"] == "last-assistant"
    assert tokenizer.unique_identifiers["train_thinking"] == "False"
    assert "train_on" not in built().unique_identifiers
    tokenizer.save_pretrained(tmp_path / "saved")
    again = MegatronTokenizer.from_pretrained(str(tmp_path / "saved"))
    assert again.prompt_config == tokenizer.prompt_config
    assert again.mode == "sft"
    assert trained_text(again) == "No[/INST]"
    config = TokenizerConfig(model=str(tmp_path / "saved"), train_on="all-assistant")
    undone = build_tokenizer(config)
    assert trained_text(undone) == "[INST]Yes[/INST]No[/INST]"
    assert not undone.prompt_config.policy.thinking


def test_what_cannot_be_meant_is_refused(built: Built) -> None:
    with pytest.raises(ConfigError, match=r"^train_on: unknown role to train on; got 'last'"):
        TokenizerConfig(model="m", train_on="last")
    with pytest.raises(ConfigError, match=r"^train_on: the option is for conversations"):
        built(mode="text", chat_template=None, train_on="last-assistant")
    with pytest.raises(ConfigError, match=r"^default: the prompt format trains every token"):
        built(prompt_format="default", train_tool_calls=False)
