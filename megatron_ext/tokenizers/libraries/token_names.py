"""Lists of names of special tokens, as users give them."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ext.errors import TokenizerError


def distinct_names(given: Iterable[str], option: str) -> tuple[str, ...]:
    """The names of a list, checked.

    Args:
        given: What the user gave.
        option: What the option is called.

    Raises:
        TokenizerError: It is no list of names, a name is empty, or one stands twice.
    """
    names = () if isinstance(given, str) else tuple(given)
    wrong = next((name for name in names if not isinstance(name, str) or not name), None)
    if isinstance(given, str) or wrong is not None:
        raise TokenizerError(
            "special tokens are given as a list of names",
            got=repr(given if wrong is None else wrong),
            expected="strings that are not empty",
            where=option,
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TokenizerError("a special token is named twice", got=repr(twice), where=option)
    return names
