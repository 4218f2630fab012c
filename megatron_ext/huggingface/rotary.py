"""Rotary embeddings and attention windows in ``config.json`` and as megatron-core settings.

transformers 5 has all under ``rope_parameters``; earlier releases have ``rope_theta`` and
``rope_scaling``. The earlier form is written, which both read.

megatron-core's Llama 3 scaling has a free factor, but fixed low and high frequency factors (1 and
4) and original positions (8,192). All of Meta's models have those values; the frequencies of others
are divided one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
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

TURNED: Final = "rotary_dim"
"""Key of the numbers of each head that are rotated, in MiniMax-M2's files."""

QUERY_GROWTH: Final = "llama_4_scaling_beta"
"""Key of what queries grow by with each length of the first training, from the second one on."""


def rotary_settings(config: Mapping[str, Any], *, where: object) -> dict[str, Any]:
    """Rotary settings of a configuration, for both kinds of layers if there are two.

    Raises:
        CheckpointError: megatron-core does not support the embeddings, or values are malformed.
    """
    try:
        return _rotary_settings(config, where=where)
    except (TypeError, ValueError, KeyError, ArithmeticError) as error:
        keys = ("rope_theta", "rope_scaling", "rope_parameters", LENGTH, "max_position_embeddings")
        given = ", ".join(f"{key} {config[key]}" for key in keys if config.get(key) is not None)
        raise CheckpointError(
            "the rotary embeddings are malformed", where=where, got=f"{given:.200}"
        ) from error


def _rotary_settings(config: Mapping[str, Any], *, where: object) -> dict[str, Any]:
    parameters = dict(config.get("rope_parameters") or {})
    local, length = config.get("rope_local_base_freq"), config.get(LENGTH)
    if "full_attention" in parameters:
        of_window = dict(parameters.get("sliding_attention") or {})
        local = of_window.pop("rope_theta", local)
        if of_window.get("rope_type", "default") != "default":
            raise CheckpointError(
                "layers with a window have scaled rotary embeddings", where=where, got=of_window
            )
        parameters, length = dict(parameters["full_attention"]), None
    scaling = dict(config.get("rope_scaling") or {}) or parameters
    theta = scaling.pop("rope_theta", config.get("rope_theta"))
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    if theta is None or theta != int(theta):
        raise CheckpointError(
            "the base of the rotary embeddings cannot be used",
            where=where,
            got=theta,
            expected="a whole number",
        )
    part = scaling.pop(PART, config.get(PART))
    if part is None:
        part = config[TURNED] / _width(config) if config.get(TURNED) else 1.0
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
    longest = config.get("max_position_embeddings")
    length = length or scaling.get(LENGTH) or longest
    if scaling.pop(QUERY_GROWTH, None) and length:
        settings["rotary_longest"] = int(length)
    if kind == "default":
        return settings
    if kind == "linear":
        return settings | {"rotary_seq_len_interpolation_factor": float(scaling["factor"])}
    if kind == "dynamic" and longest:
        # Which changes nothing up to there.
        return settings | {"rotary_longest": int(longest)}
    known = {**scaling, LENGTH: length}
    if kind == "llama3" and all(known.get(name) == value for name, value in LLAMA3.items()):
        return settings | {
            "use_rope_scaling": True,
            "rope_scaling_factor": float(scaling["factor"]),
        }
    stretch = scaling.get("factor") or (longest and length and longest / length)
    if length and stretch and _NEEDED.get(kind, {"none"}) <= scaling.keys():
        stretched = _Stretched(
            base=int(theta),
            pairs=int(_width(config) * part) // 2,
            length=int(length),
            stretch=float(stretch),
        )
        return settings | _STRETCHED[kind](scaling, stretched)
    raise CheckpointError(
        "the rotary embeddings are scaled in a way that megatron-core has not",
        where=where,
        got={"rope_type": kind, **scaling},
        expected="default, linear, dynamic, longrope, yarn or llama3 with all of their keys",
    )


