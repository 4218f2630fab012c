"""Conversations from published data sets, as templates take them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ext.conversation.records import conversation_record
from tests.conversation.shared_files import SHARED

Conversation = tuple[list[dict[str, Any]], dict[str, Any]]
"""Messages, and the variables that the template sees."""

_CHATS = (
    "fastchat/dummy_conversation.json",
    "llamafactory_chat/glaive_toolcall_en_demo.json",
    "llamafactory_chat/glaive_toolcall_zh_demo.json",
    "llamafactory_chat/identity.json",
    "llamafactory_chat/reason_tool_use_demo_50.jsonl",
    "llamafactory_chat/v1_sft_demo.jsonl",
    "gsm8k/train.jsonl",
)


def published_conversations() -> dict[str, list[Conversation]]:
    """File -> its conversations, in order."""
    corpora = SHARED / "corpora"
    found = {name: [_read(record) for record in _records(corpora / name)] for name in _CHATS}
    found["gsm8k/train.jsonl"] = list(_joined(found["gsm8k/train.jsonl"]))
    found["fastchat/mt_bench_question.jsonl"] = list(_with_references(corpora))
    found["oasst_seed/realistic_seed_data.json"] = list(_threads(corpora))
    return found


def _records(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        records: list[dict[str, Any]] = json.loads(text)
        return records
    return [json.loads(line) for line in text.splitlines() if line]


def _read(record: dict[str, Any]) -> Conversation:
    read = conversation_record(record)
    return [dict(message) for message in read.messages], dict(read.template_variables)


def _joined(conversations: list[Conversation]) -> Iterator[Conversation]:
    """Each 16 conversations of one question as one of 16."""
    for start in range(0, len(conversations), 16):
        yield [m for messages, _ in conversations[start : start + 16] for m in messages], {}


def _with_references(corpora: Path) -> Iterator[Conversation]:
    """Questions of several turns, with the reference answers of those that have some."""
    for record in _records(corpora / "fastchat/mt_bench_question.jsonl"):
        turns = zip(record["turns"], record.get("reference", ()), strict=False)
        messages = [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
            if all(turn)
        ]
        if messages:
            yield messages, {}


def _threads(corpora: Path) -> Iterator[Conversation]:
    """Every answer that nobody has answered, with what was said before it."""
    records = _records(corpora / "oasst_seed/realistic_seed_data.json")
    known = {record["user_message_id"]: record for record in records}
    parents = {record["parent_message_id"] for record in records}
    for record in records:
        if record["user_message_id"] in parents or record["role"] != "assistant":
            continue
        thread: list[dict[str, Any]] = []
        at: dict[str, Any] | None = record
        while at is not None:
            role = "user" if at["role"] == "prompter" else "assistant"
            thread.insert(0, {"role": role, "content": at["text"]})
            at = known.get(at["parent_message_id"])
        yield thread, {}
