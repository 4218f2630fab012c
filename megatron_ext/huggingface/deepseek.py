"""DeepSeek's families and what is published in their format: latent attention, experts behind dense
layers, and a choice among groups of experts.

Latent attention makes queries, keys and values from narrow products of the hidden states
(arXiv:2405.04434, section 2.1). transformers and ``MLASelfAttention`` of megatron-core have its
matrices in the same order, one to one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from megatron_ext.errors import CheckpointError
from megatron_ext.huggingface.dense_families import LLAMA
from megatron_ext.huggingface.expert_families import LAYER, expert_rules
from megatron_ext.huggingface.family import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    MLP_INPUT,
    MLP_OUTPUT,
    Family,
)
from megatron_ext.huggingface.rotary import LENGTH, yarn_growth
from megatron_ext.huggingface.tensor_map import Part, Rule, Size

NEXT: Final = "num_nextn_predict_layers"
NEXT_KEYS: Final = (NEXT, "mtp_num_hidden_layers")
"""Keys of the number of layers behind the last that predict tokens behind the next one."""

KINDS: Final = "mlp_layer_types"
"""Key of the kind of each layer's feed-forward part, in GLM-4.7-Flash's files."""

_ATTENTION: Final = "decoder.layers.self_attention"


def _of_attention(megatron: str, name: str, *shape: Size) -> Rule:
    return Rule(
        f"{_ATTENTION}.{megatron}.weight", (Part(f"{LAYER}.self_attn.{name}.weight", shape),)
    )


LATENT_ATTENTION = (
    Rule(
        "decoder.layers.input_layernorm.weight",
        (Part(f"{LAYER}.input_layernorm.weight", ("hidden",)),),
    ),
    # Queries without a narrow product, or with one.
    _of_attention("linear_q_proj", "q_proj", "direct_query", "hidden"),
    _of_attention("linear_q_down_proj", "q_a_proj", "latent", "hidden"),
    _of_attention("q_layernorm", "q_a_layernorm", "latent"),
    _of_attention("linear_q_up_proj", "q_b_proj", "latent_query", "latent"),
    _of_attention("linear_kv_down_proj", "kv_a_proj_with_mqa", "latent_and_rotary", "hidden"),
    _of_attention("kv_layernorm", "kv_a_layernorm", "latent_key"),
    _of_attention("linear_kv_up_proj", "kv_b_proj", "latent_key_value", "latent_key"),
    _of_attention("linear_proj", "o_proj", "hidden", "latent_value"),
)

SHARED = f"{LAYER}.mlp.shared_experts"
EXPERT_BIAS = Rule(
    "decoder.layers.mlp.router.expert_bias",
    (Part(f"{LAYER}.mlp.gate.e_score_correction_bias", ("experts",)),),
    layers="experts",
)
FEED_FORWARD = (
    Rule(MLP_INPUT.megatron, MLP_INPUT.parts, layers="dense"),
    Rule(MLP_OUTPUT.megatron, MLP_OUTPUT.parts, layers="dense"),
    *expert_rules(f"{LAYER}.mlp", "gate", "gate_proj", "up_proj", "down_proj", layers="experts"),
    Rule(
        "decoder.layers.mlp.shared_experts.linear_fc1.weight",
        (
            Part(f"{SHARED}.gate_proj.weight", ("shared_ffn", "hidden")),
            Part(f"{SHARED}.up_proj.weight", ("shared_ffn", "hidden")),
        ),
        layers="experts",
    ),
    Rule(
        "decoder.layers.mlp.shared_experts.linear_fc2.weight",
        (Part(f"{SHARED}.down_proj.weight", ("hidden", "shared_ffn")),),
        layers="experts",
    ),
)

OF_EXPERTS: Final = (
    *("num_experts", "moe_router_topk", "moe_ffn_hidden_size"),
    *("moe_router_topk_scaling_factor", "moe_first_dense_layers"),
)


DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    models="DeepSeek-V2-Lite",
    rules=(EMBEDDING, *LATENT_ATTENTION, *FEED_FORWARD, FINAL_NORM, HEAD),
    names={
        "num_experts": "n_routed_experts",
        "moe_router_topk": "num_experts_per_tok",
        "moe_ffn_hidden_size": "moe_intermediate_size",
        "moe_router_topk_scaling_factor": "routed_scaling_factor",
        "moe_first_dense_layers": "first_k_dense_replace",
        "kv_lora_rank": "kv_lora_rank",
        "qk_head_dim": "qk_nope_head_dim",
        "qk_pos_emb_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
    },
    defaults={
        **LLAMA.defaults,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "norm_topk_prob": False,
    },
    # Of keys and values there are as many heads as of queries.
    unread=("num_key_value_heads", "head_dim", "n_group", "topk_group"),
    allowed={
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy",),
        "moe_layer_freq": (1,),
    },
)

DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    models="DeepSeek-V3 and R1, Kimi K2, Moonlight",
    rules=(EMBEDDING, *LATENT_ATTENTION, *FEED_FORWARD, EXPERT_BIAS, FINAL_NORM, HEAD),
    names=DEEPSEEK_V2.names,
    settings={"moe_router_score_function": "sigmoid", "moe_router_expert_bias": True},
    defaults={
        **DEEPSEEK_V2.defaults,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        NEXT: 0,
    },
    unread=("num_key_value_heads", "head_dim"),
    allowed={
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "norm_topk_prob": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        "rope_interleave": (True, None),
    },
)


def expert_settings(config: Mapping[str, Any], *, where: object) -> dict[str, Any]:
    """Settings of experts that are not one key of ``config.json``; {} of other families.

    Raises:
        CheckpointError: Groups of experts are not chosen as megatron-core chooses them.
    """
    if "n_shared_experts" not in config:
        return {}
    shared = config["n_shared_experts"]
    return {
        **_dense_layers(config, where),
        "moe_shared_expert_intermediate_size": (
            shared * config["moe_intermediate_size"] if shared else None
        ),
        **_groups(config, where),
    }


def _dense_layers(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The number of dense layers, where the kind of each layer is given."""
    kinds = config.get(KINDS)
    if kinds is None:
        return {}
    dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if list(kinds) != kinds_of_layers(config["num_hidden_layers"], dense):
        raise CheckpointError(
            "layers are dense behind those of experts",
            where=where,
            got=f"{KINDS} {', '.join(map(str, kinds))}",
            expected="dense ones, and then sparse ones, num_hidden_layers of both",
        )
    return {"moe_first_dense_layers": dense}


