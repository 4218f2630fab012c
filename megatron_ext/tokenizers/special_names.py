"""The names that tokenizer files give their special tokens when no configuration says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

SpecialRole = Literal["bos", "eos", "pad", "unk", "mask", "cls", "sep"]

CONVENTIONAL_NAMES: dict[SpecialRole, tuple[str, ...]] = {
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>"),
    "eos": ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
    "cls": ("<cls>", "[CLS]"),
    "sep": ("<sep>", "[SEP]"),
}


def conventional_ids(find: Callable[[str], int | None]) -> dict[SpecialRole, int | None]:
    """Id of every role by its conventional names."""
    return {role: conventional_id(role, find) for role in CONVENTIONAL_NAMES}


def conventional_id(role: SpecialRole, find: Callable[[str], int | None]) -> int | None:
    """Id of the first conventional name of ``role`` that ``find`` knows."""
    ids = (find(name) for name in CONVENTIONAL_NAMES[role])
    return next((token_id for token_id in ids if token_id is not None), None)
