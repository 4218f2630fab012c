"""Rotary embeddings and attention windows in ``config.json`` and as megatron-core settings.

transformers 5 has all under ``rope_parameters``; earlier releases have ``rope_theta`` and
``rope_scaling``. The earlier form is written, which both read.

megatron-core's Llama 3 scaling has a free factor, but fixed low and high frequency factors (1 and
4) and original positions (8,192). All of Meta's models have those values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from megatron_ext.errors import CheckpointError

LENGTH: Final = "original_max_position_embeddings"
"""Key of the length that a model was first trained with."""

LLAMA3: Final = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    LENGTH: 8192,
}
"""Fixed values of megatron-core's Llama 3 scaling."""

PART: Final = "partial_rotary_factor"
"""Key of the part of each head that is rotated."""


def rotary_settings(config: Mapping[str, Any], *, where: object) -> dict[str, Any]:
    """Rotary settings of a configuration, for both kinds of layers if there are two.

    Raises:
        CheckpointError: megatron-core does not support the embeddings.
    """
    parameters = dict(config.get("rope_parameters") or {})
    local = config.get("rope_local_base_freq")
    if "full_attention" in parameters:
        of_window = dict(parameters.get("sliding_attention") or {})
        local = of_window.pop("rope_theta", local)
        if of_window.get("rope_type", "default") != "default":
            raise CheckpointError(
                "layers with a window have scaled rotary embeddings", where=where, got=of_window
            )
        parameters = dict(parameters["full_attention"])
    theta = parameters.pop("rope_theta", config.get("rope_theta"))
    scaling = dict(config.get("rope_scaling") or {}) or parameters
    theta = scaling.pop("rope_theta", theta)
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    if theta is None or theta != int(theta):
        raise CheckpointError(
            "the base of the rotary embeddings cannot be used",
            where=where,
            got=theta,
            expected="a whole number",
        )
    part = scaling.pop(PART, config.get(PART)) or 1.0
    settings = {
        "rotary_percent": float(part),
        "rotary_base": int(theta),
        "local_rotary_base": None if local is None else int(local),
        "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "rotary_divisors": None,
        "rotary_magnitude": 1.0,
        "rotary_longest": None,
    }
    if kind == "default":
        return settings
    if kind == "linear":
        return settings | {"rotary_seq_len_interpolation_factor": float(scaling["factor"])}
    if kind == "llama3" and all(scaling.get(name) == value for name, value in LLAMA3.items()):
        return settings | {
            "use_rope_scaling": True,
            "rope_scaling_factor": float(scaling["factor"]),
        }
    if kind in ("longrope", "su") and "short_factor" in scaling:
        return settings | _longrope(config, scaling)
    if kind == "yarn" and LENGTH in scaling:
        width = config.get("qk_rope_head_dim") or config.get("head_dim")
        width = width or config["hidden_size"] // config["num_attention_heads"]
        return settings | _yarn(config, scaling, base=int(theta), width=int(width * part))
    raise CheckpointError(
        "the rotary embeddings are scaled in a way that megatron-core has not",
        where=where,
        got={"rope_type": kind, **scaling},
        expected=f"default, linear, longrope, yarn with {LENGTH}, or llama3 with {LLAMA3}",
    )


