"""Byte-level tokenizer: the id of a byte is its value, and special tokens follow from 256 on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.libraries.table_tokenizer import TableTokenizer
from megatron_ext.tokenizers.libraries.tokenizer_libraries import engine_choice
from megatron_ext.tokenizers.special_tokens import SpecialRole, conventional_ids
from megatron_ext.tokenizers.token_ids import ByteEnds, IdArray

BYTES: Final = 256
"""Number of bytes; their ids are their values."""

_LEGACY_IDS: Mapping[SpecialRole, int] = {"eos": 0, "pad": 1}
_NEEDED: tuple[SpecialRole, ...] = ("eos", "pad")


@dataclass(frozen=True, slots=True)
class ByteLevelVocabulary:
    """Names and roles of the ids of a byte-level vocabulary."""

    pieces: list[str]
    """Display string of each id [V]; empty where it is unused."""
    roles: Mapping[SpecialRole, int | None]
    """Id of each special role, which may be a byte's; None where there is none."""


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
    """Display string of a byte: its printable ASCII character, or as ``<0x0A>``."""
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
    """Id of each role: the one given, else by its conventional name, else a free one."""
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


class ByteLevelTokenizer(TableTokenizer):
    """Tokenizer of UTF-8 bytes, without a file.

    Ids 0 to 255 are the bytes. EOS is 256 and padding is 257 unless ``special_tokens`` hold one of
    their usual names. The ids from there to ``vocab_size`` are unused, and the special tokens
    follow, the last one first, as Megatron has them.

    Args:
        vocab_size: Ids before the special tokens.
        special_tokens: Names, or a mapping whose keys are names; the first gets the highest id.
            Conventional names (``<s>``, ``[CLS]`` ...) get their roles.
        additional_special_tokens: Names that follow these in ascending order; those that the
            vocabulary has already keep their id.
        eos_id: Id of the EOS; none when negative. An id below 256 is a byte as well, and occurs in
            every text with this byte.
        pad_id: Id of the padding, alike.
        bos_id: Id of the BOS, alike; none by default.
        legacy: EOS is 0 and padding is 1, as in Megatron: for data that it has tokenized.
        engine: ``auto`` or ``reference``.
        _eos_id: Megatron's spelling of ``eos_id``; the other two are alike.

    Raises:
        TokenizerError: ``vocab_size`` is too small, an id is outside the vocabulary or stated
            twice, a name is taken, or the engine is another.
    """

    library: ClassVar[str] = "byte-level"

    def __init__(
        self,
        *,
        vocab_size: int = 512,
        special_tokens: Iterable[str] | None = None,
        additional_special_tokens: Sequence[str] = (),
        eos_id: int | None = None,
        pad_id: int | None = None,
        bos_id: int | None = None,
        legacy: bool = False,
        engine: str = "auto",
        _eos_id: int | None = None,
        _pad_id: int | None = None,
        _bos_id: int | None = None,
    ) -> None:
        self.engine = engine_choice(engine, reference_only=self.library)
        vocabulary = byte_level_vocabulary(
            vocab_size,
            () if special_tokens is None else special_tokens,
            additional_special_tokens,
            {
                "eos": _one_of("eos_id", eos_id, _eos_id),
                "pad": _one_of("pad_id", pad_id, _pad_id),
                "bos": _one_of("bos_id", bos_id, _bos_id),
            },
            legacy=legacy,
        )
        size = len(vocabulary.pieces)
        super().__init__(
            files={},
            pieces=vocabulary.pieces,
            token_bytes=[bytes([i]) if i < BYTES else None for i in range(size)],
            special_ids=vocabulary.roles,
            dummy_prefix="none",
        )
        self._is_special = self._table.is_control.copy()
        self._is_special[[i for i in vocabulary.roles.values() if i is not None]] = True

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._decode_segments(
            ids,
            lambda run: self._table.join(run).tobytes().decode(errors="replace"),
            self._is_special if skip_special_tokens else self._table.is_control,
            skip_special_tokens=skip_special_tokens,
        )

    def _encode(self, text: str) -> tuple[list[int], Any]:
        return list(text.encode()), None

    def _encode_batch(self, texts: Sequence[str]) -> list[IdArray]:
        return [_ids_of(text.encode()) for text in texts]

    def _encode_segment(self, text: str, raw: bytes) -> tuple[IdArray, ByteEnds]:
        return _ids_of(raw), np.arange(1, len(raw) + 1)

    def _locate(self, text: str, raw: bytes, encoded: Any) -> tuple[list[int], list[int]]:
        return list(raw), list(range(1, len(raw) + 1))


def _ids_of(raw: bytes) -> IdArray:
    """The ids of bytes [N]."""
    return np.frombuffer(raw, np.uint8).astype(np.int32)


def _one_of(name: str, given: int | None, megatron: int | None) -> int | None:
    """The value of an option that has two spellings."""
    if given is not None and megatron is not None and given != megatron:
        raise TokenizerError(
            "two options name different ids", got=f"{name} {given} and _{name} {megatron}"
        )
    return megatron if given is None else given
