"""SentencePiece models: loading, editing of control pieces and normaliser, and special tokens.

``ModelProto`` holds its pieces as field 1, in id order; a piece holds its name (1) and its type
(3). Field 3 is the normaliser, whose field 4 says whether it removes spaces at the ends of a text
and all but the first of several. Field 4 holds sentences and their pieces, which some releases
compare when they load the model. Messages that stand twice are merged.

Protobuf's wire format is read and written as far as these messages need it: a field begins with a
number that holds its field number and its wire type. Of a field that stands twice in a message the
last counts, unless it is a list.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_ext.errors import TokenizerError
from megatron_ext.imports import needed_packages
from megatron_ext.registry import did_you_mean
from megatron_ext.tokenizers.libraries.tokenizer_libraries import distinct_names
from megatron_ext.tokenizers.special_tokens import (
    CONVENTIONAL_NAMES,
    ControlToken,
    SpecialRole,
    names_to_add,
)

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5


def read_field(message: bytes, at: int) -> tuple[int, int, int, int]:
    """Number, wire type and value of the field at ``at``, and where the next one begins.

    The value of a length-delimited field is its length: its content ends where the next begins.
    """
    key, at = _read_varint(message, at)
    number, wire = key >> 3, key & 7
    if wire == VARINT:
        value, at = _read_varint(message, at)
        return number, wire, value, at
    if wire == LENGTH_DELIMITED:
        value, at = _read_varint(message, at)
        return number, wire, value, at + value
    assert wire in (FIXED64, FIXED32), wire
    return number, wire, 0, at + (8 if wire == FIXED64 else 4)


def fields(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Number and value of each field of a message, and where it begins and ends.

    The content of a length-delimited field is ``message[end - value : end]``.
    """
    end = 0
    while end < len(message):
        begin = end
        number, _, value, end = read_field(message, begin)
        yield number, value, begin, end


def varint_field(number: int, value: int) -> bytes:
    """Encode a field of a number that is not negative."""
    return _varint(number << 3 | VARINT) + _varint(value)


def bytes_field(number: int, content: bytes) -> bytes:
    """Encode a field of bytes, a string or a message."""
    return _varint(number << 3 | LENGTH_DELIMITED) + _varint(len(content)) + content


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


PIECE, NORMALIZER, SELF_TEST = 1, 3, 4
NAME, TYPE = 1, 3
_NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
_REMOVE_EXTRA_WHITESPACES = 4


def edit_model(
    model: bytes,
    *,
    control: Collection[str] = (),
    added: Sequence[str] = (),
    keep_spaces: bool = False,
) -> bytes:
    """Edit a serialised model.

    Args:
        model: A serialised ``ModelProto``.
        control: Names of pieces that become control pieces, which no text is encoded to.
        added: Names of control pieces that get the next ids, in this order.
        keep_spaces: Make the normaliser keep every space of a text.

    Returns:
        A serialised ``ModelProto`` without its self-test, which would be of the original model.
    """
    names = {name.encode() for name in control}
    parts = []
    for number, length, begin, end in fields(model):
        if number == SELF_TEST:
            continue
        piece = model[end - length : end]
        if number == PIECE and names and piece_name(piece) in names:
            parts.append(bytes_field(PIECE, piece + varint_field(TYPE, CONTROL)))
        else:
            parts.append(model[begin:end])
    for name in added:
        content = bytes_field(NAME, name.encode()) + varint_field(TYPE, CONTROL)
        parts.append(bytes_field(PIECE, content))
    if keep_spaces:
        parts.append(bytes_field(NORMALIZER, varint_field(_REMOVE_EXTRA_WHITESPACES, 0)))
    return b"".join(parts)


def piece_type(piece: bytes) -> int:
    """Type of a piece, by its message."""
    kind = _NORMAL
    for number, value, _, _ in fields(piece):
        if number == TYPE:
            kind = value
    return kind


def piece_name(piece: bytes) -> bytes:
    """Name of a piece, by its message: its first field in every model."""
    number, _, length, end = read_field(piece, 0)
    assert number == NAME, number
    return piece[end - length : end]


