"""Rank files that say nothing of their pattern and special tokens, but are known by content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_ext.tokenizers.libraries.tiktoken.patterns import CL100K, LLAMA_3, O200K, R50K


@dataclass(frozen=True, slots=True)
class PublishedVocabulary:
    """What its publisher says of a rank file, outside the file."""

    name: str
    """As tiktoken names it; ``llama3`` for Meta's."""
    num_ranks: int
    """Number of lines."""
    digest: str
    """``rank_digest`` of them."""
    pattern: str
    """Regular expression that cuts the text."""
    special_ids: Mapping[str, int]
    """Id of each special token."""


def published_vocabulary(ranks: Mapping[bytes, int]) -> PublishedVocabulary | None:
    """The published vocabulary that has these very ranks."""
    rows = [row for row in PUBLISHED if row.num_ranks == len(ranks)]
    digest = rank_digest(ranks) if rows else ""
    return next((row for row in rows if row.digest == digest), None)


def rank_digest(ranks: Mapping[bytes, int]) -> str:
    """SHA-256 (hex) of ranks, in order, of the lengths of their tokens and of the tokens."""
    rows = sorted((rank, token) for token, rank in ranks.items())
    digest = hashlib.sha256(np.array([rank for rank, _ in rows], "<i8").tobytes())
    digest.update(np.array([len(token) for _, token in rows], "<i8").tobytes())
    digest.update(b"".join(token for _, token in rows))
    return digest.hexdigest()


def _llama_3_special_ids() -> dict[str, int]:
    """The 256 special tokens of Llama 3.1 and later; Llama 3 keeps some of these free."""
    named = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        4: "<|finetune_right_pad_id|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        8: "<|eom_id|>",
        9: "<|eot_id|>",
        10: "<|python_tag|>",
    }
    free = (i for i in range(256) if i not in named)
    reserved = {i: f"<|reserved_special_token_{n}|>" for n, i in enumerate(free)}
    return {name: 128000 + i for i, name in sorted((named | reserved).items())}


PUBLISHED = (
    PublishedVocabulary(
        "r50k_base",
        50256,
        "f20abb9232bc4c470775de87a1860f01bb4cf83f9e379070959ab65bfdbd1770",
        R50K,
        {"<|endoftext|>": 50256},
    ),
    PublishedVocabulary(
        "p50k_base",
        50280,
        "a82cc3820597b79c734cfdf89c2397eb837a2f40a0c07bfba3412721a844d541",
        R50K,
        {"<|endoftext|>": 50256},
    ),
    PublishedVocabulary(
        "cl100k_base",
        100256,
        "978dd8b84676858022e9110e9a8e6fccd3a8edf5b350882bff0452909df3d7aa",
        CL100K,
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    PublishedVocabulary(
        "o200k_base",
        199998,
        "f7c6a8755cb027d16b7c82e1d2800337790ded75d50c7b08967430cd06406e40",
        O200K,
        {"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
    ),
    PublishedVocabulary(
        "llama3",
        128000,
        "f4c1520eadaafffd5a1fe294cc19d2017996389d54f4fea6a0edf2782eaf6a1c",
        LLAMA_3,
        _llama_3_special_ids(),
    ),
)
