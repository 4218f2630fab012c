"""How many untrained tokens stand before an answer: a consequence of the template."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_ext.conversation.byte_offsets import byte_offsets
from megatron_ext.conversation.encoded_conversation import (
    EncodedConversation,
    encode_conversation,
)
from megatron_ext.conversation.message import place
from megatron_ext.conversation.prompt_config import PromptConfig
from megatron_ext.conversation.protocol import ConversationTokenizer
from megatron_ext.errors import ConfigError

_ROLES = {0: "user", 1: "assistant"}
_SAMPLE = tuple({"role": role, "content": "x"} for role in _ROLES.values())


def assistant_prefix_len(tokenizer: ConversationTokenizer, prompt_config: PromptConfig) -> int:
    """Number of tokens that ``prompt_config`` writes in an assistant's turn before the answer."""
    encoded = encode_conversation(tokenizer, _SAMPLE, prompt_config)
    return prefix_lengths(encoded, _ROLES).get(1, 0)


def prefix_lengths(encoded: EncodedConversation, roles: Mapping[int, str]) -> dict[int, int]:
    """Number of untrained tokens at the start of each assistant's turn, by message.

    Messages whose template has no loop over messages have no turns and are left out.
    """
    begins = np.concatenate(([0], encoded.byte_ends[:-1]))
    offsets = byte_offsets(encoded.text)
    turns: dict[int, int] = {}
    for span in encoded.spans:
        turn = span.provenance.turn
        if turn is not None and roles.get(turn) == "assistant":
            turns.setdefault(turn, span.start)
    trained = np.flatnonzero(encoded.trained)
    lengths: dict[int, int] = {}
    for turn, start in turns.items():
        first = int(np.searchsorted(begins, offsets[start]))
        at = int(np.searchsorted(trained, first))
        if at < len(trained):
            lengths[turn] = int(trained[at]) - first
    return lengths


def check_assistant_prefix(
    encoded: EncodedConversation, roles: Mapping[int, str], stated: int
) -> None:
    """Refuse a stated prefix length that is not the one of the render.

    Raises:
        ConfigError: An answer has another number of untrained tokens before it.
    """
    for turn, length in prefix_lengths(encoded, roles).items():
        if length != stated:
            raise ConfigError(
                "assistant_prefix_len is not what the template writes before an answer",
                got=stated,
                expected=length,
                fix="leave it unset: it follows from the template",
                where=place(turn),
            )
