"""Digit schemes: how a tokenizer cuts numbers, and how a new tokenizer keeps the old one's.

Arithmetic lives in the digit tokens: where the two schemes differ, matching pursuit lost 79 % of
GSM8K, and 6 % where they are the same (arXiv 2506.06607, tables of the paper).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from megatron_ext.errors import ConfigError
from megatron_ext.huggingface.checkpoint_files import read_json
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.transfer.extend import TOKENIZER_FILE, add_to_bpe, bpe_file, copy_tokenizer

DigitScheme = Literal["one by one", "threes from the left", "threes from the right", "by merges"]

_NUMBERS: Final = ("8", "47", "305", "2024", "98765", "314159", "2718281", "16180339")
_MOST: Final = 3


def digit_scheme(tokenizer: ByteTokenizer) -> DigitScheme:
    """The scheme by which a tokenizer cuts numbers of one to eight digits."""
    found = [digit_pieces(tokenizer, number) for number in _NUMBERS]
    rules: dict[DigitScheme, list[list[int]]] = {
        "one by one": [[1] * len(number) for number in _NUMBERS],
        "threes from the left": [_threes(len(number)) for number in _NUMBERS],
        "threes from the right": [_threes(len(number))[::-1] for number in _NUMBERS],
    }
    return next((name for name, rule in rules.items() if rule == found), "by merges")


def digit_pieces(tokenizer: ByteTokenizer, number: str) -> list[int]:
    """Digits in each token of a number behind a letter."""
    ids, ends = tokenizer.encode_with_byte_ends("a" + number)
    begins = [0, *ends[: len(ids) - 1].tolist()]
    return [
        end - max(begin, 1) for begin, end in zip(begins, ends.tolist(), strict=True) if end > 1
    ]


def _threes(length: int) -> list[int]:
    return [_MOST] * (length // _MOST) + [length % _MOST] * (length % _MOST > 0)


def keep_digits(
    folder: Path, target: Path, *, new: MegatronTokenizerText, old: ByteTokenizer
) -> DigitScheme:
    """Write the new tokenizer with the digit scheme of the old one.

    One by one: numbers are cut before anything else, and no token is added. Threes from the left:
    the numbers of two and three digits become added tokens, the longest of which is taken first.

    Args:
        folder: Folder of the new tokenizer, with a ``tokenizer.json``.
        target: Existing folder for its files.
        new: The new tokenizer.
        old: The old tokenizer.

    A tokenizer of another kind, or another scheme, would be a guess.

    Returns:
        The old scheme, which is the new one's now.

    Raises:
        ConfigError: The old scheme is neither, or the new tokenizer has no ``tokenizer.json``.
        TokenizerError: Numbers are to be added, and its model is no BPE.
    """
    scheme, file = digit_scheme(old), folder / TOKENIZER_FILE
    if scheme not in ("one by one", "threes from the left") or not file.is_file():
        raise ConfigError(
            "the old digits cannot be kept",
            where="--keep-digits",
            got=f"old numbers are cut {scheme}; new tokenizer {new.path}",
            expected=f"one by one or threes from the left, and a {TOKENIZER_FILE}",
        )
    if scheme == "one by one":
        values = read_json(file)
        values["pre_tokenizer"] = _cut_first(values.get("pre_tokenizer"))
    else:
        values = bpe_file(folder)
        numbers = [f"{i:0{size}d}" for size in (2, _MOST) for i in range(10**size)]
        add_to_bpe(values, numbers)
    copy_tokenizer(folder, target, values)
    return scheme


def _cut_first(pre_tokenizer: dict[str, Any] | None) -> dict[str, Any]:
    first = {"type": "Digits", "individual_digits": True}
    if pre_tokenizer is None:
        return first
    rest = (
        pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    )
    return {"type": "Sequence", "pretokenizers": [first, *rest]}
