"""The names that tokenizer files give their special tokens when no configuration says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

SpecialRole = Literal["bos", "eos", "pad", "unk", "mask", "cls", "sep"]
Role = TypeVar("Role", bound=str)

CONVENTIONAL_NAMES: dict[SpecialRole, tuple[str, ...]] = {
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>"),
    "eos": ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
    "cls": ("<cls>", "[CLS]"),
    "sep": ("<sep>", "[SEP]"),
}

_ORDER_OF_ROLES = ("unk", "mask", "pad", "sep", "eos", "bos", "cls")
"""In which order Megatron adds the special tokens of roles."""


def names_to_add(roles: Mapping[Role, str | None], others: Sequence[str]) -> list[str]:
    """Names that a user gave a tokenizer, in the order in which new ones get ids.

    Args:
        roles: Name by role; these come first, as Megatron has them.
        others: More names. One that has a role keeps its place among them: it was added later.
    """
    ordered = sorted(roles, key=(*_ORDER_OF_ROLES, *roles).index)
    names = (roles[role] for role in ordered)
    return list(dict.fromkeys([*(n for n in names if n is not None and n not in others), *others]))


def conventional_ids(find: Callable[[str], int | None]) -> dict[SpecialRole, int | None]:
    """Id of every role by its conventional names."""
    return {role: conventional_id(role, find) for role in CONVENTIONAL_NAMES}


def conventional_id(role: SpecialRole, find: Callable[[str], int | None]) -> int | None:
    """Id of the first conventional name of ``role`` that ``find`` knows."""
    ids = (find(name) for name in CONVENTIONAL_NAMES[role])
    return next((token_id for token_id in ids if token_id is not None), None)
