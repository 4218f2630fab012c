"""Conversion between ``config.json`` and model settings, and the sizes of any causal model.

Settings have the names of ``ModelConfig``: all that define the model, and none of
its training. torch is not loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final

from megatron_ext.errors import CheckpointError
from megatron_ext.huggingface.checkpoint_files import CONFIG_FILE, CheckpointFiles
from megatron_ext.huggingface.deepseek import (
    KINDS,
    NEXT_KEYS,
    expert_config,
    expert_settings,
    kinds_of_layers,
    latent_settings,
    predicts_more,
)
from megatron_ext.huggingface.families import FAMILIES, TEACHER_ALONE, UNSUPPORTED
from megatron_ext.huggingface.family import Family
from megatron_ext.huggingface.hybrid_families import (
    LINEAR_SIZES,
    linear_config,
    linear_settings,
)
from megatron_ext.huggingface.rotary import (
    PART,
    TURNED,
    layer_types,
    rotary_config,
    rotary_settings,
    rotated_layers,
    unrotated_interval,
    window_settings,
)
from megatron_ext.huggingface.tensor_map import TensorMap
from megatron_ext.huggingface.text_part import WRAPPERS

_NAMES: Final[dict[str, str]] = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "layernorm_epsilon": "rms_norm_eps",
    "init_method_std": "initializer_range",
    "vocab_size": "vocab_size",
}
"""Keys of ``config.json`` by the setting that they become."""

_SCALAR: Final = "query_pre_attn_scalar"
"""Key whose root scores are divided by."""

_NORMALISED: Final = "norm_topk_prob"
"""Key that divides the chosen experts' weights by their sum."""

_OF_SOME: Final = (
    *("sliding_window", "use_sliding_window", "rope_local_base_freq"),
    *("attn_logit_softcapping", "final_logit_softcapping", _SCALAR, _NORMALISED),
    *("no_rope_layers", "no_rope_layer_interval", "max_window_layers", "sliding_window_pattern"),
    TURNED,
    KINDS,
)
"""Keys that are read in the families alone that have a default for them, or limits; others ignore
them, as transformers does."""

_CAPS: Final = {
    "attention_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
}
"""Keys that may be null."""

COMMON: Final[Mapping[str, Any]] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "gate_activation": "silu",
    "gate_limit": None,
    "gated_offset": 0.0,
    "attention_sinks": False,
    "attention_cap": None,
    "logit_cap": None,
    "add_qkv_bias": False,
    "add_bias_linear": False,
    "qk_layernorm": False,
    "qk_layernorm_over": "head",
    "pre_layernorms": True,
    "parallel_residual": False,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "softmax_scale": None,
    "rotary_percent": 1.0,
    "unrotated_interval": None,
    "layernorm_zero_centered_gamma": False,
    "scale_embeddings": False,
    "post_layernorms": False,
    "num_experts": None,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_expert_bias": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_first_dense_layers": 0,
    "q_lora_rank": None,
    "kv_lora_rank": None,
    "qk_head_dim": None,
    "qk_pos_emb_head_dim": None,
    "v_head_dim": None,
    "attention_output_gate": False,
    **dict.fromkeys(("linear_attention_freq", *LINEAR_SIZES)),
}
"""Settings of Llama, which families override."""


def family_of(files: CheckpointFiles) -> Family:
    """The family of a checkpoint.

    Raises:
        CheckpointError: The family is not supported.
    """
    architectures = files.config.get("architectures") or []
    for name in architectures:
        if name in FAMILIES:
            family = FAMILIES[name]
            is_of_files = family.entries and files.has_weights
            return family.of_tensors(files.tensors) if is_of_files else family
    reasons = [UNSUPPORTED[name] for name in architectures if name in UNSUPPORTED]
    if WRAPPERS & {*architectures}:
        kind = (files.config.get("text_config") or {}).get("model_type")
        reasons = [f"its text model, of type {kind}, is of no family"]
    raise CheckpointError(
        f"this architecture is not read{f': {reasons[0]}' if reasons else ''}",
        where=files.folder / CONFIG_FILE,
        got=", ".join(map(str, architectures)) or "none",
        expected=f"one of {', '.join(FAMILIES)}",
        fix=TEACHER_ALONE,
    )


def model_settings(files: CheckpointFiles) -> dict[str, Any]:
    """Settings of the model in ``config.json``.

    Raises:
        CheckpointError: A key is missing, or has a value that megatron-core does not support.
    """
    family, where = family_of(files), files.folder / CONFIG_FILE
    return settings_of(family, files.config, where=where)


