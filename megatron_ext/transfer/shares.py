"""Weights of old rows in each new row, and the matrix that follows from them.

``mean``, ``fvt`` (Gee et al., Fast Vocabulary Transfer, EMNLP 2022) and ``fvt-asymmetric``
(arXiv 2608.03494) need the two tokenizers alone. With ``c`` the old id of a copy, ``P`` the weights
of the pieces and ``m`` the mean of the old rows,

    E'[t] = E[c(t)]              a copy, bit for bit
    E'[t] = sum_i P[t, i] E[i]   pieces: 1 / n each, or by their bytes in an asymmetric head
    E'[t] = m                    neither
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.projection.projection_matrix import ProjectionMatrix
from megatron_ext.transfer.row_sources import NO_SOURCE, RowSources, flattened

TransferMethod = Literal["fvt", "fvt-asymmetric", "omp", "mean", "hypernet"]
TRANSFER_METHODS: Final = get_args(TransferMethod)
VocabularyPart = Literal["input", "head"]

_ROWS: Final = 8192
"""New rows computed at a time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shares:
    """Weights of old rows in the new rows of one matrix."""

    copied: NDArray[np.int64]
    """[V'] old id, or ``NO_SOURCE``."""

    bounds: NDArray[np.int64]
    """[V' + 1] first entry of each row that is no copy."""

    columns: NDArray[np.int64]
    """Old id of each entry."""

    values: NDArray[np.float64]
    """Weight of each entry, of either sign."""


def piece_shares(sources: RowSources, method: TransferMethod, part: VocabularyPart) -> Shares:
    """Weights of the pieces of each token, which sum to 1; no entries for ``mean``.

    A hypernetwork adds to those of ``fvt``.
    """
    rows: Sequence[Sequence[int]] = (
        sources.pieces if method != "mean" else [()] * len(sources.copied)
    )
    bounds, columns = flattened(rows)
    if method == "fvt-asymmetric" and part == "head":
        weights = sources.piece_bytes[columns].astype(np.float64)
    else:
        weights = np.ones(len(columns))
    owner = np.repeat(np.arange(len(rows)), np.diff(bounds))
    sums = np.bincount(owner, weights=weights, minlength=len(rows))
    return Shares(
        copied=sources.copied, bounds=bounds, columns=columns, values=weights / sums[owner]
    )


def projection_shares(
    projection: ProjectionMatrix, sources: RowSources
) -> tuple[RowSources, Shares]:
    """Sources and weights that a projection from the new vocabulary to the old one states.

    Its exact rows are the copies; a row without entries is the mean.
    """
    count = len(sources.copied)
    bounds = projection.indptr[: count + 1].astype(np.int64)
    columns, values = projection.indices.astype(np.int64), projection.values.astype(np.float64)
    copied = np.full(count, NO_SOURCE, dtype=np.int64)
    exact = np.flatnonzero(projection.is_exact_row[:count])
    copied[exact] = columns[bounds[exact]]
    pieces = [
        () if is_copy else columns[begin:end].tolist()
        for is_copy, begin, end in zip(copied != NO_SOURCE, bounds[:-1], bounds[1:], strict=True)
    ]
    stated = replace(sources, copied=copied, pieces=pieces, is_identity=False)
    return stated, Shares(copied=copied, bounds=bounds, columns=columns, values=values)


def new_rows(
    shares: Shares, old: torch.Tensor, *, vocab_size: int, calibrates: bool = False
) -> torch.Tensor:
    """The rows [V', D] of the new vocabulary, in the dtype of ``old``.

    Args:
        shares: Weights of old rows.
        old: [rows, D]; rows from ``vocab_size`` on are padding and count for nothing.
        vocab_size: Ids of the old tokenizer.
        calibrates: Whether rows that are no copies get the mean norm of the old rows.

    Sums are in fp32, in the order of the pieces. Memory beyond the result: fp32 rows of a block.
    """
    count = len(shares.copied)
    new = torch.empty(count, old.shape[1], dtype=old.dtype)
    mean = old[:vocab_size].mean(dim=0, dtype=torch.float32)
    norm = _mean_norm(old[:vocab_size]) if calibrates else None
    copied, bounds = torch.from_numpy(shares.copied), torch.from_numpy(shares.bounds)
    columns, values = torch.from_numpy(shares.columns), torch.from_numpy(shares.values)
    for start in range(0, count, _ROWS):
        counts = bounds[start : start + _ROWS + 1].diff()
        entries = slice(int(bounds[start]), int(bounds[start + len(counts)]))
        owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
        block = torch.zeros(len(counts), old.shape[1])
        weighted = old[columns[entries]].float() * values[entries, None].float()
        block.index_add_(0, owner, weighted)
        block[counts == 0] = mean
        if norm is not None:
            block *= norm / block.norm(dim=1, keepdim=True).clamp_min(1e-30)
        part = block.to(old.dtype)
        sources = copied[start : start + len(counts)]
        is_copy = sources != NO_SOURCE
        part[is_copy] = old[sources[is_copy]]
        new[start : start + len(counts)] = part
    return new


def _mean_norm(rows: torch.Tensor) -> float:
    norms = [float(block.float().norm(dim=1).sum()) for block in rows.split(_ROWS)]
    return sum(norms) / len(rows)