def _longrope(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of LongRoPE for sequences up to the length that a model was first trained with.

    The magnitude is ``sqrt(1 + log(s) / log(L))`` for an extension from ``L`` to ``s L`` positions
    (arXiv:2402.13753; the default of transformers' ``attention_factor``).
    """
    length = int(scaling.get(LENGTH) or config.get(LENGTH) or config["max_position_embeddings"])
    stretch = config["max_position_embeddings"] / length
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(stretch) / math.log(length)) if stretch > 1 else 1.0
    return {
        "rotary_divisors": tuple(map(float, scaling["short_factor"])),
        "rotary_magnitude": float(magnitude),
        "rotary_longest": length,
    }


def _yarn(
    config: Mapping[str, Any], scaling: Mapping[str, Any], *, base: int, width: int
) -> dict[str, Any]:
    """Settings of YaRN, for sequences of any length (arXiv:2309.00071, section 3.2).

    Pair ``i`` of ``n`` makes ``L base^(-i / n) / 2 pi`` turns in the ``L`` positions that a model
    was first trained with. Pairs of more than ``beta_fast`` turns keep their frequency, those of
    fewer than ``beta_slow`` are slower by the factor ``s``, and a line in ``i`` joins the two. The
    magnitude is ``0.1 log s + 1``, or the quotient of two of these with factors of their own.
    """
    length, pairs = int(scaling[LENGTH]), width // 2
    stretch = float(scaling.get("factor") or config["max_position_embeddings"] / length)

    def pair(turns: float) -> float:
        return pairs * math.log(length / (turns * 2 * math.pi)) / math.log(base)

    first, last = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    divisors = []
    for number in range(pairs):
        slow = min(max((number - first) / ((last - first) or 0.001), 0.0), 1.0)
        divisors.append(1 / (slow / stretch + 1 - slow))
    return {
        "rotary_divisors": tuple(divisors),
        "rotary_magnitude": _yarn_magnitude(scaling, stretch),
    }


def _yarn_magnitude(scaling: Mapping[str, Any], stretch: float) -> float:
    """Factor of sines and cosines, as transformers takes it from the keys that there are."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    own, all_numbers = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if own and all_numbers:
        return yarn_growth(stretch, own) / yarn_growth(stretch, all_numbers)
    return yarn_growth(stretch)


def yarn_growth(stretch: float, factor: float = 1.0) -> float:
    """``0.1 f log s + 1`` for sequences of ``s`` times the length, 1 for shorter ones."""
    return 0.1 * factor * math.log(stretch) + 1.0 if stretch > 1 else 1.0


def rotary_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``rotary_settings``: keys of ``config.json``."""
    scaling: dict[str, Any] | None = None
    if settings["rotary_seq_len_interpolation_factor"] is not None:
        factor = settings["rotary_seq_len_interpolation_factor"]
        scaling = {"rope_type": "linear", "factor": factor}
    if settings["use_rope_scaling"]:
        scaling = {"rope_type": "llama3", "factor": settings["rope_scaling_factor"], **LLAMA3}
    config = {"rope_theta": float(settings["rotary_base"]), "rope_scaling": scaling}
    if settings["local_rotary_base"] is not None:
        config["rope_local_base_freq"] = float(settings["local_rotary_base"])
    return config


def unrotated_interval(config: Mapping[str, Any], *, where: object) -> int | None:
    """``n`` if every n-th layer has no rotary embeddings and the others have; None if all have.

    Raises:
        CheckpointError: The layers do not follow such a pattern.
    """
    layers = int(config["num_hidden_layers"])
    rotates = config.get("no_rope_layers")
    interval = config.get("no_rope_layer_interval")
    if rotates is None:
        return None if interval is None or interval > layers else int(interval)
    if all(rotates):
        return None
    interval = list(map(bool, rotates)).index(False) + 1
    if list(map(int, rotates)) != rotated_layers(layers, interval):
        raise CheckpointError(
            "layers without rotary embeddings follow no pattern", where=where, got=rotates
        )
    return interval


def rotated_layers(layers: int, interval: int | None) -> list[int]:
    """1 for each layer with rotary embeddings, 0 for others, as SmolLM3 has them."""
    return [int(interval is None or number % interval > 0) for number in range(1, layers + 1)]


_WINDOW: Final = "sliding_attention"
_ALL: Final = "full_attention"


def window_settings(
    config: Mapping[str, Any], *, reads_kinds: bool, has_own_rotation: bool, where: object
) -> dict[str, Any]:
    """Settings of attention windows.

    Args:
        config: Contents of ``config.json`` with the family's defaults.
        reads_kinds: Whether layers of the family may differ.
        has_own_rotation: Whether layers with a window have rotary embeddings of their own.

    Raises:
        CheckpointError: The layers follow no pattern.
    """
    window = None if config.get("use_sliding_window") is False else config.get("sliding_window")
    settings = {
        "window_size": None if window is None else int(window),
        "full_attention_interval": None,
    }
    if not reads_kinds or (window is None and not has_own_rotation):
        return settings
    kinds, layers = _kinds(config), int(config["num_hidden_layers"])
    if _WINDOW not in kinds and not has_own_rotation:
        return dict.fromkeys(settings)
    interval = kinds.index(_ALL) + 1 if _ALL in kinds else layers + 1
    if kinds != layer_types(layers, interval):
        raise CheckpointError(
            "layers with a window follow no pattern",
            where=where,
            got=", ".join(kinds) or "no layer_types",
            expected="full attention in every n-th layer, and a window in all others",
        )
    return settings | {"full_attention_interval": interval}


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Kind of each layer, in transformers' names; none where its releases have not agreed."""
    layers = int(config["num_hidden_layers"])
    if config.get("layer_types") is not None:
        return list(map(str, config["layer_types"]))
    if config.get("sliding_window_pattern") is not None:
        return layer_types(layers, int(config["sliding_window_pattern"]))
    first = config.get("max_window_layers")
    return [] if first is None else [_WINDOW if i >= first else _ALL for i in range(layers)]


def layer_types(layers: int, interval: int) -> list[str]:
    """Kind of each layer, in transformers' names."""
    return [_WINDOW if number % interval else _ALL for number in range(1, layers + 1)]