SPACE = "▁"
"""Space inside a piece."""


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
    """A processor in which ``names`` are control pieces; new ones get the next ids.

    Args:
        processor: The processor; not changed.
        names: Distinct names. The unknown piece and the bytes of byte fallback are not changed.
        keep_spaces: Make the normaliser keep every space of a text.
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
    """The ``names`` that are not pieces of the model."""
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
    """Control pieces and the pieces ``names``, in id order."""
    control = {i for i in range(processor.get_piece_size()) if processor.is_control(i)}
    control.update(processor.piece_to_id(name) for name in names)
    return [ControlToken(processor.id_to_piece(i), i) for i in sorted(control)]


def user_defined_tokens(processor: Any) -> list[ControlToken]:
    """Pieces that are matched in a text before the model encodes it, in id order."""
    model = processor.serialized_model_proto()
    pieces = (model[end - size : end] for number, size, _, end in fields(model) if number == PIECE)
    ids = (i for i, piece in enumerate(pieces) if piece_type(piece) == USER_DEFINED)
    return [ControlToken(processor.id_to_piece(i), i) for i in ids]


def piece_bytes(processor: Any, pieces: Sequence[str]) -> list[bytes | None]:
    """Bytes of each piece [V]; None for pieces without text."""
    is_control, is_unused = processor.is_control, processor.is_unused
    textless = {i for i in range(len(pieces)) if is_control(i) or is_unused(i)}
    textless.add(processor.unk_id())
    spelled = [
        None if i in textless else piece.replace(SPACE, " ").encode()
        for i, piece in enumerate(pieces)
    ]
    for i, piece in enumerate(pieces):
        if piece.startswith("<0x") and processor.is_byte(i):
            spelled[i] = bytes([int(piece[3:5], 16)])
    return spelled


def drops_leading_space(processor: Any, pieces: Sequence[str]) -> bool:
    """Whether decoding drops a leading space, as it does for a dummy prefix."""
    words = (i for i, piece in enumerate(pieces) if piece[:1] == SPACE and piece[1:].isalpha())
    word = next(words, None)
    if word is not None:
        return not str(processor.decode([word])).startswith(" ")
    # In a model of single characters the space is a piece of its own.
    letter = next((i for i, piece in enumerate(pieces) if len(piece) == 1 and piece.isalpha()), 0)
    space = processor.piece_to_id(SPACE)
    return SPACE in pieces and not str(processor.decode([space, letter])).startswith(" ")


def _import_sentencepiece() -> Any:
    with needed_packages("a SentencePiece model"):
        import sentencepiece
    return sentencepiece


SentencePieceRole = SpecialRole | Literal["eod"]

# Compared in lower case: Megatron before 0.16 wrote <CLS>, <SEP>, <EOD> and <MASK>.
_ROLE_OF: Mapping[str, SentencePieceRole] = {
    **{name.lower(): role for role, names in CONVENTIONAL_NAMES.items() for name in names},
    **dict.fromkeys(("<eod>", "[eod]", "<|eod|>"), "eod"),
}
_KEYS: Mapping[str, SentencePieceRole] = {f"{role}_token": role for role in _ROLE_OF.values()}


@dataclass(frozen=True, slots=True)
class GivenSpecialTokens:
    """Special tokens that a user names, in the order of their ids, with stated roles."""

    listed: tuple[str, ...]
    """The option ``special_tokens``."""
    additional: tuple[str, ...]
    """The options ``bos_token``, ``eos_token`` ... and ``additional_special_tokens``."""
    roles: Mapping[SentencePieceRole, str]
    """Name by role; a list of names states no roles."""

    @classmethod
    def of(
        cls,
        listed: Sequence[str] | Mapping[str, str] | None,
        additional: Sequence[str],
        roles: Mapping[SentencePieceRole, str | None],
    ) -> GivenSpecialTokens:
        """The special tokens of the options.

        Args:
            listed: Names, or names by ``bos_token``, ``eos_token``, ``eod_token`` ...
            additional: Names without a role.
            roles: Names by role; they override ``listed``.

        Raises:
            TokenizerError: A key is not a role, a list repeats a name, or a name is not text.
        """
        by_key = {f"{role}_token": name for role, name in roles.items() if name is not None}
        names = distinct_names(additional, "additional_special_tokens")
        if isinstance(listed, Mapping):
            _check_keys(listed)
            by_key = {**listed, **by_key}
            listed = list(dict.fromkeys(listed.values()))
        return cls(
            distinct_names(listed or (), "special_tokens"),
            distinct_names(names_to_add(roles, names), "special_tokens"),
            {_KEYS[key]: name for key, name in by_key.items()},
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, once."""
        return tuple(dict.fromkeys((*self.listed, *self.additional)))

    def without_role(self, with_role: Collection[int], processor: Any) -> list[str] | None:
        """Names whose ids are not in ``with_role``; None where no token was named."""
        named = [name for name in self.names if processor.piece_to_id(name) not in with_role]
        return named if self.names else None

    def role_ids(self, processor: Any, control: Iterable[str]) -> dict[SentencePieceRole, int]:
        """Id of each role: stated by the user, else by the model, else a conventional name's.

        Args:
            processor: SentencePiece's processor, which has all names as pieces.
            control: Names of all control pieces; conventional names in ``listed`` precede them.
        """
        of_model: dict[SentencePieceRole, int] = {
            "bos": processor.bos_id(),
            "eos": processor.eos_id(),
            "pad": processor.pad_id(),
            "unk": processor.unk_id(),
        }
        ids = {role: token_id for role, token_id in of_model.items() if token_id >= 0}
        ids |= {role: processor.piece_to_id(name) for role, name in self.roles.items()}
        for name in (*self.listed, *control):
            role = _ROLE_OF.get(name.lower())
            if role is not None:
                ids.setdefault(role, processor.piece_to_id(name))
        return ids


def _check_keys(listed: Mapping[str, str]) -> None:
    for key in listed:
        if key not in _KEYS:
            raise TokenizerError(
                "no special token has this role",
                got=repr(key),
                expected=f"one of {', '.join(_KEYS)}",
                fix=did_you_mean(str(key), list(_KEYS)) or "use additional_special_tokens",
                where="special_tokens",
            )
