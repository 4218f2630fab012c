"""Assignment of ids to the tokens of a tiktoken vocabulary."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.libraries.tiktoken_file import TiktokenFile, pattern_of

MEGATRON_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
"""Default special tokens, in id order."""

_NUM_SPECIAL_TOKENS = 1000
_LARGEST_JSON_VOCABULARY = 1 << 17
_FILLER = re.compile(r"<SPECIAL_\d+>|<\|reserved_special_token_\d+\|>")


@dataclass(frozen=True, kw_only=True)
class TiktokenOptions:
    """Options of the user; None leaves the choice to the file."""

    pattern: str | None = None
    """``v1``, ``v2`` or a regular expression."""
    vocab_size: int | None = None
    """Number of ids, special tokens included."""
    num_special_tokens: int | None = None
    """Number of ids kept for special tokens."""
    special_tokens: Sequence[str] | None = None
    """Their names in id order."""
    additional: Sequence[str] = ()
    """More names, which take the places of fillers."""


@dataclass(frozen=True, kw_only=True)
class TiktokenVocabulary:
    """Vocabulary and pattern for tiktoken, with final ids."""

    file: Path
    """Path of the file."""
    pattern: str
    """Regular expression that cuts the text."""
    ids: dict[bytes, int]
    """Id of each ordinary token; tiktoken merges in id order."""
    special_ids: dict[str, int]
    """Id of each special token, fillers included, in id order."""
    vocab_size: int
    """Number of ids, unused ones included."""
    added: frozenset[str]
    """Special tokens that neither the file nor the list of names holds."""

    @property
    def fillers(self) -> frozenset[str]:
        """Placeholder special tokens, which others may replace."""
        return frozenset(filter(_FILLER.fullmatch, self.special_ids))


def lay_out(contents: TiktokenFile, options: TiktokenOptions) -> TiktokenVocabulary:
    """Give every token its id.

    Raises:
        TokenizerError: An option does not fit the file.
    """
    if contents.published is not None and options.special_tokens is None:
        pattern = contents.published.pattern if options.pattern is None else options.pattern
        ids, names = _published_ids(contents, options)
    else:
        settings = _settle(contents, options)
        pattern = settings["pattern"]
        ids, names = _ids(contents, settings)
    fixed = (options.num_special_tokens, options.vocab_size) != (None, None)
    added = [name for name in dict.fromkeys(options.additional) if name not in names.values()]
    names |= _free_ids(added, names, contents, fixed=fixed)
    return TiktokenVocabulary(
        file=contents.file,
        pattern=pattern_of(pattern),
        ids=ids,
        special_ids={name: token_id for token_id, name in sorted(names.items())},
        vocab_size=max(max(ids.values()), max(names, default=0)) + 1,
        added=frozenset(added),
    )


def _published_ids(
    contents: TiktokenFile, options: TiktokenOptions
) -> tuple[dict[bytes, int], dict[int, str]]:
    """Ids of the ordinary tokens and names of the special ids, as they were published.

    Ids that are kept for special tokens begin behind the last rank; those that the publisher left
    out are fillers.
    """
    assert contents.published is not None
    names = {token_id: name for name, token_id in contents.published.special_ids.items()}
    begin = max(contents.ranks.values()) + 1
    size = max(begin, max(names) + 1)
    if options.num_special_tokens is not None:
        if options.num_special_tokens < size - begin:
            raise TokenizerError(
                "there are more special tokens than ids kept for them",
                got=f"num_special_tokens = {options.num_special_tokens}",
                expected=f"at least {size - begin} for {contents.published.name}",
                where=contents.file,
            )
        fillers = {begin + i: f"<SPECIAL_{i}>" for i in range(options.num_special_tokens)}
        names = fillers | names
        size = begin + options.num_special_tokens
    if options.vocab_size not in (None, size):
        raise TokenizerError(
            f"the ids of {contents.published.name} are fixed",
            got=f"vocab_size = {options.vocab_size}",
            expected=size,
            fix="leave it out, or name special_tokens to lay the vocabulary out anew",
            where=contents.file,
        )
    return dict(contents.ranks), names


def _ids(
    contents: TiktokenFile, settings: Mapping[str, Any]
) -> tuple[dict[bytes, int], dict[int, str]]:
    """Ids of the ordinary tokens and names of the special ids, in two blocks."""
    listed = _filled(settings["special_tokens"], settings["num_special_tokens"])
    size = _size(settings.get("vocab_size"), contents, len(listed))
    first = 0 if contents.specials_first else size - len(listed)
    shift, stop = (len(listed), size) if contents.specials_first else (0, first)
    ids = {token: rank + shift for token, rank in contents.ranks.items() if rank + shift < stop}
    return ids, {first + i: name for i, name in enumerate(listed)}


def _settle(contents: TiktokenFile, options: TiktokenOptions) -> dict[str, Any]:
    """The options given, else those of the file, else the defaults."""
    settings: dict[str, Any] = {
        "pattern": "v2" if contents.published is None else contents.published.pattern,
        "num_special_tokens": _NUM_SPECIAL_TOKENS,
        "special_tokens": list(MEGATRON_SPECIAL_TOKENS),
        **contents.says,
    }
    given = {
        "pattern": None if options.pattern is None else pattern_of(options.pattern),
        "vocab_size": options.vocab_size,
        "num_special_tokens": options.num_special_tokens,
        "special_tokens": None if options.special_tokens is None else list(options.special_tokens),
    }
    for name, value in given.items():
        if value is None:
            continue
        if name in contents.says and contents.says[name] != value:
            raise TokenizerError(
                f"the option {name} differs from the file",
                got=value,
                expected=contents.says[name],
                fix="leave it out",
                where=contents.file,
            )
        settings[name] = value
    return settings


def _filled(names: Sequence[str], count: int) -> list[str]:
    """``names`` filled up to ``count``."""
    if count < len(names):
        raise TokenizerError(
            "there are more special tokens than ids kept for them",
            got=f"{len(names)} names",
            expected=f"at most num_special_tokens = {count}",
            fix="raise num_special_tokens",
        )
    filled = [*names, *(f"<SPECIAL_{i}>" for i in range(len(names), count))]
    if len(set(filled)) < len(filled):
        twice = next(name for name in filled if filled.count(name) > 1)
        raise TokenizerError(
            "a special token is named twice", got=repr(twice), where="special_tokens"
        )
    return filled


def _size(requested: int | None, contents: TiktokenFile, num_special: int) -> int:
    """Vocabulary size, special tokens included, which the file must be able to fill."""
    full = max(contents.ranks.values()) + 1 + num_special
    if requested is None:
        return min(full, _LARGEST_JSON_VOCABULARY) if contents.specials_first else full
    if not num_special + 256 <= requested <= full:
        raise TokenizerError(
            "the file cannot fill this vocabulary",
            got=f"vocab_size = {requested}",
            expected=f"{num_special + 256} to {full}: {num_special} special tokens and at least "
            f"the 256 bytes of {full - num_special} ranks",
            where=contents.file,
        )
    return requested


def _free_ids(
    added: Sequence[str], names: Mapping[int, str], contents: TiktokenFile, *, fixed: bool
) -> dict[int, str]:
    """Ids for ``added`` names: fillers behind the last special token, then new ids at the end.

    Args:
        added: New names.
        names: Name of each special id.
        fixed: The user stated the number of ids.
    """
    named = (token_id for token_id, name in names.items() if not _FILLER.fullmatch(name))
    last = max(named, default=-1)
    free = sorted(i for i, name in names.items() if i > last and _FILLER.fullmatch(name))
    missing = len(added) - len(free)
    if missing > 0 and not contents.specials_first and not fixed:
        end = max(max(contents.ranks.values()), max(names, default=0)) + 1
        free += range(end, end + missing)
    elif missing > 0:
        raise TokenizerError(
            "no id is free for a special token",
            got=repr(added[len(free)]),
            expected=f"at most {len(free)} more",
            fix="raise num_special_tokens",
            where=contents.file,
        )
    return dict(zip(free, added, strict=False))
