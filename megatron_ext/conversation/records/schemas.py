"""Registry of record schemas, and detection of the schema of records.

Reads records of a question and its answer: Alpaca, dolly, tool calls as xLAM has them, and TRL's
conversations in two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, cast

from megatron_ext.conversation.message import Message
from megatron_ext.conversation.records import turns
from megatron_ext.conversation.records.field import first_key, keys_seen, list_of, text_of
from megatron_ext.conversation.records.turns import (
    TURN_KEYS,
    ConversationRecord,
    TurnsReader,
    template_variables,
    tool_calls,
    with_system,
)
from megatron_ext.errors import ConversationError
from megatron_ext.registry import Registry

QUESTIONS: Final = ("instruction", "question", "query", "prompt")
INPUTS: Final = ("input", "context")
ANSWERS: Final = ("output", "response", "answer", "completion")
HISTORY: Final = "history"
CALLS: Final = "answers"
PROMPT: Final = "prompt"
COMPLETION: Final = "completion"


def is_alpaca(record: Mapping[str, Any], key: str | None) -> bool:
    """Whether the record has a text as its question and one as its answer."""
    asks, answers = first_key(record, QUESTIONS), first_key(record, ANSWERS)
    return (
        key is None
        and isinstance(record.get(asks or ""), str)
        and isinstance(record.get(answers or ""), str)
    )


def read_alpaca(record: Mapping[str, Any], key: str | None) -> ConversationRecord:
    """The history, the question with its input on a line of its own, and the answer.

    Of several question or answer fields the first in the order of ``QUESTIONS`` and ``ANSWERS`` is
    read.

    Raises:
        ConversationError: A field is missing or holds no text.
    """
    question = _required(record, QUESTIONS)
    answer = _required(record, ANSWERS)
    inputs = [text_of(record, name, name) for name in INPUTS]
    asked = "\n".join(text for text in (question, *inputs) if text)
    messages = [*_history(record), *_turn(asked, answer)]
    return ConversationRecord(with_system(messages, record), template_variables(record))


def is_tool_calls(record: Mapping[str, Any], key: str | None) -> bool:
    """Whether the record has a text as its question, and ``answers``."""
    return (
        key is None
        and record.get(CALLS) is not None
        and isinstance(record.get(first_key(record, QUESTIONS) or ""), str)
    )


def read_tool_calls(record: Mapping[str, Any], key: str | None) -> ConversationRecord:
    """The question, and the calls that answer it.

    Raises:
        ConversationError: A field is missing, or there is no call.
    """
    question = _required(record, QUESTIONS)
    if record.get(CALLS) is None:
        raise ConversationError(
            f"the record has no {CALLS}", got=keys_seen(record), expected="a list of tool calls"
        )
    calls = tool_calls(record[CALLS], CALLS)
    if not calls:
        raise ConversationError(
            "no tool is called", expected="at least one call", fix="leave it out", where=CALLS
        )
    messages: list[Message] = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    return ConversationRecord(with_system(messages, record), template_variables(record))


def is_prompt_completion(record: Mapping[str, Any], key: str | None) -> bool:
    """Whether the record has lists of messages as its prompt and as its completion alone."""
    is_in_two = key is None and all(_MESSAGES.fits(record, part) for part in (PROMPT, COMPLETION))
    return is_in_two and not _MESSAGES.fits(record, None)


def read_prompt_completion(record: Mapping[str, Any], key: str | None) -> ConversationRecord:
    """The messages of both; those of the prompt are not trained unless they say otherwise.

    Raises:
        ConversationError: A field is missing, or a message cannot be read.
    """
    asked = _MESSAGES.read(record, PROMPT)
    prompt = [
        message if "train" in message else {**message, "train": False} for message in asked.messages
    ]
    completion = _MESSAGES.read({COMPLETION: record.get(COMPLETION)}, COMPLETION)
    if not completion.messages:
        raise ConversationError("the completion holds no message", where=COMPLETION)
    return replace(asked, messages=[*prompt, *completion.messages])


def _required(record: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    key = first_key(record, keys)
    if key is None:
        raise ConversationError(
            f"the record has none of {', '.join(keys)}", got=keys_seen(record), expected="a text"
        )
    return text_of(record, key, key)


def _history(record: Mapping[str, Any]) -> list[Message]:
    """Messages of earlier turns, each a pair of question and answer."""
    messages: list[Message] = []
    for index, pair in enumerate(list_of(record.get(HISTORY), HISTORY)):
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise ConversationError(
                "a turn of the history is a question and its answer",
                got=repr(pair)[:60],
                expected="a list of two texts",
                where=f"{HISTORY}[{index}]",
            )
        messages += _turn(*pair)
    return messages


def _turn(asked: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


RecordSchemaName = Literal[
    "auto", "messages", "sharegpt", "alpaca", "tool-calls", "prompt-completion"
]
"""Name in ``RECORD_SCHEMA_REGISTRY``, or ``auto`` to detect the schema of the records."""

_FLAG: Final = "--conversation-schema"


@dataclass(frozen=True, slots=True)
class RecordSchema:
    """Layout of conversations in a data file. All other fields of a record are ignored.

    Attributes:
        shape: Description of a record for errors.
        keys: Fields of a record that are read.
        fits: Whether a record has that shape. The second argument names the field of the turns;
            with None it is one of the usual ones.
        read: Reads the conversation of a record; arguments as of ``fits``.
    """

    shape: str
    keys: tuple[str, ...]
    fits: Callable[[Mapping[str, Any], str | None], bool]
    read: Callable[[Mapping[str, Any], str | None], ConversationRecord]


RECORD_SCHEMA_REGISTRY: Final[Registry[RecordSchema]] = Registry("conversation schema")

_MESSAGES = TurnsReader("role", "content", TURN_KEYS)
_SHAREGPT = TurnsReader("from", "value", ("conversations", "conversation", "messages"))
_PAIR_KEYS = (*QUESTIONS, *turns.SURROUNDING_KEYS)

RECORD_SCHEMA_REGISTRY.register(
    "messages",
    RecordSchema(
        "messages, each with role and content",
        (*TURN_KEYS, *turns.SURROUNDING_KEYS),
        _MESSAGES.fits,
        _MESSAGES.read,
    ),
)
RECORD_SCHEMA_REGISTRY.register(
    "sharegpt",
    RecordSchema(
        "conversations, each with from and value",
        (*TURN_KEYS, *turns.SURROUNDING_KEYS),
        _SHAREGPT.fits,
        _SHAREGPT.read,
    ),
)
RECORD_SCHEMA_REGISTRY.register(
    "alpaca",
    RecordSchema(
        "instruction and output, or question and answer, prompt and completion",
        (*_PAIR_KEYS, *INPUTS, *ANSWERS, HISTORY),
        is_alpaca,
        read_alpaca,
    ),
)
RECORD_SCHEMA_REGISTRY.register(
    "tool-calls",
    RecordSchema(
        "query, tools and answers, which are tool calls",
        (*_PAIR_KEYS, CALLS),
        is_tool_calls,
        read_tool_calls,
    ),
)
RECORD_SCHEMA_REGISTRY.register(
    "prompt-completion",
    RecordSchema(
        "prompt and completion, each a list of messages",
        (PROMPT, COMPLETION, *turns.SURROUNDING_KEYS),
        is_prompt_completion,
        read_prompt_completion,
    ),
)


def conversation_record(
    record: object, schema: str = "auto", *, key: str | None = None
) -> ConversationRecord:
    """The conversation in one record of a data file; a list is taken for its turns.

    Texts stay as they are: a tool call that is spelled in a text with the tags of some model stays
    text. Fields of the record that its schema does not read (``id``, ``source``, ``images`` ...)
    are ignored.

    Args:
        record: Value of a line or row; not changed.
        schema: A row of ``RECORD_SCHEMA_REGISTRY``. With ``auto`` this record alone decides; where
            many come from one source, sniff once.
        key: Field that holds the turns, where it has an unusual name.

    Raises:
        ConversationError: The record is of no such schema, or something in it cannot be used; the
            error names the place, as in ``conversations[3].from``.
        UnknownNameError: There is no such schema.
    """
    if schema == "auto":
        schema = sniff_record_schema([record], key=key)
    row = RECORD_SCHEMA_REGISTRY[schema]
    fields = _fields(record, key)
    try:
        return row.read(fields, key)
    except ConversationError as error:
        others = _fitting(record, key)
        if not others or schema in others:
            raise
        raise ConversationError(
            f"the record is not of the schema {schema}: {error}",
            fix=f"it has {RECORD_SCHEMA_REGISTRY[others[0]].shape}: set {_FLAG} {others[0]}",
        ) from error


def sniff_record_schema(records: Iterable[object], *, key: str | None = None) -> RecordSchemaName:
    """The one schema that all records fit, ignoring records that fit none.

    ``RECORD_SCHEMA_REGISTRY[name].shape`` describes its records.

    Args:
        records: Some records of a source; a list is taken for turns.
        key: Field that holds the turns, where it has an unusual name.

    Raises:
        ConversationError: No record fits a schema, they fit different ones, or several fit.
    """
    candidates = [(record, _fitting(record, key)) for record in records]
    if not candidates:
        raise ConversationError("there are no records")
    fitting = [names for _, names in candidates if names]
    common = set(fitting[0]).intersection(*fitting[1:]) if fitting else set()
    if len(common) == 1:
        return common.pop()
    first = next((record for record, names in candidates if names or not fitting), None)
    if not fitting:
        raise ConversationError(
            "the records have no schema that is known",
            got=keys_seen(first) if isinstance(first, Mapping) else type(first).__name__,
            expected=_shapes(RECORD_SCHEMA_REGISTRY, key),
            fix="name the field that holds the turns",
        )
    possible = [name for name in RECORD_SCHEMA_REGISTRY if any(name in names for names in fitting)]
    raise ConversationError(
        "the records may be of several schemas" if common else "the records differ in schema",
        got=keys_seen(first) if isinstance(first, Mapping) else "lists",
        expected=_shapes(possible, key),
        fix=f"choose with {_FLAG}",
    )


def _fields(record: object, key: str | None) -> Mapping[str, Any]:
    if isinstance(record, Mapping):
        return record
    if isinstance(record, list):
        return {key or TURN_KEYS[0]: record}
    raise ConversationError("a record is a mapping, or a list of turns", got=type(record).__name__)


def _fitting(record: object, key: str | None) -> list[RecordSchemaName]:
    """Names of the schemas that the record fits."""
    if not isinstance(record, (Mapping, list)):
        return []
    fields = _fields(record, key)
    fitting = [name for name, row in RECORD_SCHEMA_REGISTRY.items() if row.fits(fields, key)]
    return cast("list[RecordSchemaName]", fitting)


def _shapes(names: Iterable[str], key: str | None) -> str:
    rows = ((name, RECORD_SCHEMA_REGISTRY[name]) for name in names)
    under = "" if key is None else f" under {key}"
    return "; ".join(f"{name}: {row.shape}{under}" for name, row in rows)
