"""Special ids of a tokenizer under all names that Megatron uses, and markers in its vocabulary.

Markers are tokens that any text spells and that a template may also write as marks: ``<unused0>``
in Gemma's vocabulary, ``[REF]`` in Mistral's. They are ordinary vocabulary, as ``<table>`` is,
until a template writes one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from megatron_ext.tokenizers.base import MegatronTokenizerTextAbstract
from megatron_ext.tokenizers.special_tokens import (
    CONVENTIONAL_NAMES,
    ControlMatch,
    ControlToken,
    RoleIds,
    SpecialRole,
)
from megatron_ext.tokenizers.token_bytes import character_starts
from megatron_ext.tokenizers.token_ids import ByteEnds, IdArray


class SpecialIds(RoleIds):
    """Mixin with the special ids of the library's tokenizer; a missing one is None.

    A subclass sets ``_tokenizer`` and, where there is one, ``_pad_of_format``.
    """

    _tokenizer: MegatronTokenizerTextAbstract
    _pad_id: int | None = None
    """Padding id that was assigned, as Megatron's reinforcement learning does."""

    def special_id(self, role: SpecialRole) -> int | None:
        return self._tokenizer.special_id(role)

    @property
    def _pad_of_format(self) -> int | None:
        """The padding id of the prompt format."""
        return None

    @property
    def pad_id(self) -> int | None:
        """Id of the padding: the one assigned, else the prompt format's, else the tokenizer's."""
        choices = (self._pad_id, self._pad_of_format, self._tokenizer.pad_id)
        return next((token_id for token_id in choices if token_id is not None), None)

    @property
    def eod(self) -> int | None:
        """End of document, which Megatron appends to each document."""
        return self._tokenizer.eod

    @property
    def pad(self) -> int | None:
        """Id of the padding for Megatron's datasets: -1, which no text has, where it is missing.

        A HuggingFace tokenizer has None then, as in Megatron: its reinforcement learning tests for
        ``None`` before it assigns one.
        """
        return self._tokenizer.absent_pad if self.pad_id is None else self.pad_id

    bos = RoleIds.bos_id
    eos = RoleIds.eos_id
    unk = RoleIds.unk_id
    mask = RoleIds.mask_id
    cls = RoleIds.cls_id
    sep = RoleIds.sep_id

    # The names of transformers.
    bos_token_id = RoleIds.bos_id
    eos_token_id = RoleIds.eos_id
    unk_token_id = RoleIds.unk_id
    mask_token_id = RoleIds.mask_id
    cls_token_id = RoleIds.cls_id
    sep_token_id = RoleIds.sep_id

    @property
    def pad_token(self) -> str | None:
        """Display string of ``pad_id``."""
        return None if self.pad_id is None else self._tokenizer.id_to_token(self.pad_id)

    @property
    def pad_token_id(self) -> int | None:
        """``pad_id``; None where there is none, as in transformers."""
        return self.pad_id

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        """Ids of the special tokens that have no role, such as T5's sentinels."""
        return self._tokenizer.additional_special_tokens_ids

    @property
    def special_tokens_dict(self) -> dict[str, int]:
        """Id of each existing special token by ``bos_token``, ``eos_token``, ``pad_token`` ...

        An end of document that differs from the end of sequence is ``eod_token``: Megatron's
        datasets look here, and nowhere else, for ids that padding must not share.
        """
        roles = ((role, self.special_id(role)) for role in CONVENTIONAL_NAMES)
        ids = {f"{role}_token": token_id for role, token_id in roles if token_id is not None}
        if self.pad_id is not None:
            ids["pad_token"] = self.pad_id
        if self.eod is not None and self.eod != self.eos_id:
            ids["eod_token"] = self.eod
        return ids


_MARKER = re.compile(r"[^\w\s▁]\S*\w\S*[^\w\s▁]")


def markers(tokens: Iterable[ControlToken]) -> list[ControlToken]:
    """The ``tokens`` that are a word in brackets of some kind.

    Templates write white space, words, digits and punctuation without meaning a mark, and contents
    need them.
    """
    return [token for token in tokens if _MARKER.fullmatch(token.name)]


def are_forged(text: str, written: Sequence[ControlMatch], ids: IdArray, ends: ByteEnds) -> bool:
    """Whether a marker that a template writes also occurs outside of template text.

    Args:
        text: The whole text.
        written: Markers in the places where control tokens are read.
        ids: Ids of the text [T].
        ends: Byte ends of the text [T].
    """
    starts = character_starts(text.encode())
    places = starts[[match.end for match in written]]
    marks = np.isin(ids, [match.token_id for match in written])
    return not np.isin(ends[marks], places).all()
