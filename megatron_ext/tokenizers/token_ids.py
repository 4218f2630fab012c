"""Checks of token ids and texts that a caller passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import TokenizerError

IdArray = NDArray[np.int32]
"""Ids of a text [T]."""
ByteEnds = NDArray[np.int64]
"""Byte at which each token of a text ends in its UTF-8 [T]."""


def integer(token_id: object) -> int:
    """``token_id`` as an int: an int, a NumPy integer or a tensor with one element of any value.

    Raises:
        TokenizerError: It is not an integer.
    """
    try:
        return index(token_id)  # type: ignore[arg-type]
    except TypeError:
        raise TokenizerError(
            "the token id is not an integer", got=f"{type(token_id).__name__}, {token_id!r}"
        ) from None


def checked_id(token_id: object, vocab_size: int) -> int:
    """An id inside the vocabulary.

    Raises:
        TokenizerError: It is not an integer from 0 to ``vocab_size - 1``.
    """
    number = integer(token_id)
    if not 0 <= number < vocab_size:
        raise TokenizerError(
            "the token id is outside the vocabulary",
            got=number,
            expected=f"0 to {vocab_size - 1}",
        )
    return number


def integers(ids: object) -> NDArray[np.int64]:
    """``ids`` [T] as an int64 array, of any values.

    Raises:
        TokenizerError: They are not a sequence of integers: of another type, fractions, or
            several rows.
    """
    try:
        array: NDArray[Any] = np.asarray(ids)
    except (TypeError, ValueError) as error:
        # Rows of different lengths, or a tensor on another device.
        raise TokenizerError(
            "the token ids cannot be read", got=error, expected=_EXPECTED
        ) from None
    if array.ndim != 1:
        shape = f" of shape {list(array.shape)}" if array.ndim else ""
        raise TokenizerError(
            "the token ids are not a sequence",
            got=f"{type(ids).__name__}{shape}",
            expected=_EXPECTED,
            fix="pass one row at a time" if array.ndim > 1 else None,
        )
    if array.size and array.dtype.kind not in "iu":
        _refuse_other_types(array.tolist())
    return array.astype(np.int64)


def checked_ids(ids: object, vocab_size: int) -> NDArray[np.int32]:
    """``ids`` as int32 [T], each inside the vocabulary.

    Raises:
        TokenizerError: They are not a sequence of integers, or one is outside the vocabulary.
    """
    array = integers(ids)
    if array.size:
        checked_id(array.min(), vocab_size)
        checked_id(array.max(), vocab_size)
    return array.astype(np.int32)


_EXPECTED = "a list, array or tensor of integers"


def _refuse_other_types(items: list[Any]) -> None:
    """Raise about the first item that is not an integer or exceeds int64."""
    limits = np.iinfo(np.int64)
    for item in items:
        if not isinstance(item, int) or isinstance(item, bool):
            raise TokenizerError(
                "a token id is not an integer",
                got=f"{type(item).__name__}, {item!r}",
                expected=_EXPECTED,
            )
        if not limits.min <= item <= limits.max:
            raise TokenizerError("the token id is outside any vocabulary", got=item)


def checked_text(text: object) -> str:
    """``text``, if it is a string.

    Raises:
        TokenizerError: It is of another type.
    """
    if isinstance(text, str):
        return text
    raise TokenizerError(
        "the text is not a string",
        got=type(text).__name__,
        fix='decode it: text.decode("utf-8")' if isinstance(text, bytes) else None,
    )


def checked_texts(texts: object) -> Sequence[str]:
    """Several texts as a list; a generator is read to its end.

    Raises:
        TokenizerError: It is one text, is not iterable, or holds an item that is not a string.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise TokenizerError(
            "several texts are expected",
            got=type(texts).__name__,
            expected="a list of strings",
            fix="put it into a list" if isinstance(texts, str) else None,
        )
    several = texts if isinstance(texts, list) else list(texts)
    for at, text in enumerate(several):
        if not isinstance(text, str):
            raise TokenizerError(
                "a text is not a string", got=type(text).__name__, where=f"text {at} of the batch"
            )
    return several
