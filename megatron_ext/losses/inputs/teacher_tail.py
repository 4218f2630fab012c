"""What a top-k teacher says of the tokens it does not name. B batch, T tokens, K top-k."""

from __future__ import annotations

import torch

from megatron_ext.errors import LossError
from megatron_ext.losses.inputs.targets import TeacherTargets
from megatron_ext.ops.divergence import log1mexp


def topk_log_probs(teacher: TeacherTargets, kept: torch.Tensor | None = None) -> torch.Tensor:
    """Log-probabilities of a ``topk`` teacher's tokens and of all others as one, at temperature 1.

    The others' mass is what the log-normaliser leaves: exact up to the rounding of the targets.

    Args:
        kept: bool [B * T, K], tokens to tell from the others; None: all.

    Returns:
        [B * T, K + 1] in fp32 (fp64 for fp64 targets), the others last; -inf at tokens not kept.
    """
    logits, normaliser = teacher.topk_logits, teacher.log_normaliser
    assert logits is not None
    assert normaliser is not None
    dtype = torch.promote_types(torch.float32, torch.promote_types(logits.dtype, normaliser.dtype))
    log_p = logits.flatten(0, 1).to(dtype) - normaliser.flatten().to(dtype)[:, None]
    if kept is None and logits.shape[-1] >= teacher.shard.vocab_size:
        return torch.nn.functional.pad(log_p, (0, 1), value=-torch.inf)
    if kept is not None:
        log_p = log_p.masked_fill(~kept, -torch.inf)
    named = torch.logsumexp(log_p, dim=-1, keepdim=True)
    return torch.cat([log_p, log1mexp(named)], dim=-1)


def check_tail_temperature(temperature: float, *, objective: str) -> None:
    """Check that the tail is known at the temperature.

    Raises:
        LossError: It is not 1.
    """
    if temperature != 1.0:
        raise LossError(
            f"the objective {objective} cannot use teacher targets of kind 'topk' at this "
            "temperature: their log-normaliser is that of temperature 1, and tells no other's",
            got=temperature,
            expected=1.0,
            fix="set the temperature to 1, or give the teacher's logits or hidden states",
        )
