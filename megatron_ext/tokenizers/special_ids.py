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
    """What a tokenizer gains from its library's special ids; None stands for one that is missing.

    The class that has it sets ``_tokenizer`` and, where there is one, ``_pad_of_format``.
    """

    _tokenizer: MegatronTokenizerTextAbstract
    _pad_id: int | None = None
    """A padding id that somebody chose: Megatron's reinforcement learning writes it."""

    def special_id(self, role: SpecialRole) -> int | None:
        return self._tokenizer.special_id(role)

    @property
    def _pad_of_format(self) -> int | None:
        """The padding id of the prompt format."""
        return None

    @property
    def pad_id(self) -> int | None:
        """Padding: the one that was chosen, else the prompt format's, else the tokenizer's."""
        choices = (self._pad_id, self._pad_of_format, self._tokenizer.pad_id)
        return next((token_id for token_id in choices if token_id is not None), None)

    @property
    def eod(self) -> int | None:
        """End of document: Megatron puts it behind each one."""
        return self._tokenizer.eod

    @property
    def pad(self) -> int | None:
        """Padding as Megatron's datasets ask for it: -1, which no text has, where there is none.

        Of a HuggingFace tokenizer it is None then, as Megatron has it: its reinforcement learning
        looks for ``None`` before it chooses one.
        """
        return self._tokenizer.absent_pad if self.pad_id is None else self.pad_id

    bos = RoleIds.bos_id
    eos = RoleIds.eos_id
    unk = RoleIds.unk_id
    mask = RoleIds.mask_id
    cls = RoleIds.cls_id
    sep = RoleIds.sep_id

    @property
    def additional_special_tokens_ids(self) -> list[int]:
        """Ids of the special tokens that have no role, such as T5's sentinels."""
        return self._tokenizer.additional_special_tokens_ids

    @property
    def special_tokens_dict(self) -> dict[str, int]:
        """Id by ``bos_token``, ``eos_token``, ``pad_token`` ...: those that there are.

        An end of document that is no end of sequence is ``eod_token``: Megatron's datasets look
        here, and nowhere else, for ids that padding must not share.
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
    """Those of ``tokens`` that are a word in brackets of some kind.

    White space, words, digits and punctuation are written by templates without meaning a mark, and
    no content could do without them.
    """
    return [token for token in tokens if _MARKER.fullmatch(token.name)]


def are_forged(text: str, written: Sequence[ControlMatch], ids: IdArray, ends: ByteEnds) -> bool:
    """Whether text elsewhere has made a token that a template has written.

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
