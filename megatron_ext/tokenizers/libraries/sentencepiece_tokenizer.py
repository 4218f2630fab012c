"""SentencePiece model files: BPE and Unigram, with or without byte fallback."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from megatron_ext.errors import MissingDependencyError, TokenizerError
from megatron_ext.tokenizers.control_tokens import ControlToken
from megatron_ext.tokenizers.file_kind import require_library
from megatron_ext.tokenizers.libraries.sentencepiece_spans import read_spans
from megatron_ext.tokenizers.libraries.table_tokenizer import TableTokenizer
from megatron_ext.tokenizers.token_bytes import settle_ends

_SPACE = "▁"
_BATCH_THREADS = 0
"""SentencePiece's own choice: one thread a core."""


class SentencePieceTokenizer(TableTokenizer):
    """One ``.model`` file.

    SentencePiece never turns text into a control token, so ``parse_special`` cuts the text at the
    names of control pieces and encodes what lies between, each stretch with its dummy prefix.

    Args:
        path: The model file, or a directory that holds ``tokenizer.model``.

    Raises:
        TokenizerError: The file is missing, truncated or of another library.
        MissingDependencyError: sentencepiece is not installed.
    """

    library: ClassVar[str] = "sentencepiece"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        file = require_library(path, "sentencepiece").file
        self._processor = _load(str(file))
        size = self._processor.get_piece_size()
        pieces = [self._processor.id_to_piece(i) for i in range(size)]
        self._is_named = np.array([self._processor.is_control(i) for i in range(size)], np.bool_)
        super().__init__(
            files={file.name: file},
            pieces=pieces,
            token_bytes=[_bytes_of(self._processor, i, piece) for i, piece in enumerate(pieces)],
            special_ids={
                "bos": _present(self._processor.bos_id()),
                "eos": _present(self._processor.eos_id()),
                "pad": _present(self._processor.pad_id()),
                "unk": _present(self._processor.unk_id()),
            },
            dummy_prefix="each" if _drops_leading_space(self._processor, pieces) else "none",
            control_tokens=[
                ControlToken(pieces[i], i) for i in np.flatnonzero(self._is_named).tolist()
            ],
        )

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        batch: list[list[int]] = self._processor.encode(list(texts), num_threads=_BATCH_THREADS)
        return batch

    def ids_to_text(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._decode_stretches(
            ids,
            lambda run: str(self._processor.decode(run.tolist())),
            self._is_named,
            skip_special_tokens=skip_special_tokens,
        )

    def _encode(self, text: str) -> tuple[list[int], None]:
        return self._processor.encode(text), None

    def _locate(self, text: str, raw: bytes, encoded: Any) -> tuple[list[int], list[int]]:
        """Ids and byte ends by the library's own spans."""
        proto = self._processor.encode(text, out_type="serialized_proto")
        ids, spans = read_spans(proto)
        return ids, settle_ends(spans, [self._table.rows[i] for i in ids], raw)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["_processor"] = self._processor.serialized_model_proto()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._processor = _import_sentencepiece().SentencePieceProcessor()
        self._processor.LoadFromSerializedProto(state["_processor"])


def _import_sentencepiece() -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise MissingDependencyError(
            "sentencepiece", extra="sentencepiece", feature="a SentencePiece model"
        ) from None
    return sentencepiece


def _load(file: str) -> Any:
    processor = _import_sentencepiece().SentencePieceProcessor()
    try:
        processor.Load(file)
    except (OSError, RuntimeError) as error:
        raise TokenizerError(
            "sentencepiece cannot load the model",
            got=str(error),
            fix="fetch the file again: it may be truncated",
            where=file,
        ) from error
    return processor


def _bytes_of(processor: Any, token_id: int, piece: str) -> bytes | None:
    if processor.is_byte(token_id):
        return bytes([int(piece[3:5], 16)])
    if (
        processor.is_control(token_id)
        or processor.is_unknown(token_id)
        or processor.is_unused(token_id)
    ):
        return None
    return piece.replace(_SPACE, " ").encode()


def _drops_leading_space(processor: Any, pieces: list[str]) -> bool:
    """Whether decoding drops the space of a first piece, as it does after a dummy prefix."""
    for token_id, piece in enumerate(pieces):
        if piece[:1] == _SPACE and piece[1:].isalpha():
            return not str(processor.decode([token_id])).startswith(" ")
    return False


def _present(token_id: int) -> int | None:
    return None if token_id < 0 else int(token_id)
