"""Orthogonal matching pursuit: rows of a donor model as few rows of others, moved to the old model.

The donor has the new vocabulary. With ``A`` its rows of the anchors, tokens that both vocabularies
have, each of its other rows ``d`` is approached by K anchors, found one by one (Pati et al. 1993;
arXiv 2506.06607 for embeddings): of the atoms ``a / |a|`` the one with the largest product with
what is left of ``d`` comes next, and all weights are those of least squares. The same weights of
the old model's rows of these anchors are the new row. Control tokens never come from a donor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import torch

from megatron_ext.transfer.row_sources import RowSources
from megatron_ext.transfer.shares import Shares, VocabularyPart, piece_shares

_SCORES: Final = 1 << 26
"""Products of targets and atoms at a time: 256 MiB."""

_DEPENDENT: Final = 1e-5
"""Length of what is new in an atom below which it adds nothing."""

UNUSUAL_GROWTH: Final = 10.0
"""Growth of a norm, relative to the median growth, from which a row is reported: a row that is
faint in the donor and loud in the old model may have been made so (arXiv 2601.00065)."""


class Pursuit(NamedTuple):
    """Chosen atoms and their weights."""

    chosen: torch.Tensor
    """[B, K] int64"""

    weights: torch.Tensor
    """[B, K] fp64, of the atoms as they were given"""


def matching_pursuit(targets: torch.Tensor, atoms: torch.Tensor, *, k: int) -> Pursuit:
    """Approach each target by ``k`` of the atoms.

    Args:
        targets: [B, D]
        atoms: [N, D], at least ``k``; one of length zero is never of use.
        k: Atoms of each target.

    Equivalent: for each target, ``k`` times the atom of the largest cosine with the residual, which
    is that of ``torch.linalg.lstsq`` over the atoms chosen so far. Work in fp32, B N D operations a
    step; the last system in fp64.
    """
    lengths = atoms.float().norm(dim=1)
    units = atoms.float() / lengths.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    residual = targets.float().clone()
    count = len(targets)
    chosen = torch.zeros(count, k, dtype=torch.int64, device=targets.device)
    basis = residual.new_zeros(count, k, targets.shape[1])
    triangle = torch.zeros(count, k, k, dtype=torch.float64, device=targets.device)
    products = torch.zeros(count, k, dtype=torch.float64, device=targets.device)
    scores = residual.new_empty(count, len(atoms))
    for step in range(k):
        torch.mm(residual, units.t(), out=scores).abs_()
        scores.scatter_(1, chosen[:, :step], -1.0)
        best = scores.argmax(dim=1)
        chosen[:, step] = best
        direction = units[best]
        known = basis[:, :step]
        for _ in range(2):  # Once leaves an error of the size of the cancellation.
            along = torch.einsum("bkd,bd->bk", known, direction)
            direction = direction - torch.einsum("bkd,bk->bd", known, along)
            triangle[:, :step, step] += along.double()
        length = direction.norm(dim=1)
        is_new = length > _DEPENDENT
        direction = torch.where(
            is_new[:, None], direction / length.clamp_min(_DEPENDENT)[:, None], 0
        )
        basis[:, step] = direction
        triangle[:, step, step] = torch.where(is_new, length, 1.0).double()
        along = (direction * residual).sum(dim=1)
        products[:, step] = along.double()
        residual -= along[:, None] * direction
    weights = torch.linalg.solve_triangular(triangle, products[:, :, None], upper=True)[:, :, 0]
    scale = lengths[chosen].double()
    return Pursuit(chosen, torch.where(scale > 0, weights / scale, 0.0))


def pursued_shares(
    sources: RowSources, donor: torch.Tensor, *, k: int, part: VocabularyPart
) -> Shares:
    """Weights of old rows by matching pursuit; those of ``fvt`` where the donor has no use.

    Args:
        sources: Copies and pieces of the new vocabulary.
        donor: [V' or more, D] rows of the donor, on the device that does the work.
        k: Anchors of each row, of which there are as many at least.
        part: Which matrix they are of.
    """
    new, old = sources.anchors
    shares = piece_shares(sources, "fvt", part)
    wanted = sources.spelled
    if len(wanted) == 0:
        return shares
    atoms = donor[torch.from_numpy(new).to(donor.device)].float()
    chosen, weights = [], []
    size = max(1, _SCORES // len(new))
    for ids in torch.from_numpy(wanted).split(size):
        pursuit = matching_pursuit(donor[ids.to(donor.device)], atoms, k=k)
        chosen.append(old[pursuit.chosen.cpu().numpy()])
        weights.append(pursuit.weights.cpu().numpy())
    counts = np.zeros(len(sources.copied), dtype=np.int64)
    counts[wanted] = k
    return replace(
        shares,
        bounds=np.concatenate([[0], np.cumsum(counts)]),
        columns=np.concatenate(chosen).reshape(-1),
        values=np.concatenate(weights).reshape(-1),
    )


def grown_rows(donor: torch.Tensor, new: torch.Tensor, ids: np.ndarray) -> list[int]:
    """Ids whose norm grew from donor to model by ``UNUSUAL_GROWTH`` times the median growth."""
    if len(ids) == 0:
        return []
    places = torch.from_numpy(ids)
    before = donor[places.to(donor.device)].float().norm(dim=1).cpu()
    growth = new[places].float().norm(dim=1) / before.clamp_min(1e-30)
    return [int(i) for i in ids[(growth > UNUSUAL_GROWTH * growth.median()).numpy()]]
