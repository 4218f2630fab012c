"""Conversations in files, and a tokenizer that says how often it was asked."""

from itertools import pairwise

import numpy as np

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.conversation.rendering.template_limits import template_time
from megatron_ext.data.sft_dataset import SFTDataset
from megatron_ext.data.sft_records import SFTConfig
from megatron_ext.errors import UntrainedError
from tests.preprocessing.chat_of_bytes import BEGIN, ChatOfBytes, conversation
from tests.preprocessing.runs import write_json_lines

LENGTH = 32
"""Tokens of a sample."""


class Chat(ChatOfBytes):
    """``ChatOfBytes`` with what a dataset asks of a tokenizer besides.

    It writes the system message first, and the year where ``writes_year``.
    """

    bos = BEGIN

    def __init__(self, *, trains_all=False, writes_year=False):
        super().__init__(trains_all=trains_all)
        self.calls = 0
        self._writes_year = writes_year

    def tokenize_conversation(
        self, conversation, return_target, add_generation_prompt, template_variables
    ):
        self.calls += 1
        system = [message["content"] for message in conversation if message["role"] == "system"]
        turns = [message for message in conversation if message["role"] != "system"]
        ids, target = super().tokenize_conversation(
            turns, return_target, add_generation_prompt, template_variables
        )
        if (target == IGNORE_INDEX).all():
            raise UntrainedError("there is nothing to train on")
        head = "".join(system) + (f"{template_time():%Y}" if self._writes_year else "")
        raw = np.frombuffer(head.encode(), np.uint8).astype(np.int64)
        return (
            np.concatenate((ids[:1], raw, ids[1:])),
            np.concatenate((target[:1], np.full(len(raw), IGNORE_INDEX), target[1:])),
        )


def conversations(count):
    """Records of different lengths, each told by its first word."""
    return [
        {"messages": conversation(f"{i:02}", "a" * (1 + 5 * i % 17), "x", "b" * (i % 3 + 1))}
        for i in range(count)
    ]


def dataset(
    folder,
    records,
    *,
    tokenizer=None,
    sequence_length=LENGTH,
    num_samples=None,
    seed=5,
    context_parallel_size=1,
    create_attention_mask=False,
    **sft,
):
    """A dataset over ``records``, which are written to ``folder``."""
    path = folder / "data.jsonl"
    if not path.exists():
        write_json_lines(path, records)
    return SFTDataset.from_path(
        str(path),
        Chat() if tokenizer is None else tokenizer,
        sequence_length=sequence_length,
        num_samples=num_samples,
        seed=seed,
        context_parallel_size=context_parallel_size,
        create_attention_mask=create_attention_mask,
        sft=SFTConfig(**sft),
    )


def segments(sample):
    """Tokens and labels of each segment of a sample, that of the padding included."""
    bounds = sample["cu_seqlens"].tolist()
    return [
        (sample["tokens"][start:stop].tolist(), sample["labels"][start:stop].tolist())
        for start, stop in pairwise(bounds)
        if start < stop
    ]
