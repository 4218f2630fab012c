"""Answers from an OpenAI-compatible endpoint (``/v1/chat/completions``): text in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.engines.engine import EngineConfig, Sampling
from megatron_ext.errors import DistributedError
from megatron_ext.imports import needed_packages


class Answer(NamedTuple):
    """What a model wrote."""

    text: str

    is_whole: bool
    """Whether the model ended it; otherwise it was cut at the most tokens, or withheld."""

    others: Mapping[str, Any] = {}
    """Thinking and tool calls, as fields of the message."""


class ChatEndpoint:
    """A model behind an API that takes and gives messages.

    Args:
        config: Address, name of the model, limits and where the key is.
    """

    def __init__(self, config: EngineConfig) -> None:
        # Late: only those that ask an endpoint need requests.
        with needed_packages("--endpoint"):
            from megatron_ext.engines.http_client import HttpClient

        self._config = config
        self._client = HttpClient(config, where="--endpoint")

    def answers(
        self, records: Sequence[ConversationRecord], sampling: Sampling, first: int = 0
    ) -> list[Answer]:
        """The answer to each conversation, in order.

        Args:
            first: Number of the first record among all, which its seed depends on.

        Raises:
            DistributedError: No answer, or one that cannot be read; with the number of the record.
        """
        bodies = [
            self._body(record, sampling, first + number) for number, record in enumerate(records)
        ]
        found = []
        for answer in self._client.begin("/v1/chat/completions", bodies):
            try:
                found.append(self._answer(answer()))
            except DistributedError as error:
                where = f"conversation {first + len(found) + 1}"
                raise DistributedError(str(error), where=where) from error
        return found

    def _body(
        self, record: ConversationRecord, sampling: Sampling, number: int
    ) -> Mapping[str, Any]:
        body = {
            "messages": list(record.messages),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed + number,
        }
        if self._config.model is not None:
            body["model"] = self._config.model
        return body | ({"tools": record.tools} if record.tools else {})

    def _answer(self, answer: Any) -> Answer:
        try:
            (choice,) = answer["choices"]
            message, reason = choice["message"], choice["finish_reason"]
            # Null beside tool calls, where all was thinking, and where a filter withheld the text.
            text = message.get("content") or ""
            if not isinstance(text, str):
                raise TypeError(f"content {text!r}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DistributedError(
                "the endpoint's answer cannot be read",
                where="--endpoint",
                got=f"{type(error).__name__}: {error}",
                expected="one choice with a message that has a text",
            ) from error
        # vLLM has renamed the former the latter.
        thinking = message.get("reasoning_content") or message.get("reasoning")
        others = {"reasoning_content": thinking, "tool_calls": message.get("tool_calls")}
        others = {name: value for name, value in others.items() if value}
        return Answer(text, reason in ("stop", "tool_calls"), others)
