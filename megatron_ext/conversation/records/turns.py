"""Reading of records with a list of turns: OpenAI's messages, ShareGPT's conversations.

Tools and their calls become OpenAI's form, but for the arguments of a call, which OpenAI has as
JSON in a string: a template that writes ``arguments | tojson`` quotes a string once more, and one
that iterates over the arguments fails on it. Templates that want a string test for it, or add the
arguments to a text, which writes their JSON here. So arguments are a mapping, in the order of the
record; only white space within a JSON string is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from megatron_ext.conversation.message import INSTRUCTION_ROLES, TOOL_ROLES, Message
from megatron_ext.conversation.records.field import (
    first_key,
    keys_seen,
    list_of,
    mapping_of,
    text_of,
)
from megatron_ext.errors import ConversationError
from megatron_ext.registry import did_you_mean


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """One conversation of a record, in the form that published templates read.

    The messages are not checked here: ``check_conversation`` checks roles, their order and
    contents.
    """

    messages: list[Message]
    """Role, content and other fields of each message; tool calls as
    ``{"type": "function", "function": {"name": ..., "arguments": {...}}}``."""

    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, with ``tools`` where there are any: pass them on as
    ``template_variables``."""

    def asked(self) -> ConversationRecord:
        """The conversation up to its last answers.

        Raises:
            ConversationError: It has answers alone.
        """
        messages = list(self.messages)
        while messages and messages[-1].get("role") == "assistant":
            messages.pop()
        if not messages:
            raise ConversationError(
                "a conversation has nothing to answer",
                got="messages of the assistant alone",
                expected="a message of another role",
            )
        return ConversationRecord(messages, self.template_variables)

    @property
    def tools(self) -> list[Any] | None:
        """Tools that may be called, each ``{"type": "function", "function": {...}}``."""
        return self.template_variables.get("tools")


def tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """The calls in a list, in one mapping, or in the JSON of either.

    Each is ``{"function": {"name": ..., "arguments": ...}}`` or ``{"name": ..., "arguments": ...}``
    and may have fields besides, such as ``id``, which are kept.

    Raises:
        ConversationError: A call has no name, or its arguments are not a mapping.
    """
    if isinstance(value, Mapping) or (isinstance(value, str) and value.lstrip()[:1] == "{"):
        return [_call(value, where)]
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(list_of(value, where))]


def tools(value: Any, where: str) -> list[Any]:
    """The tools in a list, or in the JSON of one; a bare function becomes a tool.

    Other mappings, such as a tool that a provider has built in, stay as they are.

    Raises:
        ConversationError: A tool is not a mapping.
    """
    return [_tool(tool, f"{where}[{i}]") for i, tool in enumerate(list_of(value, where))]


def _call(value: Any, where: str) -> dict[str, Any]:
    call = mapping_of(value, where)
    if call.get("function") is not None:
        rest = dict(call)
        function = mapping_of(call["function"], f"{where}.function")
        where = f"{where}.function"
    else:
        call_keys = ("name", "arguments", "parameters", "function")
        rest = {key: field for key, field in call.items() if key not in call_keys}
        function = {key: call[key] for key in call_keys if call.get(key) is not None}
    # Llama's own spelling of a call has parameters.
    key = "parameters" if function.get("arguments") is None else "arguments"
    named = {
        **{name: field for name, field in function.items() if name != key},
        "name": _function_name(function, where),
        "arguments": _arguments(function.get(key), f"{where}.{key}"),
    }
    return {"type": "function", **rest, "function": named}


