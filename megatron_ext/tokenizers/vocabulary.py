"""The display strings of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, SupportsIndex, overload


class Vocabulary(list[str]):
    """The display string of each id in id order; empty where an id is unused.

    Megatron's code takes it for a list with some libraries and for a mapping with others, so
    ``vocabulary["<s>"]`` is an id and ``"<s>" in vocabulary`` is quick. Of two ids that show alike
    the first counts. It is not changed after it is made.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        super().__init__(tokens)

    @overload
    def __getitem__(self, key: SupportsIndex) -> str: ...
    @overload
    def __getitem__(self, key: slice) -> list[str]: ...
    @overload
    def __getitem__(self, key: str) -> int: ...
    def __getitem__(self, key: Any) -> Any:
        return self.ids[key] if isinstance(key, str) else super().__getitem__(key)

    def __contains__(self, token: object) -> bool:
        return token in self.ids

    @cached_property
    def ids(self) -> dict[str, int]:
        """Id of each display string."""
        ids: dict[str, int] = {}
        for token_id, token in enumerate(self):
            if token:
                ids.setdefault(token, token_id)
        return ids