def settings_of(family: Family, config: Mapping[str, Any], *, where: object) -> dict[str, Any]:
    """Settings of a model from the values of a ``config.json``; see ``model_settings``."""
    renamed = {old: config[new] for old, new in family.synonyms.items() if new in config}
    unread = {*_OF_SOME} - family.defaults.keys() - family.allowed.keys() | {*family.unread}
    config = {key: value for key, value in config.items() if key not in unread}
    config = {**family.defaults, **renamed, **config}
    _check_allowed(family, config, where)
    names = {**_NAMES, **family.names}
    missing = [name for name in names.values() if config.get(name) is None]
    if missing:
        raise CheckpointError("a key is missing", where=where, expected=missing[0])
    chosen = config[names["moe_router_topk"]] if "moe_router_topk" in names else None
    if chosen == 1 and family.settings.get("moe_router_score_function") == "sigmoid":
        raise CheckpointError(
            f"megatron-core weighs a single expert by its score, a {family.architecture} by 1",
            where=where,
            got=f"{names['moe_router_topk']} 1",
            expected="2 or more",
            fix=TEACHER_ALONE,
        )
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    rotary = rotary_settings(config, where=where)
    if rotary["rotary_percent"] != 1 and PART not in family.defaults:
        raise CheckpointError(
            f"a {family.architecture} rotates the whole of each head",
            where=where,
            got=f"{PART} {rotary['rotary_percent']}",
        )
    scalar = config.get(_SCALAR)
    windows = window_settings(
        config,
        reads_kinds=family.reads_kinds,
        has_own_rotation=rotary["local_rotary_base"] is not None,
        where=where,
    )
    unrotated = unrotated_interval(config, where=where)
    if not family.turns_all_layers and config["sliding_window"] is not None:
        unrotated = windows["full_attention_interval"] or 1
    return {
        **COMMON,
        "softmax_scale": None if scalar is None else float(scalar) ** -0.5,
        **{name: config[key] for name, key in names.items()},
        **{name: config.get(key) for name, key in _CAPS.items()},
        # Only models that may do without divide the weights of the chosen experts on request.
        "moe_router_pre_softmax": not config.get(_NORMALISED, True),
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": width,
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        **windows,
        "unrotated_interval": unrotated,
        **rotary,
        **family.settings,
        **expert_settings(config, where=where),
        **latent_settings(config),
        **linear_settings(family, config, where=where),
    }


def model_config(settings: Mapping[str, Any], *, max_position_embeddings: int) -> dict[str, Any]:
    """A ``config.json`` for a model that did not come from a HuggingFace checkpoint.

    Raises:
        CheckpointError: No family can express the model.
    """
    for family in FAMILIES.values():
        names = {**_NAMES, **family.names}
        if any(settings[name] is None for name in names):
            continue
        config = {
            "architectures": [family.architecture],
            "model_type": family.model_type,
            **{key: settings[name] for name, key in names.items()},
            "num_key_value_heads": settings["num_query_groups"],
            "head_dim": settings["kv_channels"],
            "tie_word_embeddings": not settings["untie_embeddings_and_output_weights"],
            "max_position_embeddings": max_position_embeddings,
            # transformers' defaults may be beyond a smaller vocabulary.
            "pad_token_id": None,
            **{key: values[0] for key, values in family.allowed.items()},
            **rotary_config(settings),
        }
        if "rope_parameters" in family.defaults:
            # Without it transformers would take its default.
            config["rope_parameters"] = {
                "rope_type": "default",
                "rope_theta": config["rope_theta"],
            }
        if "rope_local_base_freq" in family.synonyms:
            # transformers takes rope_theta for the layers without a window alone.
            like_all = {"rope_type": "default", "rope_theta": config["rope_theta"]}
            config["rope_parameters"] = {"full_attention": like_all, "sliding_attention": like_all}
        if _NORMALISED in family.defaults:
            config[_NORMALISED] = not settings["moe_router_pre_softmax"]
        if _CAPS["logit_cap"] in family.defaults:
            config |= {key: settings[name] for name, key in _CAPS.items()}
        if PART in family.defaults:
            config[PART] = settings["rotary_percent"]
        if "sliding_window" in family.defaults:
            config["sliding_window"] = settings["window_size"]
        if "use_sliding_window" in family.defaults:
            config["use_sliding_window"] = settings["window_size"] is not None
        # Without windows some families count layers by a pattern of 0, which cannot be.
        interval = settings["full_attention_interval"] or int(not family.turns_all_layers)
        if family.reads_kinds and interval:
            config["layer_types"] = layer_types(settings["num_layers"], interval)
        if settings["softmax_scale"] is not None and _SCALAR in family.defaults:
            config[_SCALAR] = round(settings["softmax_scale"] ** -2)
        if "no_rope_layer_interval" in family.defaults:
            interval = settings["unrotated_interval"]
            config["no_rope_layers"] = rotated_layers(settings["num_layers"], interval)
        if "n_shared_experts" in family.defaults:
            config |= expert_config(settings)
        if KINDS in family.defaults:
            dense = settings["moe_first_dense_layers"]
            config[KINDS] = kinds_of_layers(settings["num_layers"], dense)
        config |= linear_config(family, settings)
        config |= {new: config[old] for old, new in family.synonyms.items() if old in config}
        config = {key: value for key, value in config.items() if key not in family.unread}
        if "kv_lora_rank" in family.defaults:
            # transformers divides by it, and takes a number of its own without it.
            config["num_key_value_heads"] = settings["num_attention_heads"]
        try:
            found = settings_of(family, config, where=CONFIG_FILE)
        except CheckpointError:
            # The family has no such model.
            continue
        if all(settings[name] == value for name, value in found.items()):
            return config
    raise CheckpointError(
        "no architecture of transformers that is written here has such a model",
        got={name: settings[name] for name in COMMON if settings[name] != COMMON[name]},
        expected=f"a model of {', '.join(FAMILIES)}",
    )


