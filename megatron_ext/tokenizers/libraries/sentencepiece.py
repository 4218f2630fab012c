"""SentencePiece tokenizers: BPE and Unigram, with or without byte fallback.

Spans are read from SentencePiece's serialised result, without the protobuf package.
``SentencePieceText`` holds its pieces as field 2; a piece holds id (2), begin (4) and end (5), the
offsets counted in bytes of the text before normalisation. Every supported release can return this
message (``out_type="serialized_proto"``); results with objects differ between releases.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.engine import GigatokenEngine, sentencepiece_engine
from megatron_ext.tokenizers.libraries.sentencepiece_model import (
    LENGTH_DELIMITED,
    SPACE,
    VARINT,
    GivenSpecialTokens,
    absent_pieces,
    control_tokens,
    drops_leading_space,
    load_processor,
    piece_bytes,
    processor_from_model,
    read_field,
    user_defined_tokens,
    with_control_pieces,
)
from megatron_ext.tokenizers.libraries.table_tokenizer import TableTokenizer
from megatron_ext.tokenizers.libraries.tokenizer_libraries import engine_choice
from megatron_ext.tokenizers.special_tokens import CONVENTIONAL_NAMES, ControlToken, ControlTokens
from megatron_ext.tokenizers.token_bytes import settle_ends
from megatron_ext.tokenizers.tokenizer_files import require_library

_PIECES, _ID, _BEGIN, _END = 2, 2, 4, 5


def read_spans(message: bytes) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids [T], and begin and end of each piece in bytes [T]."""
    ids = []
    spans = []
    at = 0
    while at < len(message):
        number, wire, value, at = read_field(message, at)
        if number == _PIECES and wire == LENGTH_DELIMITED:
            token_id, begin, end = _piece(message, at - value, at)
            ids.append(token_id)
            spans.append((begin, end))
    return ids, spans


def _piece(message: bytes, at: int, stop: int) -> tuple[int, int, int]:
    values = {_ID: 0, _BEGIN: 0, _END: 0}
    while at < stop:
        number, wire, value, at = read_field(message, at)
        if wire == VARINT and number in values:
            values[number] = value
    return values[_ID], values[_BEGIN], values[_END]


_BATCH_THREADS = 0
"""SentencePiece's own choice: one thread a core."""


