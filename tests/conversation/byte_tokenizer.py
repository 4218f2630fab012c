"""A tokenizer whose ids are the bytes of a text, and after them control tokens."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from megatron_ext.conversation.message import ByteEnds, ChatTemplates, IdArray

CONTROL_TOKENS = (
    *("<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<image>", "<img>", "</img>"),
    *(f"<SPECIAL_{number}>" for number in (10, 11, 12, 14, 15, 233)),
    *("[PREFIX]", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|python_tag|>", "<|finetune_right_pad_id|>", "<|end_of_text|>", "<think>", "</think>"),
)


class ByteTokenizer(ChatTemplates):
    """One token per byte, so that every mask is exact to the character.

    Args:
        chat_template: The tokenizer's own template.
        control_tokens: Names that become one id; ids follow the bytes.
        special_token_names: Names by role; the roles' ids follow from them.
    """

    def __init__(
        self,
        chat_template: str | None = None,
        *,
        control_tokens: Sequence[str] = CONTROL_TOKENS,
        special_token_names: Mapping[str, str] | None = None,
    ) -> None:
        self.chat_template = chat_template
        self._control = {name: 256 + index for index, name in enumerate(control_tokens)}
        self.special_token_names: Mapping[str, str] = (
            {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
            if special_token_names is None
            else special_token_names
        )

    @property
    def bos_id(self) -> int | None:
        return self._role("bos_token")

    @property
    def eos_id(self) -> int | None:
        return self._role("eos_token")

    @property
    def pad_id(self) -> int | None:
        return self._role("pad_token")

    @property
    def unk_id(self) -> int | None:
        return self._role("unk_token")

    def token_to_id(self, token: str) -> int:
        return self._control[token]

    def is_control(self, token_id: int) -> bool:
        return token_id >= 256

    @cached_property
    def _names(self) -> re.Pattern[str]:
        longest_first = sorted(self._control, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))

    def encode_with_control_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[IdArray, ByteEnds]:
        ids: list[np.ndarray] = []
        lengths: list[np.ndarray] = []
        done = 0

        def add_bytes(until: int) -> None:
            raw = np.frombuffer(text[done:until].encode(), np.uint8)
            ids.append(raw.astype(np.int32))
            lengths.append(np.ones(len(raw), np.int64))

        for start, stop in spans:
            for match in self._names.finditer(text, start, stop):
                add_bytes(match.start())
                ids.append(np.array([self._control[match[0]]], np.int32))
                lengths.append(np.array([len(match[0].encode())], np.int64))
                done = match.end()
        add_bytes(len(text))
        return np.concatenate(ids), np.cumsum(np.concatenate(lengths))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, control tokens by name."""
        names = {token_id: name for name, token_id in self._control.items()}
        return b"".join(
            names[i].encode() if i in names else bytes([i]) for i in map(int, ids)
        ).decode()

    def _role(self, role: str) -> int | None:
        name = self.special_token_names.get(role)
        return None if name is None else self._control[name]
