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
        by_key = given if isinstance(given, Mapping) else {_ADDITIONAL: given}
        self._roles = {key: name for key, name in by_key.items() if key != _ADDITIONAL}
        self.names: list[Any] = []
        """Every name, once, in the order given."""
        for key, value in by_key.items():
            for name in (value or ()) if key == _ADDITIONAL else (value,):
                if name not in self.names:
                    self.names.append(name)
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

    def joined_to(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """A library's options with these tokens behind those that they name already."""
        joined = {**options, **self._roles}
        # Those with roles too: a library adds a role's token first unless it is named here.
        names = dict.fromkeys([*(options.get(_ADDITIONAL) or ()), *self.names])
        if names:
            joined[_ADDITIONAL] = tuple(names)
        return joined