def _function_name(function: Mapping[str, Any], where: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ConversationError(
            "the tool call has no name",
            got=repr(name) if "name" in function else keys_seen(function),
            expected='{"name": "...", "arguments": {...}}',
            where=where,
        )
    return name


def _arguments(value: Any, where: str) -> dict[str, Any]:
    """The arguments of a call by name; empty where it has none."""
    return {} if value is None or value == "" else dict(mapping_of(value, where))


def _tool(value: Any, where: str) -> Mapping[str, Any]:
    tool = mapping_of(value, where)
    if "function" in tool:
        return {"type": "function", **tool}
    if "name" not in tool:
        return tool
    function = {key: field for key, field in tool.items() if key != "type"}
    return {"type": tool.get("type", "function"), "function": function}


_ORDER: Final = ("reasoning", "text", "tool_call")
"""Types of parts, in the order in which a template writes them."""


def with_part_values(message: dict[str, Any], where: str) -> Message:
    """``message`` with LLaMA-Factory's parts of its content in the fields that templates read.

    Parts are ``{"type": ..., "value": ...}``. Text becomes the content, reasoning
    ``reasoning_content``, and a tool call one of ``tool_calls``. A content that is a string, or has
    parts in OpenAI's form, stays as it is.

    Raises:
        ConversationError: A part is of another type, has no text, or is out of the order in which
            templates write parts, such as a text after a call.
    """
    content = message.get("content")
    if not isinstance(content, list) or not any(map(_has_value, content)):
        return message
    values: dict[str, list[str]] = {kind: [] for kind in _ORDER}
    reached = 0
    for index, part in enumerate(content):
        kind, value = _kind_and_value(part, f"{where}[{index}]")
        if _ORDER.index(kind) < reached:
            raise ConversationError(
                f"a part of type {kind} comes after one of type {_ORDER[reached]}",
                expected=f"{', '.join(_ORDER)} in this order",
                fix="make it a message of its own",
                where=f"{where}[{index}]",
            )
        reached = _ORDER.index(kind)
        values[kind].append(value)
    calls = [
        call
        for index, value in enumerate(values["tool_call"], len(content) - len(values["tool_call"]))
        for call in tool_calls(value, f"{where}[{index}].value")
    ]
    return {
        **message,
        "content": "".join(values["text"]),
        **({"reasoning_content": "".join(values["reasoning"])} if values["reasoning"] else {}),
        **({"tool_calls": [*message.get("tool_calls", ()), *calls]} if calls else {}),
    }


def _has_value(part: object) -> bool:
    return isinstance(part, Mapping) and "value" in part and part.get("type") in _ORDER


def _kind_and_value(part: Any, where: str) -> tuple[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _ORDER or not isinstance(part.get("value"), str):
        raise ConversationError(
            "this is not a part of a content",
            got=repr(part)[:60],
            expected=f'{{"type": "...", "value": "..."}} of type {", ".join(_ORDER)}',
            where=where,
        )
    return str(kind), part["value"]


_ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "system": ("system",),
    "developer": ("developer",),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "bot", "model"),
    "tool": ("tool", "observation", "tool_response", "function_response", "function"),
    "ipython": ("ipython",),
}
_ROLE_OF_NAME: Final = {name: role for role, names in _ROLES.items() for name in names}
_CALL_NAMES: Final = ("function_call", "tool_call")
"""Roles of turns that are a tool call, which the assistant makes."""

_WEIGHTS: Final = ("train", "weight", "loss", "loss_weight")
"""Fields that say whether a message is trained: ours, OpenAI's, ms-swift's, LLaMA-Factory's."""