class SentencePieceTokenizer(TableTokenizer):
    """Tokenizer of a ``.model`` file.

    SentencePiece never turns text into a control token, so ``parse_special`` cuts the text at the
    names of control pieces and encodes the segments in between, each with its dummy prefix. A
    special token that is named here becomes a control piece, whatever it is in the model.

    Legacy mode is Megatron's older behaviour: special tokens that the model lacks get the next ids,
    and ``special_tokens`` written in a text always become their ids.

    Args:
        path: The model file, or a directory that holds ``tokenizer.model``.
        legacy: Append the special tokens that the model lacks, and read them in every text.
        special_tokens: Names, or names by ``bos_token``, ``eos_token``, ``pad_token``,
            ``unk_token``, ``mask_token``, ``cls_token``, ``sep_token`` and ``eod_token``, which
            get these roles. In a list, conventional names such as ``<pad>`` get the roles that the
            model leaves open. Without ``legacy`` the model must hold them.
        ignore_extra_whitespaces: Leave runs of spaces to the model, which may shorten them;
            otherwise every space counts, those at the ends too.
        trim_spm_separator_after_special_token: In legacy mode, drop the piece of a lone space that
            text between two special tokens begins with: chat templates put one there.
        additional_special_tokens: Special tokens without a role, in legacy mode or not; those that
            the model lacks get the next ids.
        bos_token, eos_token, pad_token, unk_token, mask_token, cls_token, sep_token, eod_token:
            The same with a role.
        engine: Engine that encodes batches.

    Raises:
        TokenizerError: The file is missing, truncated or of another library, or a special token is
            neither in the model nor to be appended.
        MissingDependencyError: sentencepiece is not installed.
    """

    library: ClassVar[str] = "sentencepiece"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        legacy: bool = False,
        special_tokens: Sequence[str] | Mapping[str, str] | None = None,
        ignore_extra_whitespaces: bool = True,
        trim_spm_separator_after_special_token: bool = True,
        additional_special_tokens: Sequence[str] = (),
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        unk_token: str | None = None,
        mask_token: str | None = None,
        cls_token: str | None = None,
        sep_token: str | None = None,
        eod_token: str | None = None,
        engine: str = "auto",
    ) -> None:
        self.engine = engine_choice(engine)
        self.legacy = legacy
        file = require_library(path, "sentencepiece").file
        given = GivenSpecialTokens.of(
            special_tokens,
            additional_special_tokens,
            {
                "bos": bos_token,
                "eos": eos_token,
                "pad": pad_token,
                "unk": unk_token,
                "mask": mask_token,
                "cls": cls_token,
                "sep": sep_token,
                "eod": eod_token,
            },
        )
        processor = load_processor(file)
        if not legacy:
            _require_pieces(processor, given.listed, file)
        self._processor = processor = with_control_pieces(
            processor, given.names, keep_spaces=not ignore_extra_whitespaces
        )
        pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
        control = control_tokens(processor, given.names)
        roles = given.role_ids(processor, [token.name for token in control])
        self._eod_id = roles.get("eod")
        self._is_named = np.zeros(len(pieces), np.bool_)
        self._is_named[[token.token_id for token in control]] = True
        self._trims = legacy and trim_spm_separator_after_special_token
        self._separator: int | None = None
        super().__init__(
            files={file.name: file},
            pieces=pieces,
            token_bytes=piece_bytes(processor, pieces),
            special_ids={role: roles.get(role) for role in CONVENTIONAL_NAMES},
            dummy_prefix="each" if drops_leading_space(processor, pieces) else "none",
            control_tokens=control,
            additional_special_tokens=given.without_role(roles.values(), processor),
            always_read=[token for token in control if legacy and token.name in given.listed],
        )

    @property
    def eod(self) -> int | None:
        return self.eos_id if self._eod_id is None else self._eod_id

    def _build_engine(self) -> GigatokenEngine:
        model = self._processor.serialized_model_proto()
        return sentencepiece_engine(model, next(iter(self._files.values())))

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        batch: list[list[int]] = self._processor.encode(list(texts), num_threads=_BATCH_THREADS)
        return batch

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._decode_segments(
            ids,
            lambda run: str(self._processor.decode(run.tolist())),
            self._is_named,
            skip_special_tokens=skip_special_tokens,
        )

    def _encode(self, text: str) -> tuple[list[int], None]:
        ids: list[int] = self._processor.encode(text)
        return ids[self._trimmed(ids) :], None

    def _locate(self, text: str, raw: bytes, encoded: Any) -> tuple[list[int], list[int]]:
        """Ids and byte ends by the library's own spans."""
        proto = self._processor.encode(text, out_type="serialized_proto")
        ids, spans = read_spans(proto)
        begin = self._trimmed(ids)
        rows = [self._table.rows[i] for i in ids[begin:]]
        return ids[begin:], settle_ends(spans[begin:], rows, raw)

    def _trimmed(self, ids: Sequence[int]) -> int:
        """Number of ids that are dropped at the start of a segment."""
        return int(self._separator is not None and len(ids) > 0 and ids[0] == self._separator)

    def _user_defined_tokens(self) -> list[ControlToken]:
        return user_defined_tokens(self._processor)

    def _hiding(self, names: frozenset[str]) -> SentencePieceTokenizer:
        hiding = self._with(
            _processor=with_control_pieces(self._processor, sorted(names), keep_spaces=False)
        )
        hiding._control = ControlTokens(control_tokens(hiding._processor, self._control.by_name))
        return hiding

    def _continued(self, *, to_the_end: bool) -> TableTokenizer:
        # Megatron does not trim text behind the last special token.
        return self._after_special if self._trims and not to_the_end else self

    @cached_property
    def _after_special(self) -> SentencePieceTokenizer:
        """The tokenizer without the lone space with which a segment may begin."""
        present = not absent_pieces(self._processor, [SPACE])
        return self._with(_separator=self._processor.piece_to_id(SPACE) if present else None)

    def _with(self, **changes: Any) -> SentencePieceTokenizer:
        """A copy with changed attributes; ``copy()`` would load the model again."""
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, **changes, _batches_segments=False)
        changed.__dict__.pop("_after_special", None)
        return changed

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.pop("_after_special", None)
        state["_processor"] = self._processor.serialized_model_proto()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._processor = processor_from_model(state["_processor"])


def _require_pieces(processor: Any, names: Sequence[str], file: Path) -> None:
    absent = absent_pieces(processor, names)
    if absent:
        raise TokenizerError(
            "the model does not hold a special token",
            got=", ".join(map(repr, absent[:5])),
            expected="names of its pieces",
            fix="pass --tokenizer-sentencepiece-legacy (legacy=True) to append what it lacks",
            where=file,
        )
