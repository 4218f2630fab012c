"""Which id is what in a vocabulary of bytes: the bytes, then roles, then special tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.special_names import SpecialRole, conventional_ids

BYTES: Final = 256
"""Number of bytes; their ids are their values."""

_LEGACY_IDS: Mapping[SpecialRole, int] = {"eos": 0, "pad": 1}
_NEEDED: tuple[SpecialRole, ...] = ("eos", "pad")


@dataclass(frozen=True, slots=True)
class ByteLevelVocabulary:
    """Names and roles of ids."""

    pieces: list[str]
    """Display string of each id [V]; empty where it is unused."""
    roles: Mapping[SpecialRole, int | None]
    """Id of each special role, a byte's perhaps; None where there is none."""


def byte_level_vocabulary(
    vocab_size: int,
    special_tokens: Iterable[str],
    additional_special_tokens: Sequence[str],
    role_ids: Mapping[SpecialRole, int | None],
    *,
    legacy: bool,
) -> ByteLevelVocabulary:
    """The vocabulary that ``ByteLevelTokenizer`` describes.

    Raises:
        TokenizerError: A size, an id or a name is unusable.
    """
    if vocab_size < BYTES:
        raise TokenizerError(
            "the vocabulary is too small",
            got=vocab_size,
            expected=f">= {BYTES}: one id for each byte",
            where="vocab_size",
        )
    ids = _ids_of_names(vocab_size, special_tokens, additional_special_tokens)
    size = vocab_size + len(ids)
    for role, token_id in role_ids.items():
        if token_id is not None and token_id >= size:
            raise TokenizerError(
                "the id is outside the vocabulary",
                got=token_id,
                expected=f"0 to {size - 1}, or a negative one for none",
                where=f"{role}_id",
            )
    roles = _roles(role_ids, ids, range(BYTES, vocab_size), legacy=legacy)
    pieces = [*map(byte_piece, range(BYTES)), *[""] * (size - BYTES)]
    for name, token_id in ids.items():
        pieces[token_id] = name
    for role, token_id in roles.items():
        if token_id is not None and not pieces[token_id]:
            pieces[token_id] = _free_name(role, ids)
    return ByteLevelVocabulary(pieces, roles)


def byte_piece(byte: int) -> str:
    """How a byte is shown: as the ASCII character that it is, or as ``<0x0A>``."""
    return chr(byte) if 0x20 <= byte < 0x7F else f"<0x{byte:02X}>"


def _ids_of_names(
    vocab_size: int, special_tokens: Iterable[str], additional: Sequence[str]
) -> dict[str, int]:
    """Id of each special token, all of them from ``vocab_size`` on."""
    if isinstance(special_tokens, str):
        raise TokenizerError(
            "special_tokens is one string", got=repr(special_tokens), expected="several names"
        )
    given = list(special_tokens)
    new = [name for name in dict.fromkeys(additional) if name not in given]
    taken = set(map(byte_piece, range(BYTES)))
    ids: dict[str, int] = {}
    # Megatron counts down from the end, so that the first name has the highest id.
    for name in [*reversed(given), *new]:
        if not name or name in taken:
            raise TokenizerError(
                "a special token cannot have this name",
                got=repr(name),
                expected="names that differ from each other and from those of the bytes",
                where="special_tokens",
            )
        taken.add(name)
        ids[name] = vocab_size + len(ids)
    return ids


def _roles(
    given: Mapping[SpecialRole, int | None],
    ids: Mapping[str, int],
    free: range,
    *,
    legacy: bool,
) -> dict[SpecialRole, int | None]:
    """Id of each role: the one given, else by its usual name, else one that is free."""
    roles = conventional_ids(ids.get)
    roles |= {role: i if i >= 0 else None for role, i in given.items() if i is not None}
    for role in _NEEDED:
        if given.get(role) is not None:
            continue
        if legacy:
            roles[role] = _LEGACY_IDS[role]
        elif roles[role] is None:
            roles[role] = next((i for i in free if i not in roles.values()), None)
            if roles[role] is None:
                raise TokenizerError(
                    f"no id is free for the {role} token",
                    got=f"vocab_size {free.stop}",
                    fix=f"raise vocab_size or set {role}_id; a negative one means none",
                )
    return roles


def _free_name(role: SpecialRole, ids: Mapping[str, int]) -> str:
    name = f"<{role}>"
    if name in ids:
        raise TokenizerError(
            "two ids would have one name",
            got=f"the special token {name} beside {role}_id",
            fix=f"leave {role}_id out, or rename the special token",
        )
    return name
