"""Bytes as ids: the id of a byte is its value, and special tokens lie beyond 255."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.libraries.byte_level.vocabulary import BYTES, byte_level_vocabulary
from megatron_ext.tokenizers.libraries.engine_choice import engine_choice
from megatron_ext.tokenizers.libraries.table_tokenizer import TableTokenizer
from megatron_ext.tokenizers.token_ids import ByteEnds, IdArray


class ByteLevelTokenizer(TableTokenizer):
    """UTF-8 bytes, without a file.

    Ids 0 to 255 are the bytes. EOS is 256 and padding is 257 unless ``special_tokens`` hold one of
    their usual names. The ids from there to ``vocab_size`` are unused, and the special tokens
    follow, the last one first, as Megatron has them.

    Args:
        vocab_size: Ids before the special tokens.
        special_tokens: Names; the first gets the highest id. Usual names (``<s>``, ``[CLS]`` ...)
            take the roles they stand for. Of a mapping the keys count.
        additional_special_tokens: Names that follow these in ascending order; those that the
            vocabulary has already keep their id.
        eos_id: Id of the EOS; none when negative. An id below 256 is a byte as well: a text that
            holds this byte has the id in it.
        pad_id: Id of the padding, alike.
        bos_id: Id of the BOS, alike; none by default.
        legacy: EOS is 0 and padding is 1, as in Megatron: for data that it has tokenized.
        engine: ``auto`` or ``reference``.
        _eos_id: Megatron's spelling of ``eos_id``; the other two are alike.

    Raises:
        TokenizerError: ``vocab_size`` is too small, an id is outside the vocabulary or said twice,
            a name is taken, or the engine is another.
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
        return self._decode_stretches(
            ids,
            lambda run: self._table.join(run).tobytes().decode(errors="replace"),
            self._is_special if skip_special_tokens else self._table.is_control,
            skip_special_tokens=skip_special_tokens,
        )

    def _encode(self, text: str) -> tuple[list[int], Any]:
        return list(text.encode()), None

    def _encode_batch(self, texts: Sequence[str]) -> list[IdArray]:
        return [_ids_of(text.encode()) for text in texts]

    def _encode_stretch(self, text: str, raw: bytes) -> tuple[IdArray, ByteEnds]:
        return _ids_of(raw), np.arange(1, len(raw) + 1)

    def _locate(self, text: str, raw: bytes, encoded: Any) -> tuple[list[int], list[int]]:
        return list(raw), list(range(1, len(raw) + 1))


def _ids_of(raw: bytes) -> IdArray:
    """The ids of bytes [N]."""
    return np.frombuffer(raw, np.uint8).astype(np.int32)


def _one_of(name: str, given: int | None, megatron: int | None) -> int | None:
    """An id that has two spellings."""
    if given is not None and megatron is not None and given != megatron:
        raise TokenizerError(
            "two options name different ids", got=f"{name} {given} and _{name} {megatron}"
        )
    return megatron if given is None else given
