"""One update by megatron-core's optimizers, made only where the gradient is finite."""

from __future__ import annotations

import math

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32


def update_if_finite(optimizer: MegatronOptimizer) -> float:
    """Clip and step as ``ChainedOptimizer.step`` does; the global gradient norm before clipping.

    Where that is not finite nothing is clipped and nothing changes: megatron-core's own step would
    have written NaN into the weights by the time it returns the norm.

    Collectives: those of ``MegatronOptimizer.get_grad_norm``, and those of the step, which every
    rank makes or none, because all of them have the same norm.
    """
    if optimizer.prepare_grads():
        return math.inf
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return norm
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        parameters = inner.get_parameters()
        if parameters and inner.config.clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(
                parameters,
                max_norm=inner.config.clip_grad,
                total_norm=norm,
                use_decoupled_grad=inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )
    optimizer.step_with_ready_grads()
    return norm
