"""Layers that see a window and layers that see all, in ``config.json`` and as settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from megatron_ext.errors import CheckpointError

_WINDOW: Final = "sliding_attention"
_ALL: Final = "full_attention"


def window_size(config: Mapping[str, Any]) -> int | None:
    """How far attention sees at least, in any layer; None: all."""
    if config.get("use_sliding_window") is False:
        return None
    window = config.get("sliding_window")
    return None if window is None else int(window)


def full_attention_interval(config: Mapping[str, Any], *, where: object) -> int:
    """``n`` where every n-th layer sees all and the others a window.

    Raises:
        CheckpointError: Layers follow no such pattern.
    """
    layers = int(config["num_hidden_layers"])
    kinds = config.get("layer_types")
    if kinds is None:
        return int(config["sliding_window_pattern"])
    interval = kinds.index(_ALL) + 1 if _ALL in kinds else layers + 1
    if list(kinds) != layer_types(layers, interval):
        raise CheckpointError(
            "layers with a window follow no pattern", where=where, got=", ".join(map(str, kinds))
        )
    return interval


def layer_types(layers: int, interval: int) -> list[str]:
    """What transformers calls the kinds of a model's layers, in order."""
    return [_WINDOW if number % interval else _ALL for number in range(1, layers + 1)]