def kinds_of_layers(layers: int, dense: int) -> list[str]:
    """Kind of each layer's feed-forward part, in transformers' names."""
    return ["dense"] * dense + ["sparse"] * (layers - dense)


def latent_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of latent attention that are not one key of ``config.json``; {} of other models."""
    if "kv_lora_rank" not in config:
        return {}
    width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return {
        "num_query_groups": config["num_attention_heads"],
        "kv_channels": width,
        "q_lora_rank": config.get("q_lora_rank"),
        "softmax_scale": _softmax_scale(config, width),
    }


def _groups(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Groups that experts are chosen among; a single one is as none.

    DeepSeek takes the groups with the largest sum of two experts, megatron-core with that of as
    many as a group has on average.
    """
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    if groups == chosen:
        return {"moe_router_num_groups": None, "moe_router_group_topk": None}
    if config["num_experts_per_tok"] // chosen != 2:
        raise CheckpointError(
            "megatron-core chooses among groups of experts by others than the best two of each",
            where=where,
            got=f"num_experts_per_tok {config['num_experts_per_tok']}, topk_group {chosen}",
            expected="two experts for each chosen group",
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


def _softmax_scale(config: Mapping[str, Any], width: int) -> float | None:
    """``(0.1 m log s + 1)^2 / sqrt(d)`` where YaRN stretches to ``s`` times the length."""
    rotary = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    if rotary.get("rope_type", rotary.get("type")) != "yarn" or not rotary.get("mscale_all_dim"):
        return None
    stretch = rotary.get("factor") or config["max_position_embeddings"] / (
        config.get(LENGTH) or rotary.get(LENGTH) or config["max_position_embeddings"]
    )
    growth = yarn_growth(float(stretch), rotary["mscale_all_dim"])
    return growth * growth / math.sqrt(width)


def expert_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of ``config.json`` for ``expert_settings``, and for queries of latent attention."""
    shared = settings["moe_shared_expert_intermediate_size"] or 0
    return {
        "q_lora_rank": settings["q_lora_rank"],
        "n_shared_experts": shared // settings["moe_ffn_hidden_size"],
        "n_group": settings["moe_router_num_groups"] or 1,
        "topk_group": settings["moe_router_group_topk"] or 1,
        NEXT: 0,
    }


_LAYER_NUMBER: Final = re.compile(r"model\.layers\.(\d+)\.")


def predicts_more(name: str, layers: int) -> bool:
    """Whether a tensor is of a layer behind the last."""
    found = _LAYER_NUMBER.match(name)
    return name.startswith("mtp.") or (found is not None and int(found[1]) >= layers)
