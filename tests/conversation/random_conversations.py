"""Random conversations, as bad as people and programs write them."""

from typing import Any

from hypothesis import strategies as st

from tests.conversation.byte_tokenizer import CONTROL_TOKENS

Conversation = list[dict[str, Any]]

ODD_TEXT = (
    *("Hello", " world", "2", " ", "\n", "\n\n", "\r", "\r\n", "\t", "'s", "A", ".", "ß", "İ"),
    *(
        "é",
        "e\u0301\u0323",
        "👍🏽",
        "👩‍👩‍👧",
        "日本",
        "مرحبا",
        "\u202eשלום\u202c",
        "हिन्दी",
        "\u00a0",
        "\u2028",
    ),
    *("\x00", "\x1b[0m", "\x7f", "\ufeff", "\ufffd", "\u200b", "▁", "Ġ", "<0x0A>", "\U0010ffff"),
    *("<|im_", "start|>", "end|>", "<|", "|>", "</s", "<SPECIAL_", "12>", "</th", "ink>"),
    *("\\u003c", "&lt;", "%3C", "{{ bos_token }}", "{% endfor %}", "{#", "#}", "assistant\n"),
    *(
        "[INST]",
        "[/INST]",
        "<TOOLCALL>[",
        "]</TOOLCALL>",
        "/think",
        "/no_think",
        "user",
        "Assistant",
    ),
    *CONTROL_TOKENS,
)
words = st.one_of(
    st.sampled_from([text for text in ODD_TEXT if text != "<image>"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
)
contents = st.lists(words, max_size=6).map("".join)
calls = st.builds(
    lambda name, key, value: {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": name, "arguments": {key: value, "n": [1, None, value]}},
    },
    contents,
    contents,
    contents,
)


def conversations(*, tools: bool, calls: bool) -> st.SearchStrategy[Conversation]:
    """Conversations of 1 to 12 turns in any order.

    Args:
        tools: Tools speak.
        calls: The assistant calls them.
    """
    speakers = ["user", "assistant", "assistant", *["tool"] * tools]
    system = st.builds(lambda text: [{"role": "system", "content": text}], contents)
    question = st.builds(lambda text: [{"role": "user", "content": text}], contents)
    others = st.lists(
        st.sampled_from(speakers).flatmap(lambda role: _message(role, calls)), max_size=11
    )
    return st.builds(
        lambda *parts: [message for part in parts for message in part],
        st.one_of(st.just([]), system),
        question,
        others,
    )


def _message(role: str, with_calls: bool) -> st.SearchStrategy[dict[str, Any]]:
    message: dict[str, st.SearchStrategy[Any]] = {"role": st.just(role), "content": contents}
    plain = st.fixed_dictionaries(message)
    if role == "tool":
        return st.fixed_dictionaries(message | {"name": contents})
    if role != "assistant" or not with_calls:
        return plain
    called = {
        "role": st.just(role),
        "content": st.just(""),
        "tool_calls": st.lists(calls, min_size=1, max_size=1),
    }
    thought = message | {"reasoning_content": contents}
    return st.one_of(plain, plain, st.fixed_dictionaries(called), st.fixed_dictionaries(thought))