def message_of(turn: object, where: str, *, role_key: str, content_key: str) -> Message:
    """The message of one turn, whatever names its fields and roles have.

    Fields that are null are left out, the content excepted. Unknown fields are kept for the
    template. A tool call becomes one of ``tool_calls``, and a tool's result a message of the role
    ``tool``. A weight of 0 becomes ``"train": False``; a weight of 1 leaves the choice to the
    policy, and ``"train": true`` overrides it.

    Args:
        turn: Item of the list of turns.
        where: Its place, for errors.
        role_key: Field of the role: ``role`` or ``from``.
        content_key: Field of the content: ``content`` or ``value``.

    Raises:
        ConversationError: It is not a mapping, or a field is missing or unusable.
    """
    if not isinstance(turn, Mapping):
        raise ConversationError(
            "a turn is a mapping",
            got=type(turn).__name__,
            expected=f"{role_key} and {content_key}",
            where=where,
        )
    name = _role_name(turn, role_key, where)
    read_keys = (role_key, content_key, *_WEIGHTS)
    rest = {key: value for key, value in turn.items() if key not in read_keys and value is not None}
    train = _train(turn, where)
    if train is not None:
        rest["train"] = train
    if name in _CALL_NAMES:
        calls = tool_calls(_content(turn, content_key, where), f"{where}.{content_key}")
        return {"role": "assistant", "content": None, **rest, "tool_calls": calls}
    rest = _with_calls(rest, where)
    content = turn.get(content_key) if "tool_calls" in rest else _content(turn, content_key, where)
    if _ROLE_OF_NAME[name] in TOOL_ROLES:
        content = _result(content)
    message = {"role": _ROLE_OF_NAME[name], "content": content, **rest}
    return with_part_values(message, f"{where}.{content_key}")


