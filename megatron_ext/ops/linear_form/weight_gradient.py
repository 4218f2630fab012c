"""The gradient of a head, summed over tiles. N rows, Vp local columns, D hidden."""

from __future__ import annotations

import torch

from megatron_ext.distributed.vocab_parallel import row_slices


def add_weight_gradient_(
    total: torch.Tensor, logit_gradient: torch.Tensor, hidden: torch.Tensor
) -> None:
    """``total += logit_gradient.T @ hidden``, accumulated in the dtype of ``total``.

    Sums of tiles in bf16 would lose bits with every tile; so ``total`` is in fp32 while its factors
    stay as they are. Tensor cores do that in one product. A CPU has no such product, and widens a
    few columns at a time.

    Args:
        total: [Vp, D] fp32, or the dtype of the factors.
        logit_gradient: [N, Vp]
        hidden: [N, D]
    """
    if total.dtype == logit_gradient.dtype:
        total.addmm_(logit_gradient.t(), hidden)
    elif total.is_cuda:
        torch.addmm(total, logit_gradient.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        wide = hidden.to(total.dtype)
        for columns in _column_slices(logit_gradient):
            total[columns].addmm_(logit_gradient[:, columns].t().to(total.dtype), wide)


def add_bias_gradient_(total: torch.Tensor, logit_gradient: torch.Tensor) -> None:
    """``total += logit_gradient.sum(0)``, accumulated in the dtype of ``total`` [Vp]."""
    for columns in _column_slices(logit_gradient):
        total[columns] += logit_gradient[:, columns].sum(dim=0, dtype=total.dtype)


def _column_slices(logit_gradient: torch.Tensor) -> list[slice]:
    rows, width = logit_gradient.shape
    return list(row_slices(width, rows, device=logit_gradient.device))
