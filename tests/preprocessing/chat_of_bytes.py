"""A tokenizer of conversations small enough to read, whose ids tell what is trained."""

import json
from collections import OrderedDict

import numpy as np

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.conversation.message import ChatTemplates
from megatron_ext.errors import ConversationError

BEGIN, STOP, EOD, TRAINED = 1, 2, 3, 256
"""Begin of a conversation, end of a turn, end of a document; trained bytes are shifted by this."""


class ChatOfBytes(ChatTemplates):
    """Each message is its bytes and a stop; those of the assistant are trained, and shifted.

    Variables of the template are written before the messages, as JSON.

    Args:
        trains_all: Train every token, as the prompt format ``default`` does.
    """

    path = None
    mode = "sft"
    prompt_config = "bytes"
    template_choice = ""
    vocab_size = 1000
    eod = eos = eos_id = EOD
    pad = pad_id = 0

    def __init__(self, *, trains_all=False):
        self._trains_all = trains_all

    @property
    def unique_identifiers(self):
        return OrderedDict({"class": "ChatOfBytes", "trains_all": str(self._trains_all)})

    def fingerprint(self):
        return "bytes"

    def tokenize_conversation(
        self, conversation, return_target, add_generation_prompt, template_variables
    ):
        assert return_target
        assert not add_generation_prompt
        written = json.dumps(template_variables).encode() if template_variables else b""
        ids, trained = [BEGIN, *written], [self._trains_all] * (1 + len(written))
        for turn, message in enumerate(conversation):
            if message.get("role") not in ("user", "assistant"):
                raise ConversationError("unknown role", where=f"message {turn}")
            is_trained = message["role"] == "assistant"
            raw = [*message["content"].encode(), STOP]
            ids += [byte + TRAINED * is_trained for byte in raw]
            trained += [is_trained or self._trains_all] * len(raw)
        array = np.array(ids, np.int64)
        return array, np.where(trained, array, IGNORE_INDEX)


def conversation(*contents):
    """Turns of a user and an assistant, alternating."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
