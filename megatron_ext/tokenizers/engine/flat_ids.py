"""Ids of many texts in one buffer.

Shape letters: N tokens of all texts, D texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_ext.tokenizers.token_ids import IdArray

Offsets = NDArray[np.int64]
"""[D + 1] where the ids of each text begin; the last entry is N."""

FlatIds = tuple[IdArray, Offsets]
"""Ids [N] of all texts one after another, and their offsets [D + 1]."""


def flat_ids(rows: Iterable[Sequence[int] | IdArray]) -> FlatIds:
    """The ids of each text, one text after another."""
    arrays = [np.asarray(row, np.int32) for row in rows]
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([len(row) for row in arrays], out=offsets[1:])
    return np.concatenate([np.zeros(0, np.int32), *arrays]), offsets


def join(parts: Sequence[FlatIds]) -> FlatIds:
    """The texts of all parts; no copy where there is one part."""
    if len(parts) == 1:
        return parts[0]
    ids: list[NDArray[np.int32]] = [np.zeros(0, np.int32)]
    offsets = [np.zeros(1, np.int64)]
    total = 0
    for part_ids, part in parts:
        ids.append(part_ids[part[0] : part[-1]])
        offsets.append(part[1:] - part[0] + total)
        total += len(ids[-1])
    return np.concatenate(ids), np.concatenate(offsets)


def interleave(rest: FlatIds, aside: FlatIds, at: Sequence[int]) -> FlatIds:
    """The texts of ``rest``, with those of ``aside`` put where ``at`` says.

    Args:
        rest: D - A texts.
        aside: A texts.
        at: Index of each text of ``aside`` among all D, ascending [A].
    """
    parts: list[FlatIds] = []
    done = 0
    for taken, index in enumerate(at):
        # ``taken`` texts before this one came from aside.
        parts += [
            (rest[0], rest[1][done : index - taken + 1]),
            (aside[0], aside[1][taken : taken + 2]),
        ]
        done = index - taken
    return join([*parts, (rest[0], rest[1][done:])])
