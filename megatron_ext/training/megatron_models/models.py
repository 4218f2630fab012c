"""megatron-core models for student and teacher.

Both are ``GPTModel`` on the same tensor- and pipeline-parallel groups; width, depth, vocabulary and
sequence length may differ. A rank has one chunk of a model, or several under an interleaved
pipeline: chunk ``v`` of pipeline rank ``p`` is stage ``v * P + p`` of ``P * V``. So the first chunk
of the first rank embeds tokens, and the last chunk of the last rank has the head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.nn import functional

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.teachers.megatron_teacher import LOGIT_CAP, unwrapped
from megatron_ext.training.configuration.config import ModelConfig, ParallelConfig, TrainingConfig
from megatron_ext.training.configuration.model import OF_HYBRID
from megatron_ext.training.megatron_models.experts import sum_over_replicas
from megatron_ext.training.megatron_models.layer_specs import has_own_layers, has_te, layer_spec
from megatron_ext.training.megatron_models.layers import (
    cap_logits,
    divide_frequencies,
    magnify,
    quick_gelu,
    scale_embeddings,
    scale_logits,
)

ModelChunks = Sequence[GPTModel]
"""Chunks of a model on this rank, in the order in which a microbatch passes them."""


def has_head(model: Any) -> bool:
    """Whether a chunk, wrapped or not, ends in the output layer."""
    return bool(unwrapped(model).post_process)


def sharded_weights(chunks: ModelChunks) -> dict[str, Any]:
    """Weights of a model for ``dist_checkpointing``, by megatron-core's names of chunks.

    Files contain layers, not chunks: weights saved in one layout load in any other.
    """
    return {
        name: chunk.sharded_state_dict()
        for name, chunk in zip(chunk_names(chunks), chunks, strict=True)
    }


def load_weights_of(chunks: ModelChunks, state: Mapping[str, Any]) -> None:
    """Load the result of ``dist_checkpointing`` for ``sharded_weights`` into the model."""
    for name, chunk in zip(chunk_names(chunks), chunks, strict=True):
        chunk.load_state_dict(state[name])


def chunk_names(chunks: ModelChunks) -> list[str]:
    """``model``; with several chunks ``model0``, ``model1`` and so on."""
    if len(chunks) == 1:
        return ["model"]
    return [f"model{index}" for index in range(len(chunks))]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ACTIVATIONS = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
}


def build_gpt_model(
    model: ModelConfig,
    *,
    padded_vocab_size: int,
    parallel: ParallelConfig,
    training: TrainingConfig,
    groups: ProcessGroups,
    vp_stage: int = 0,
    is_loaded: bool = False,
    has_adapters: bool = False,
) -> GPTModel:
    """One chunk of this rank's part of a model, on its device, in the run's precision.

    Args:
        is_loaded: Whether a checkpoint replaces all weights, which are not drawn but zeros then.
        has_adapters: Whether its layers are to have adapters, which Transformer Engine's have no
            place for.
    """
    stages, chunks = (
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
    )
    # Stages draw different numbers; tensor-parallel ranks of a stage must draw the same.
    stage_seed = training.seed + 100 * (vp_stage * stages + groups.pp_rank)
    torch.manual_seed(stage_seed)
    model_parallel_cuda_manual_seed(stage_seed)
    gpt = GPTModel(
        config=transformer_config(model, parallel=parallel, training=training, is_loaded=is_loaded),
        transformer_layer_spec=layer_spec(
            model, parallel, stage=vp_stage * stages + groups.pp_rank, has_adapters=has_adapters
        ),
        vocab_size=padded_vocab_size,
        max_sequence_length=model.seq_length,
        pre_process=groups.is_first_stage and vp_stage == 0,
        post_process=groups.is_last_stage and vp_stage == chunks - 1,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        vp_stage=vp_stage if chunks > 1 else None,
    )
    if parallel.layout.expert_tensor_ranks != parallel.tensor_model_parallel_size:
        sum_over_replicas(gpt)
    if gpt.pre_process:
        _scale_embeddings(gpt, model, DTYPES[training.precision])
    if model.rotary_divisors is not None and not model.is_latent:
        divide_frequencies(gpt.rotary_pos_emb, model.rotary_base, model.rotary_divisors)
    _magnify(gpt, model)
    if model.logits_scaling != 1 and gpt.post_process:
        scale_logits(gpt.decoder.final_layernorm, model.logits_scaling)
    if model.logit_cap is not None and gpt.post_process:
        cap_logits(gpt.output_layer, model.logit_cap)
        # For logits that are made of hidden states and the head's weights elsewhere.
        setattr(gpt, LOGIT_CAP, model.logit_cap)
    return gpt.to(device=groups.device, dtype=DTYPES[training.precision])


def _scale_embeddings(gpt: GPTModel, model: ModelConfig, dtype: torch.dtype) -> None:
    factor = model.embedding_multiplier
    if model.scale_embeddings:
        # Rounded to the dtype of the embeddings, as in the training of Gemma.
        factor = torch.tensor(model.hidden_size**0.5, dtype=dtype, device="cpu").item()
    if factor != 1:
        scale_embeddings(gpt.embedding, factor)


def build_model_chunks(
    model: ModelConfig,
    *,
    padded_vocab_size: int,
    parallel: ParallelConfig,
    training: TrainingConfig,
    groups: ProcessGroups,
    is_loaded: bool = False,
    has_adapters: bool = False,
) -> list[GPTModel]:
    """This rank's part of a model: a chunk, or one for each virtual stage of the pipeline.

    Args:
        is_loaded: See ``build_gpt_model``.
        has_adapters: Likewise.
    """
    return [
        build_gpt_model(
            model,
            padded_vocab_size=padded_vocab_size,
            parallel=parallel,
            training=training,
            groups=groups,
            vp_stage=vp_stage,
            is_loaded=is_loaded,
            has_adapters=has_adapters,
        )
        for vp_stage in range(parallel.virtual_pipeline_model_parallel_size)
    ]


def transformer_config(
    model: ModelConfig,
    *,
    parallel: ParallelConfig,
    training: TrainingConfig,
    is_loaded: bool = False,
) -> TransformerConfig:
    """megatron-core's configuration of one model.

    ``calculate_per_token_loss`` makes the schedules sum microbatches without dividing: our losses
    arrive divided by their global counts.
    """
    is_interleaved = parallel.virtual_pipeline_model_parallel_size > 1
    kind = MLATransformerConfig if model.is_latent else TransformerConfig
    config: TransformerConfig = kind(
        **_latent_settings(model),
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization=model.normalization,
        layernorm_epsilon=model.layernorm_epsilon,
        layernorm_zero_centered_gamma=model.layernorm_zero_centered_gamma,
        # Rotary embeddings' magnitude is in the place of these norms, which 0.19 has no others in.
        qk_layernorm=model.qk_layernorm or model.rotary_magnitude != 1,
        # Tokens before a position, and after it.
        window_size=((model.window_size or 1) - 1, 0) if model.has_window else None,
        window_attn_skip_freq=model.full_attention_interval if model.has_window else None,
        no_rope_freq=_without_rotation(model),
        # With linear attention keys of checkpoints have the numbers of layers.
        **{name: getattr(model, name) for name in OF_HYBRID},
        softmax_scale=model.softmax_scale,
        gated_linear_unit=model.swiglu,
        activation_func=_ACTIVATIONS[model.gate_activation] if model.swiglu else functional.gelu,
        glu_linear_offset=model.gated_offset,
        activation_func_clamp_value=model.gate_limit,
        softmax_type="learnable" if model.attention_sinks else "vanilla",
        add_bias_linear=model.add_bias_linear and not _shares_biases(model, parallel),
        add_qkv_bias=model.add_qkv_bias,
        init_method_std=model.init_method_std,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=(
            parallel.virtual_pipeline_model_parallel_size if is_interleaved else None
        ),
        context_parallel_size=parallel.context_parallel_size,
        # One batch of both directions would have two messages between the same two ranks, of which
        # megatron-core takes one for the other where a pipeline has two stages.
        overlap_p2p_comm=is_interleaved,
        batch_p2p_comm=not is_interleaved,
        # Stages announce the length of each message, which is that of its microbatch.
        variable_seq_lengths=(
            training.variable_seq_lengths and parallel.pipeline_model_parallel_size > 1
        ),
        **_expert_settings(model, parallel),
        sequence_parallel=parallel.sequence_parallel,
        recompute_granularity=training.recompute_granularity,
        recompute_method=training.recompute_method,
        recompute_num_layers=training.recompute_num_layers,
        pipeline_dtype=DTYPES[training.precision],
        params_dtype=DTYPES[training.precision],
        bf16=training.precision == "bf16",
        calculate_per_token_loss=True,
        # Weights are drawn whole and then cut: tensor parallelism does not change them.
        use_cpu_initialization=True,
        # Not perform_initialization, without which megatron-core marks no weight as sharded.
        init_method=torch.nn.init.zeros_ if is_loaded else None,
        output_layer_init_method=torch.nn.init.zeros_ if is_loaded else None,
        gradient_accumulation_fusion=False,
        # Fusions that need Apex or a compiler on the machine stay off: no result depends on them.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )
    # What megatron-core would refuse, and ``ExpertRowLinear`` can.
    config.add_bias_linear = model.add_bias_linear
    return config


def _latent_settings(model: ModelConfig) -> dict[str, Any]:
    """Settings of ``MLATransformerConfig`` beside those of ``TransformerConfig``; {} without latent
    attention."""
    if not model.is_latent:
        return {}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_head_dim": model.qk_head_dim,
        "qk_pos_emb_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
        # Stretched ones are made of these, see ``LatentAttention``.
        "rope_type": "rope",
        "rotary_base": model.rotary_base,
        "rotary_scaling_factor": 1.0,
    }


def _shares_biases(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Whether several ranks share experts with biases."""
    return model.num_experts is not None and parallel.layout.expert_tensor_ranks > 1


