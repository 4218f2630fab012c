"""Texts that somebody gives to a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_ext.errors import TokenizerError


def checked_text(text: object) -> str:
    """``text``, if it is one.

    Raises:
        TokenizerError: It is of another type.
    """
    if isinstance(text, str):
        return text
    raise TokenizerError(
        "the text is no string",
        got=type(text).__name__,
        fix='decode it: text.decode("utf-8")' if isinstance(text, bytes) else None,
    )


def checked_texts(texts: object) -> Sequence[str]:
    """Several texts, in a list unless they are in one; a generator is read to its end.

    Raises:
        TokenizerError: It is one text, nothing that holds several, or one of them is no string.
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
                "a text is no string", got=type(text).__name__, where=f"text {at} of the batch"
            )
    return several