def _result(content: Any) -> Any:
    """What a tool says: text and parts as they are, other values as the JSON that they are in the
    record, since templates write them in Python's form, or fail on them."""
    is_parts = isinstance(content, list) and all(
        isinstance(part, Mapping) and "type" in part for part in content
    )
    if content is None or isinstance(content, str) or is_parts:
        return content
    try:
        return json.dumps(content, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        # A date of a Parquet file, say: whoever checks the message refuses it.
        return content


def _role_name(turn: Mapping[str, Any], role_key: str, where: str) -> str:
    """The name of the turn's role; refuses unknown ones."""
    name = turn.get(role_key)
    if not isinstance(name, str):
        raise ConversationError(
            "the role is not text" if role_key in turn else "the turn has no role",
            got=repr(name) if role_key in turn else keys_seen(turn),
            where=f"{where}.{role_key}",
        )
    if name not in _ROLE_OF_NAME and name not in _CALL_NAMES:
        names = [*_ROLE_OF_NAME, *_CALL_NAMES]
        raise ConversationError(
            "unknown role",
            got=repr(name),
            expected=f"one of {', '.join(names)}",
            fix=did_you_mean(name, names),
            where=f"{where}.{role_key}",
        )
    return name


def _content(turn: Mapping[str, Any], content_key: str, where: str) -> Any:
    if content_key not in turn:
        raise ConversationError(
            f"the turn has no {content_key}", got=keys_seen(turn), where=f"{where}.{content_key}"
        )
    return turn[content_key]


def _with_calls(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``fields`` with tool calls, and OpenAI's older ``function_call``, in one form."""
    rest = {k: v for k, v in fields.items() if k not in ("tool_calls", "function_call")}
    calls = tool_calls(fields.get("tool_calls"), f"{where}.tool_calls")
    calls += tool_calls(fields.get("function_call"), f"{where}.function_call")
    return {**rest, "tool_calls": calls} if calls else rest


def _train(turn: Mapping[str, Any], where: str) -> bool | None:
    """Whether the turn is trained; None leaves the choice to the policy.

    Raises:
        ConversationError: A weight is neither 0 nor 1, for which there is no mask.
    """
    weights = {key: turn[key] for key in _WEIGHTS if turn.get(key) is not None}
    for key, value in weights.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise ConversationError(
                "a message is trained or it is not",
                got=repr(value),
                expected="0, 1, true or false",
                where=f"{where}.{key}",
            )
    if not all(weights.values()):
        return False
    return True if "train" in weights else None


_SYSTEM: Final = ("system", "system_prompt")
_TOOLS: Final = ("tools", "functions")
_VARIABLES: Final = "chat_template_kwargs"
_OF_ENCODER: Final = ("messages", "tools", "add_generation_prompt")
"""Variables that have a field of their own, or that the encoder sets."""
_OF_TOKENIZER: Final = ("_token", "_tokens")
"""Ends of the names of special tokens: ``bos_token``, ``eos_token``, ``image_token``."""

SURROUNDING_KEYS: Final = (*_SYSTEM, *_TOOLS, "documents", _VARIABLES)
"""Fields that are read from a record of any schema."""


def with_system(messages: Sequence[Message], record: Mapping[str, Any]) -> list[Message]:
    """``messages`` after the system text of ``record``, if that is not empty.

    Raises:
        ConversationError: The first message is a different instruction.
    """
    key = first_key(record, _SYSTEM)
    text = "" if key is None else text_of(record, key, key)
    if not text:
        return list(messages)
    if messages and messages[0].get("role") in INSTRUCTION_ROLES:
        if messages[0].get("content") == text:
            return list(messages)
        raise ConversationError(
            "the record has a system text, and the conversation begins with another",
            fix="leave one of them out",
            where=key,
        )
    return [{"role": "system", "content": text}, *messages]


def template_variables(record: Mapping[str, Any]) -> dict[str, Any]:
    """``tools`` (or OpenAI's older ``functions``), ``documents``, and ``chat_template_kwargs``.

    An empty list of tools counts as none: some templates test for None, others for emptiness.

    Raises:
        ConversationError: A field does not hold what it should, or a variable would take the place
            of a special token, which the tokenizer alone names.
    """
    variables: dict[str, Any] = {}
    if record.get(_VARIABLES) is not None:
        variables |= mapping_of(record[_VARIABLES], _VARIABLES)
    for name in list(variables):
        is_special = name.endswith(_OF_TOKENIZER)
        # Columns of Arrow have None in rows without the variable.
        if (is_special or name in _OF_ENCODER) and variables.pop(name) is not None:
            what = "replace a special token" if is_special else "set this variable of its template"
            raise ConversationError(
                f"a record cannot {what}",
                got=name,
                expected="variables of the template, such as enable_thinking",
                fix="leave it out" + (", and give the tools as tools" if name == "tools" else ""),
                where=_VARIABLES,
            )
    key = first_key(record, _TOOLS)
    tool_list = [] if key is None else tools(record[key], key)
    if tool_list:
        variables["tools"] = tool_list
    if record.get("documents"):
        variables["documents"] = record["documents"]
    return variables


TURN_KEYS: Final = ("messages", "conversations", "conversation")
"""Fields in which data sets have their turns."""


@dataclass(frozen=True, slots=True)
class TurnsReader:
    """Reader of records whose turns have two given fields.

    Attributes:
        role_key: Field of the role: ``role`` or ``from``.
        content_key: Field of the content: ``content`` or ``value``.
        keys: Fields in which a record may have its turns; the first that is there is read.
    """

    role_key: str
    content_key: str
    keys: tuple[str, ...]

    def fits(self, record: Mapping[str, Any], key: str | None) -> bool:
        """Whether the first turn has ``role_key``."""
        for name in self.keys if key is None else (key,):
            try:
                turns = list_of(record.get(name), name)
            except ConversationError:
                continue
            if turns and isinstance(turns[0], Mapping) and self.role_key in turns[0]:
                return True
        return False

    def read(self, record: Mapping[str, Any], key: str | None) -> ConversationRecord:
        """The conversation of the turns in ``key``, or in the first of ``keys``.

        Raises:
            ConversationError: There are none, or one cannot be read; the error names its place.
        """
        where = first_key(record, self.keys) if key is None else key
        if where is None or where not in record:
            raise ConversationError(
                f"the record has no {key or self.keys[0]}",
                got=keys_seen(record),
                expected=f"a list of turns with {self.role_key} and {self.content_key}",
            )
        turns = list_of(record[where], where)
        messages = [
            message_of(turn, f"{where}[{i}]", role_key=self.role_key, content_key=self.content_key)
            for i, turn in enumerate(turns)
        ]
        return ConversationRecord(with_system(messages, record), template_variables(record))