def _without_rotation(model: ModelConfig) -> list[int] | None:
    """1 for each layer without rotary embeddings, 0 for others; None where all have them."""
    interval = model.unrotated_interval
    if interval is None:
        return None
    return [int(number % interval == 0) for number in range(1, model.num_layers + 1)]


def _expert_settings(model: ModelConfig, parallel: ParallelConfig) -> dict[str, Any]:
    """Settings of ``TransformerConfig`` for experts.

    The dispatcher is the one that works over gloo and NCCL alike, and with rows of variable length,
    for which megatron-core asks for it in dense models, too.
    """
    settings: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
    if model.num_experts is None:
        return settings
    return settings | {
        "num_moe_experts": model.num_experts,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.layout.expert_tensor_ranks,
        "moe_ffn_hidden_size": model.expert_width,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate": model.moe_shared_expert_gate,
        "moe_router_topk": model.moe_router_topk,
        "moe_router_score_function": model.moe_router_score_function,
        "moe_router_pre_softmax": model.moe_router_pre_softmax,
        "moe_router_topk_scaling_factor": model.moe_router_topk_scaling_factor,
        "moe_router_num_groups": model.moe_router_num_groups,
        "moe_router_group_topk": model.moe_router_group_topk,
        **_kinds_of_layers(model),
        # Of these losses ``experts.Router`` has forms of its own.
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_z_loss_coeff": model.moe_z_loss_coeff,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": has_te() and not has_own_layers(model),
    }


