"""Special tokens that are added to a tokenizer after it was built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.errors import TokenizerError
from megatron_ext.registry import did_you_mean
from megatron_ext.tokenizers.special_names import CONVENTIONAL_NAMES

_ADDITIONAL = "additional_special_tokens"
_ROLE_OPTIONS = tuple(f"{role}_token" for role in CONVENTIONAL_NAMES)


class AddedTokens:
    """Names to add, as Megatron's and HuggingFace's ``add_special_tokens`` take them.

    Args:
        given: Names; or a mapping of ``bos_token``, ``pad_token`` ... to a name each, and of
            ``additional_special_tokens`` to several.

    Raises:
        TokenizerError: ``given`` is neither, or has a key or a name that cannot be.
    """

    def __init__(self, given: Sequence[str] | Mapping[str, Any]) -> None:
        if isinstance(given, str):
            raise TokenizerError(
                "the special tokens are one string", got=repr(given), fix="put it into a list"
            )
        if isinstance(given, Mapping):
            self._roles = {key: name for key, name in given.items() if key != _ADDITIONAL}
            self._additional = list(given.get(_ADDITIONAL) or ())
        else:
            self._roles, self._additional = {}, list(given)
        for key in self._roles:
            if key not in _ROLE_OPTIONS:
                raise TokenizerError(
                    "there is no such special token",
                    got=repr(key),
                    expected=f"one of {', '.join((*_ROLE_OPTIONS, _ADDITIONAL))}",
                    fix=did_you_mean(key, [*_ROLE_OPTIONS, _ADDITIONAL]),
                )
        for name in self.names:
            if not isinstance(name, str) or not name:
                raise TokenizerError(
                    "a special token has no name", got=repr(name), expected="a string"
                )

    @property
    def names(self) -> list[str]:
        """Every name, once."""
        return list(dict.fromkeys([*self._roles.values(), *self._additional]))

    def joined_to(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """A library's options with these tokens behind those that they name already."""
        joined = {**options, **self._roles}
        names = dict.fromkeys([*(options.get(_ADDITIONAL) or ()), *self._additional])
        if names:
            joined[_ADDITIONAL] = tuple(names)
        return joined