def _width(config: Mapping[str, Any]) -> int:
    """Numbers of a head, or of the part of one that positions are of in latent attention."""
    width = config.get("qk_rope_head_dim") or config.get("head_dim")
    return int(width or config["hidden_size"] // config["num_attention_heads"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretched:
    """Rotary embeddings of a model that was first trained with shorter sequences."""

    base: int

    pairs: int
    """Pairs of numbers that are turned, of which number ``i`` of ``n`` turns by ``base^(-i / n)``
    from a position to the next."""

    length: int
    """Of the sequences of the first training, ``L``."""

    stretch: float
    """Length of later sequences by that, ``s``."""


def _longrope(scaling: Mapping[str, Any], rotary: _Stretched) -> dict[str, Any]:
    """Settings of LongRoPE for sequences up to the length that a model was first trained with.

    The magnitude is ``sqrt(1 + log(s) / log(L))`` (arXiv:2402.13753; the default of transformers'
    ``attention_factor``).
    """
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        growth = math.log(rotary.stretch) / math.log(rotary.length) if rotary.stretch > 1 else 0.0
        magnitude = math.sqrt(1 + growth)
    return {
        "rotary_divisors": tuple(map(float, scaling["short_factor"])),
        "rotary_magnitude": float(magnitude),
        "rotary_longest": rotary.length,
    }


def _yarn(scaling: Mapping[str, Any], rotary: _Stretched) -> dict[str, Any]:
    """Settings of YaRN, for sequences of any length (arXiv:2309.00071, section 3.2).

    Pair ``i`` makes ``L base^(-i / n) / 2 pi`` turns in ``L`` positions. Pairs of more than
    ``beta_fast`` turns keep their frequency, those of fewer than ``beta_slow`` are slower by the
    factor ``s``, and a line in ``i`` joins the two. The magnitude is ``0.1 log s + 1``, or the
    quotient of two of these with factors of their own.
    """

    def pair(turns: float) -> float:
        turned = math.log(rotary.length / (turns * 2 * math.pi))
        return rotary.pairs * turned / math.log(rotary.base)

    first, last = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * rotary.pairs - 1)
    slow = [(number - first) / ((last - first) or 0.001) for number in range(rotary.pairs)]
    return {
        "rotary_divisors": _divisors(slow, rotary.stretch),
        "rotary_magnitude": _yarn_magnitude(scaling, rotary.stretch),
    }


def _llama3(scaling: Mapping[str, Any], rotary: _Stretched) -> dict[str, Any]:
    """Settings of Llama 3.1's scaling with other factors than Meta's.

    Of the turns of a pair in ``L`` positions, ``high_freq_factor`` and more keep its frequency,
    ``low_freq_factor`` and fewer make it slower by ``s``, and a line in the turns joins the two.
    """
    low, high = (float(scaling[f"{name}_freq_factor"]) for name in ("low", "high"))
    powers = (rotary.base ** (-number / rotary.pairs) for number in range(rotary.pairs))
    turns = (rotary.length * power / (2 * math.pi) for power in powers)
    slow = [(high - turn) / ((high - low) or 0.001) for turn in turns]
    return {"rotary_divisors": _divisors(slow, rotary.stretch)}


def _divisors(slow: Iterable[float], stretch: float) -> tuple[float, ...]:
    """Divisors of frequencies, which are divided by ``stretch`` as far as they are slow.

    Args:
        slow: 0 or less for a frequency as it was, 1 or more for one that is divided.
    """
    parts = (min(max(part, 0.0), 1.0) for part in slow)
    return tuple(1 / (part / stretch + 1 - part) for part in parts)


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


_STRETCHED: Final[Mapping[str, Callable[[Mapping[str, Any], _Stretched], dict[str, Any]]]] = {
    "longrope": _longrope,
    "su": _longrope,
    "yarn": _yarn,
    "llama3": _llama3,
}
"""Settings by kind of scaling."""

_NEEDED: Final[Mapping[object, Set[str]]] = {
    "longrope": {"short_factor"},
    "su": {"short_factor"},
    "yarn": set(),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
}
"""Keys that a kind is not without."""


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
    if not kinds and not {"max_window_layers", "sliding_window_pattern"} & config.keys():
        return settings
    if kinds and _WINDOW not in kinds and not has_own_rotation:
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
    pattern = config.get("sliding_window_pattern")
    if type(pattern) is int and pattern > 0:
        return layer_types(layers, pattern)
    first = config.get("max_window_layers")
    return [] if first is None else [_WINDOW if i >= first else _ALL for i in range(layers)]


def layer_types(layers: int, interval: int, other: str = _WINDOW) -> list[str]:
    """Kind of each layer, in transformers' names: full attention in every n-th, else ``other``."""
    return [other if number % interval else _ALL for number in range(1, layers + 1)]
