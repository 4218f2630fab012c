"""Any template on any tokenizer, with the special tokens that it has."""

import pytest

from megatron_ext.conversation import apply_chat_template
from megatron_ext.errors import ConfigError, ConversationError
from tests.conversation.byte_tokenizer import ByteTokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}bot: {{ mode }}{% endif %}"
)
CONVERSATION = [{"role": "critic", "content": "</s>"}]


def test_it_returns_ids_or_text() -> None:
    tokenizer = ByteTokenizer()
    text = apply_chat_template(tokenizer, CONVERSATION, TEMPLATE, tokenize=False)
    ids = apply_chat_template(tokenizer, CONVERSATION, TEMPLATE)
    assert text == "<s>critic: </s></s>"
    assert ids == [tokenizer.bos_id, *b"critic: </s>", tokenizer.eos_id]


def test_variables_reach_the_template() -> None:
    text = apply_chat_template(
        ByteTokenizer(),
        CONVERSATION,
        TEMPLATE,
        tokenize=False,
        add_generation_prompt=True,
        mode="loud",
    )
    assert str(text).endswith("bot: loud")


def test_a_special_token_that_there_is_not_is_undefined() -> None:
    tokenizer = ByteTokenizer(special_token_names={})
    source = "{{ bos_token is defined }}{{ bos_token }}"
    assert apply_chat_template(tokenizer, CONVERSATION, source, tokenize=False) == "False"


@pytest.mark.parametrize(
    ("conversation", "source", "kind", "message"),
    [
        ([], TEMPLATE, ConversationError, "the conversation is empty"),
        (["Hi"], TEMPLATE, ConversationError, r"conversation\[0\]: a message is a mapping"),
        (CONVERSATION, "{{", ConfigError, "not a Jinja template"),
        (CONVERSATION, "{{ raise_exception('no') }}", ConversationError, "TemplateError: no"),
    ],
    ids=["empty", "no mapping", "no template", "refused"],
)
def test_bad_input_is_refused(
    conversation: list[dict[str, str]], source: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        apply_chat_template(ByteTokenizer(), conversation, source)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{}, len], r"tools\[1\]: a tool is no JSON schema; .*utils\.get_json_schema"),
        (["f"], r"tools\[0\]: a tool is no JSON schema; got str; expected a mapping$"),
        ({"type": "function"}, "tools: the tools are no list; got dict"),
    ],
    ids=["function", "name", "mapping"],
)
def test_tools_that_are_no_schemas_are_refused(tools: object, message: str) -> None:
    with pytest.raises(ConversationError, match=message):
        apply_chat_template(ByteTokenizer(), CONVERSATION, TEMPLATE, tools=tools)


@pytest.mark.parametrize("tools", [None, [], "", {}])
def test_what_is_empty_is_no_tools(tools: object) -> None:
    plain = apply_chat_template(ByteTokenizer(), CONVERSATION, TEMPLATE)
    assert apply_chat_template(ByteTokenizer(), CONVERSATION, TEMPLATE, tools=tools) == plain
