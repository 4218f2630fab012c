"""How distillation weighs against cross-entropy in a run, step after step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import ConfigError, LossError
from megatron_ext.losses import (
    FixedWeighting,
    GradientMagnitudeWeighting,
    LayerGradients,
    LossWeighting,
    MatchedWeighting,
    ScheduledWeighting,
)
from megatron_ext.training.config import LossConfig
from megatron_ext.training.config_file import build_config

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_TERMS: Final = ("kd", "ce")

_SECTION: Final = "loss.weighting_options"


def make_weighting(loss: LossConfig, *, train_iters: int) -> LossWeighting:
    """The weighting of a run of ``train_iters`` steps, before the first.

    Raises:
        ConfigError: Options that it does not have or cannot use.
    """
    _check_options(loss)
    weights = {"kd": loss.kd_weight, "ce": loss.ce_weight, "steps": train_iters}
    values = {name: weights[name] for name in _OF_LOSS[loss.weighting]}
    try:
        return _build(_KINDS[loss.weighting], {**values, **loss.weighting_options})
    except LossError as error:
        raise ConfigError(str(error), where=_SECTION) from error


def layer_gradients(gpt: GPTModel, groups: ProcessGroups) -> LayerGradients:
    """What measures the terms' gradients: over the matrices of a last stage's last layer."""
    matrices = [weight for weight in gpt.decoder.layers[-1].parameters() if weight.dim() > 1]
    return LayerGradients(matrices, _TERMS, tp_group=groups.tp, dp_group=groups.dp_cp)


def observe(
    weighting: LossWeighting,
    metrics: Mapping[str, float],
    gradients: LayerGradients | None,
    groups: ProcessGroups,
    *,
    has_both: bool,
) -> None:
    """Tell the weighting, on every rank alike, what the last stage has seen of a global batch.

    A step without one of the terms is left out.

    Args:
        metrics: On the last stage the means of the terms.
        gradients: On the last stage what each term pulled at the last layer, where that is asked.
        has_both: Whether both terms count anything; of the last stage.

    Collectives: none where it observes nothing; else one broadcast over the stages, and those of
    ``LayerGradients.norms``.
    """
    if weighting.observes == "nothing":
        return
    seen = torch.zeros(len(_TERMS) + 1, dtype=torch.float64, device=groups.device)
    if groups.is_last_stage:
        values = metrics if gradients is None else gradients.norms()
        seen = seen.new_tensor([float(has_both), *(values[name] for name in _TERMS)])
    is_whole, *shared = groups.broadcast_from_last_stage(seen).tolist()
    if is_whole:
        weighting.observe(dict(zip(_TERMS, shared, strict=True)))


_KINDS: Final[Mapping[str, type[Any]]] = {
    "fixed": FixedWeighting,
    "scheduled": ScheduledWeighting,
    "matched": MatchedWeighting,
    "gradient_magnitude": GradientMagnitudeWeighting,
}

_OF_LOSS: Final[Mapping[str, tuple[str, ...]]] = {
    "fixed": ("kd", "ce"),
    "scheduled": ("kd", "ce", "steps"),
    "matched": ("ce",),
    "gradient_magnitude": (),
}
"""What each takes from the rest of the configuration."""


def _build(kind: type[Any], values: Mapping[str, Any]) -> LossWeighting:
    weighting: LossWeighting = build_config(kind, values, lambda keys: ".".join((_SECTION, *keys)))
    return weighting


def _check_options(loss: LossConfig) -> None:
    for name in loss.weighting_options:
        if name.startswith("_") or name in ("kd", "ce", "terms"):
            raise ConfigError(
                "no such option of a weighting",
                where=f"{_SECTION}.{name}",
                fix="weights are loss.kd_weight and loss.ce_weight",
            )
