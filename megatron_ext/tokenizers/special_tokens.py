"""Special tokens: conventional names, ids by role, added tokens, and control tokens in a text."""

from __future__ import annotations

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from megatron_ext.errors import TokenizerError
from megatron_ext.registry import did_you_mean

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
"""Order in which Megatron adds the special tokens of roles."""


def names_to_add(roles: Mapping[Role, str | None], others: Sequence[str]) -> list[str]:
    """Names that a user gives, in the order in which new ones get ids.

    Args:
        roles: Name by role; these come first, as Megatron has them.
        others: More names. One that also has a role keeps its place here: it was added later.
    """
    ordered = sorted(roles, key=(*_ORDER_OF_ROLES, *roles).index)
    names = (roles[role] for role in ordered)
    return list(dict.fromkeys([*(n for n in names if n is not None and n not in others), *others]))


def conventional_ids(find: Callable[[str], int | None]) -> dict[SpecialRole, int | None]:
    """Id of every role: that of the first of its conventional names that ``find`` knows."""
    found = {role: map(find, names) for role, names in CONVENTIONAL_NAMES.items()}
    return {role: next((i for i in ids if i is not None), None) for role, ids in found.items()}


class RoleIds(ABC):
    """Properties with the special id, and its name, of each role but the padding."""

    @abstractmethod
    def special_id(self, role: SpecialRole) -> int | None:
        """Id of the special token of a role; None where the tokenizer has none."""

    @property
    @abstractmethod
    def special_token_names(self) -> dict[str, str]:
        """Name of each existing special token by ``bos_token``, ``eos_token`` ..."""

    @property
    def bos_id(self) -> int | None:
        """Id of the beginning of sequence."""
        return self.special_id("bos")

    @property
    def eos_id(self) -> int | None:
        """Id of the end of sequence."""
        return self.special_id("eos")

    @property
    def unk_id(self) -> int | None:
        """Id of the unknown token."""
        return self.special_id("unk")

    @property
    def mask_id(self) -> int | None:
        """Id of a masked position."""
        return self.special_id("mask")

    @property
    def cls_id(self) -> int | None:
        """Id of the classification token."""
        return self.special_id("cls")

    @property
    def sep_id(self) -> int | None:
        """Id of the separator."""
        return self.special_id("sep")

    bos_token = property(lambda self: self.special_token_names.get("bos_token"))
    eos_token = property(lambda self: self.special_token_names.get("eos_token"))
    unk_token = property(lambda self: self.special_token_names.get("unk_token"))
    mask_token = property(lambda self: self.special_token_names.get("mask_token"))
    cls_token = property(lambda self: self.special_token_names.get("cls_token"))
    sep_token = property(lambda self: self.special_token_names.get("sep_token"))


_ADDITIONAL = "additional_special_tokens"
_ROLE_OPTIONS = tuple(f"{role}_token" for role in CONVENTIONAL_NAMES)


class AddedTokens:
    """Names to add, as Megatron's and HuggingFace's ``add_special_tokens`` take them.

    Args:
        given: Names; or a mapping of ``bos_token``, ``pad_token`` ... to a name each, and of
            ``additional_special_tokens`` to several.

    Raises:
        TokenizerError: ``given`` is neither, or has an unusable key or name.
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
        """A library's options, with these tokens appended to those they name already."""
        joined = {**options, **self._roles}
        # Those with roles too: a library adds a role's token first unless it is named here.
        names = dict.fromkeys([*(options.get(_ADDITIONAL) or ()), *self.names])
        if names:
            joined[_ADDITIONAL] = tuple(names)
        return joined


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A name that becomes one id, wherever control tokens are read."""

    name: str
    """Spelling in a text."""
    token_id: int
    """Id that the name becomes."""
    lstrip: bool = False
    """Strip the white space before the token."""
    rstrip: bool = False
    """Strip the white space after the token."""
    single_word: bool = False
    """Match only where no word character is next to the name."""


class ControlMatch(NamedTuple):
    """A control token in a text: the characters from ``begin`` up to ``end``."""

    begin: int
    end: int
    token_id: int


class ControlTokens:
    """The control tokens of a vocabulary.

    Args:
        tokens: In any order; of two with one name the first counts.
    """

    def __init__(self, tokens: Sequence[ControlToken]) -> None:
        self.by_name: dict[str, ControlToken] = {}
        for token in tokens:
            if token.name:
                self.by_name.setdefault(token.name, token)
        self.ids = frozenset(token.token_id for token in tokens)
        self._named: dict[frozenset[str], ControlTokens] = {}

    def named(self, names: frozenset[str]) -> ControlTokens:
        """The control tokens with one of ``names``."""
        if names not in self._named:
            few = [token for name, token in self.by_name.items() if name in names]
            self._named[names] = ControlTokens(few)
        return self._named[names]

    def find(
        self, text: str, spans: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[ControlMatch]:
        """Control tokens in ``text`` from left to right; the longest of several at one place.

        Args:
            text: Any string.
            spans: Half-open character ranges, in order and apart; a name counts only whole inside
                one of them. Everywhere when None.
        """
        if self._pattern is None:
            return
        find, plain = self._pattern.finditer, self._plain_ids
        done = 0
        for start, stop in ((0, len(text)),) if spans is None else spans:
            # A match with an end position sees no character beyond it.
            for match in find(text, start if start > done else done, stop):
                begin, end = match.span()
                name = match[0]
                if name in plain:
                    yield ControlMatch(begin, end, plain[name])
                    done = end
                    continue
                token = self.by_name[name]
                if token.single_word and _touches_a_word(text, begin, end):
                    continue
                if token.lstrip:
                    begin = max(done, len(text[done:begin].rstrip()) + done)
                if token.rstrip:
                    end += _leading_space(text, end)
                yield ControlMatch(begin, end, token.token_id)
                done = end

    @cached_property
    def _plain_ids(self) -> dict[str, int]:
        """Id of each name without conditions on its neighbours, and without stripped space."""
        return {
            name: token.token_id
            for name, token in self.by_name.items()
            if not (token.lstrip or token.rstrip or token.single_word)
        }

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        if not self.by_name:
            return None
        return re.compile(_any_of(list(self.by_name)))


def _any_of(names: Sequence[str]) -> str:
    """A regular expression for the longest of ``names``, which differ.

    It is a trie, which branches by character: in a plain alternation each of perhaps a thousand
    names would be tried at every ``<`` of a text.
    """
    if len(names) == 1:
        return re.escape(names[0])
    tails: dict[str, list[str]] = {}
    for name in names:
        tails.setdefault(name[:1], []).append(name[1:])
    # A name that ends here comes last: a longer one with this prefix precedes it.
    ways = [re.escape(first) + _any_of(tails[first]) for first in sorted(tails, reverse=True)]
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


def _leading_space(text: str, begin: int) -> int:
    """Number of white-space characters of ``text`` from ``begin`` on."""
    end = begin
    while end < len(text) and text[end].isspace():
        end += 1
    return end - begin


def _touches_a_word(text: str, begin: int, end: int) -> bool:
    neighbours = text[max(0, begin - 1) : begin] + text[end : end + 1]
    return any(map(_is_of_a_word, neighbours))


def _is_of_a_word(character: str) -> bool:
    r"""Whether Rust's ``\w`` matches, which unlike Python's knows marks and joiners.

    Letters in circles and squares, which it knows too, are left out.
    """
    kind = unicodedata.category(character)
    return kind[0] in "LM" or kind in ("Nd", "Nl", "Pc") or character in "\u200c\u200d"
