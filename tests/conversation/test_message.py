"""What is no conversation is refused with the place that is wrong."""

from typing import Any

import pytest

from megatron_ext.conversation import prompt_config_of, tokenize_conversation
from megatron_ext.conversation.message import check_answers, check_conversation
from megatron_ext.errors import ConversationError
from tests.conversation.byte_tokenizer import ByteTokenizer

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello"}
BE_BRIEF = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}

MALFORMED: dict[str, tuple[Any, str]] = {
    "text": ("Hi", "^a conversation is a list of messages; got str"),
    "a message": (HI, "^a conversation is a list of messages; got dict"),
    "nothing": (None, "^a conversation is a list of messages; got NoneType"),
    "empty": ([], "^the conversation is empty"),
    "no mapping": ([HI, "Hello"], r"^conversation\[1\]: a message is a mapping .*; got str"),
    "no role": (
        [{"from": "human", "value": "Hi"}],
        r"^conversation\[0\]: the message has no role; got the keys from, value",
    ),
    "unknown role": (
        [HI, {"role": "critic", "content": "b"}],
        r"^conversation\[1\]: unknown role; got 'critic'; expected one of assistant, ",
    ),
    "a role that is no text": (
        [{"role": 1, "content": "b"}],
        r"^conversation\[0\]: unknown role; got 1",
    ),
    "a role that is a list": (
        [{"role": ["user"], "content": "b"}],
        r"^conversation\[0\]: unknown role; got \['user'\]",
    ),
    "missing content": (
        [HI, {"role": "assistant"}],
        r"^conversation\[1\]: the message has no content",
    ),
    "no content": (
        [{"role": "user", "content": None}],
        r"^conversation\[0\]: the content is not text; got NoneType",
    ),
    "a number as content": (
        [HI, {"role": "assistant", "content": 4}],
        r"^conversation\[1\]: the content is not text; got int",
    ),
    "half a surrogate pair": (
        [HI, {"role": "assistant", "content": "a\ud83d"}],
        r"^conversation\[1\]: .*lone surrogate at character 1; got U\+D83D",
    ),
    "assistant first": ([HELLO, HI, HELLO], r"^conversation\[0\]: the assistant speaks first"),
    "assistant after system": (
        [BE_BRIEF, HELLO, HI],
        r"^conversation\[1\]: the assistant speaks first",
    ),
}


@pytest.mark.parametrize(("conversation", "message"), MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("return_target", [False, True], ids=["prompt", "target"])
def test_what_is_no_conversation_is_refused(
    conversation: Any, message: str, return_target: bool
) -> None:
    tokenizer = ByteTokenizer()
    config = prompt_config_of("qwen2p5", tokenizer)
    with pytest.raises(ConversationError, match=message) as caught:
        tokenize_conversation(tokenizer, conversation, config, return_target, False)
    assert "\n" not in str(caught.value)


WELL_FORMED: dict[str, list[dict[str, Any]]] = {
    "question": [HI],
    "instruction alone": [BE_BRIEF],
    "several instructions": [BE_BRIEF, {"role": "developer", "content": "x"}, HI, HELLO],
    "two answers in a row": [HI, HELLO, HELLO],
    "a tool": [HI, CALL, {"role": "tool", "content": "{}"}, HELLO],
    "an empty question": [{"role": "user", "content": ""}, HELLO],
}


@pytest.mark.parametrize("conversation", WELL_FORMED.values(), ids=WELL_FORMED)
def test_a_conversation_is_taken(conversation: list[dict[str, Any]]) -> None:
    check_conversation(conversation)
    check_conversation(tuple(conversation))


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ([HI], "^there is nothing to train on"),
        (
            [HI, {"role": "assistant", "content": ""}],
            r"^conversation\[1\]: the assistant says nothing",
        ),
        ([HI, CALL | {"tool_calls": []}], r"^conversation\[1\]: the assistant says nothing"),
    ],
    ids=["no answer", "empty answer", "neither content nor calls"],
)
def test_what_nothing_can_be_learned_from_is_refused(
    conversation: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConversationError, match=message):
        check_answers(
            conversation, [i for i, m in enumerate(conversation) if m["role"] == "assistant"]
        )