def tensor_map(family: Family, settings: Mapping[str, Any]) -> TensorMap:
    """The tensors of a model of a family, without the head if it is tied."""
    is_untied = settings["untie_embeddings_and_output_weights"]
    return TensorMap(family.rules if is_untied else family.rules[:-1], settings)


def check_tensors(files: CheckpointFiles, tensors: TensorMap, family: Family) -> None:
    """Check that a checkpoint holds exactly the tensors of its configuration.

    Raises:
        CheckpointError: A tensor is missing, unexpected, or of another shape.
    """
    expected = tensors.shapes()
    for name, shape in expected.items():
        stored = files.tensors.get(name)
        if stored is None:
            raise CheckpointError(
                "the checkpoint has not all tensors of its configuration",
                where=files.folder,
                got=f"no {name}",
                expected=f"{name} of shape {list(shape)}",
                fix="download its weights again, or correct config.json",
            )
        if stored.shape != shape:
            raise CheckpointError(
                f"the tensor {name} has another shape than its configuration says",
                where=stored.file,
                got=list(stored.shape),
                expected=list(shape),
                fix="correct config.json",
            )
    # A tied head is the embedding, whether or not a file repeats it.
    known = (*family.ignored, family.head)
    extra = [name for name in files.tensors if name not in expected and not name.endswith(known)]
    key = next((key for key in NEXT_KEYS if key in family.defaults), None)
    if key is not None and any(predicts_more(name, tensors.layers) for name in extra):
        extra = [name for name in extra if not predicts_more(name, tensors.layers)]
        warnings.warn(
            f"{files.folder}: its {key} layers behind the last are left out", stacklevel=2
        )
    if extra:
        raise CheckpointError(
            f"the checkpoint has tensors that do not belong to a {family.architecture}",
            where=files.tensors[extra[0]].file,
            got=f"{extra[0]}{f' and {len(extra) - 1} more' if len(extra) > 1 else ''}",
            fix="correct config.json, or remove them",
        )


def _check_allowed(family: Family, config: Mapping[str, Any], where: object) -> None:
    quantisation = config.get("quantization_config")
    method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
    if quantisation and method not in family.quantisations:
        raise CheckpointError(
            "the weights are quantised",
            where=where,
            got=method,
            expected=f"a checkpoint in bf16, fp16, fp32 or {' or '.join(family.quantisations)}",
            fix="convert it to bf16",
        )
    for key, values in {"is_causal": (True,), **family.allowed}.items():
        if key in config and config[key] not in values:
            raise CheckpointError(
                f"megatron-core has no {family.architecture} with such a {key}",
                where=where,
                got=repr(config[key]),
                expected=" or ".join(map(repr, values)),
                fix=TEACHER_ALONE,
            )


_NAMES_IN_ANY_MODEL: Final[Mapping[str, tuple[str, ...]]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_query_groups": ("num_key_value_heads", "num_kv_heads"),
    "kv_channels": ("head_dim",),
    "ffn_hidden_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab_size": ("vocab_size",),
}
"""Keys of ``config.json`` in various architectures, by setting."""

_NEEDED: Final = ("num_layers", "hidden_size", "vocab_size")

_LENGTHS: Final = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


def any_model_settings(files: CheckpointFiles) -> dict[str, Any]:
    """Sizes of a causal language model of any architecture; unspecified ones are left out.

    Raises:
        CheckpointError: A size that every model has is missing.
    """
    config = _text_config(files)
    found: dict[str, Any] = {"hf": str(files.folder)}
    for setting, names in _NAMES_IN_ANY_MODEL.items():
        value = _first(config, names)
        if value is not None:
            found[setting] = value
    for setting in _NEEDED:
        if setting not in found:
            raise CheckpointError(
                "a key is missing",
                where=files.folder / CONFIG_FILE,
                expected=f"one of {', '.join(_NAMES_IN_ANY_MODEL[setting])}",
            )
    # Models without attention have no heads.
    found.setdefault("num_attention_heads", 1)
    width = found["hidden_size"] // found["num_attention_heads"]
    found.setdefault("kv_channels", width + width % 2)
    if config.get("tie_word_embeddings") is False:
        found["untie_embeddings_and_output_weights"] = True
    return found


def longest_sequence(files: CheckpointFiles) -> int | None:
    """Maximum positions of the model; None if unspecified."""
    return _first(_text_config(files), _LENGTHS)


def _text_config(files: CheckpointFiles) -> Mapping[str, Any]:
    """The configuration, or its text section for a model that reads images too."""
    inner = files.config.get("text_config")
    return inner if isinstance(inner, Mapping) else files.config


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    found = [config[name] for name in names if isinstance(config.get(name), int)]
    return found[0] if found else None
