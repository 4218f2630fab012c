"""SentencePiece's processor: loaded, changed where the options ask for it, and asked for bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.errors import TokenizerError
from megatron_ext.extras import needed_packages
from megatron_ext.tokenizers.control_tokens import ControlToken
from megatron_ext.tokenizers.libraries.sentencepiece.model import (
    USER_DEFINED,
    edit_model,
    piece_types,
)

SPACE = "▁"
"""What a space is inside a piece."""


def load_processor(file: Path) -> Any:
    """The processor of a model file.

    Raises:
        TokenizerError: The file is truncated.
        MissingDependencyError: sentencepiece is not installed.
    """
    processor = _import_sentencepiece().SentencePieceProcessor()
    try:
        processor.Load(str(file))
    except (OSError, RuntimeError) as error:
        raise TokenizerError(
            "sentencepiece cannot load the model",
            got=str(error),
            fix="fetch the file again: it may be truncated",
            where=file,
        ) from error
    return processor


def processor_from_model(model: bytes) -> Any:
    """The processor of a serialised model."""
    processor = _import_sentencepiece().SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor


def with_control_pieces(processor: Any, names: Collection[str], *, keep_spaces: bool) -> Any:
    """A processor to which ``names`` are control pieces; those that it lacks get the next ids.

    Args:
        processor: It is not changed.
        names: Distinct names. The unknown piece and the bytes of byte fallback stay what they are.
        keep_spaces: Leave every space of a text where it is.
    """
    absent = absent_pieces(processor, names)
    present = [name for name in names if name not in absent and _may_change(processor, name)]
    if not absent and not present and not keep_spaces:
        return processor
    model = edit_model(
        processor.serialized_model_proto(), control=present, added=absent, keep_spaces=keep_spaces
    )
    return processor_from_model(model)


def absent_pieces(processor: Any, names: Collection[str]) -> list[str]:
    """Those of ``names`` that are no pieces of the model."""
    unknown = processor.unk_id()
    unknown_piece = processor.id_to_piece(unknown)
    return [
        name for name in names if processor.piece_to_id(name) == unknown and name != unknown_piece
    ]


def _may_change(processor: Any, name: str) -> bool:
    token_id = processor.piece_to_id(name)
    return not (
        processor.is_control(token_id)
        or processor.is_unknown(token_id)
        or processor.is_byte(token_id)
    )


def control_tokens(processor: Any, names: Collection[str]) -> list[ControlToken]:
    """Control pieces, and ``names`` besides, in id order."""
    control = {i for i in range(processor.get_piece_size()) if processor.is_control(i)}
    control.update(processor.piece_to_id(name) for name in names)
    return [ControlToken(processor.id_to_piece(i), i) for i in sorted(control)]


def user_defined_tokens(processor: Any) -> list[ControlToken]:
    """Pieces that are read in a text before the model looks at it, in id order."""
    types = piece_types(processor.serialized_model_proto())
    ids = (i for i, piece_type in enumerate(types) if piece_type == USER_DEFINED)
    return [ControlToken(processor.id_to_piece(i), i) for i in ids]


def piece_bytes(processor: Any, pieces: Sequence[str]) -> list[bytes | None]:
    """Bytes of each piece [V]; None for those that stand for no text."""
    return [_bytes_of(processor, token_id, piece) for token_id, piece in enumerate(pieces)]


def _bytes_of(processor: Any, token_id: int, piece: str) -> bytes | None:
    if processor.is_byte(token_id):
        return bytes([int(piece[3:5], 16)])
    if (
        processor.is_control(token_id)
        or processor.is_unknown(token_id)
        or processor.is_unused(token_id)
    ):
        return None
    return piece.replace(SPACE, " ").encode()


def drops_leading_space(processor: Any, pieces: Sequence[str]) -> bool:
    """Whether decoding drops the space in front, as it does after a dummy prefix."""
    word = next((i for i, piece in enumerate(pieces) if _is_word(piece)), None)
    if word is not None:
        return not str(processor.decode([word])).startswith(" ")
    # A model of single characters has the space apart.
    letter = next((i for i, piece in enumerate(pieces) if len(piece) == 1 and piece.isalpha()), 0)
    space = processor.piece_to_id(SPACE)
    return SPACE in pieces and not str(processor.decode([space, letter])).startswith(" ")


def _is_word(piece: str) -> bool:
    return piece[:1] == SPACE and piece[1:].isalpha()


def _import_sentencepiece() -> Any:
    with needed_packages("a SentencePiece model"):
        import sentencepiece
    return sentencepiece