def _kinds_of_layers(model: ModelConfig) -> dict[str, list[int]]:
    """0 for each dense layer, 1 for each of experts; {} where all are of experts."""
    dense = model.moe_first_dense_layers
    if not dense:
        return {}
    return {"moe_layer_freq": [0] * dense + [1] * (model.num_layers - dense)}


def wrap_in_ddp(chunks: ModelChunks, *, parallel: ParallelConfig) -> list[DistributedDataParallel]:
    """The student in megatron-core's DDP, with fp32 gradient buffers summed over replicas."""
    return [
        DistributedDataParallel(
            config=chunk.config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=parallel.use_distributed_optimizer,
                overlap_grad_reduce=parallel.overlap_grad_reduce,
                overlap_param_gather=parallel.overlap_param_gather,
            ),
            module=chunk,
            # Later chunks are reduced whole, overlapping with the computation of earlier ones.
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]


def freeze(chunks: ModelChunks) -> list[GPTModel]:
    """The model in evaluation mode without gradients."""
    return [chunk.requires_grad_(False).eval() for chunk in chunks]


def _magnify(gpt: GPTModel, model: ModelConfig) -> None:
    """Give queries and keys the magnitude of LongRoPE or YaRN, behind their norms, in the layers
    that these turn."""
    if model.rotary_magnitude == 1:
        return
    unrotated, full = model.unrotated_interval, model.full_attention_interval
    for layer in gpt.decoder.layers:
        is_turned = unrotated is None or layer.layer_number % unrotated
        is_turned = is_turned and not model.has_linear_attention(layer.layer_number)
        is_local = model.local_rotary_base is not None and full and layer.layer_number % full
        if is_turned and not is_local:
            attention = layer.self_attention
            for norm in (attention.q_layernorm, attention.k_layernorm):
                magnify(norm, model.rotary_width, model.rotary_magnitude)
