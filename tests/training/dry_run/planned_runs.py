"""Configurations for the tests of the dry run, small, with everything that changes a count."""

from megatron_ext.tokenizers import TokenizerConfig
from megatron_ext.training.configuration.config import (
    DataConfig,
    DistillConfig,
    LossConfig,
    ModelConfig,
    ParallelConfig,
    TeacherConfig,
    TrainingConfig,
)
from megatron_ext.training.dry_run.plan import Plan
from megatron_ext.training.objective import head_rows, state_layers
from megatron_ext.training.run_plan import RunPlan

BATCH = 2
PADDED_VOCABULARY = 128
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 24}

MODELS = [
    (ModelConfig(**SIZES, ffn_hidden_size=96, num_query_groups=2), "fp32"),
    (ModelConfig(**SIZES, ffn_hidden_size=96, num_query_groups=2), "bf16"),
    (ModelConfig(**SIZES, swiglu=False, untie_embeddings_and_output_weights=True), "fp32"),
    (
        ModelConfig(**SIZES, normalization="LayerNorm", position_embedding_type="learned_absolute"),
        "fp32",
    ),
    (ModelConfig(**SIZES, ffn_hidden_size=96, num_query_groups=2, window_size=5), "fp32"),
]

HYBRID = ModelConfig(
    **SIZES,
    num_query_groups=2,
    kv_channels=16,
    qk_layernorm=True,
    layernorm_zero_centered_gamma=True,
    attention_output_gate=True,
    linear_attention_freq=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    linear_conv_kernel_dim=4,
)
"""One layer of linear attention and one of full attention."""

OF_FAMILIES = {
    "gemma3": ModelConfig(**SIZES, qk_layernorm=True, post_layernorms=True),
    "olmo2": ModelConfig(
        **SIZES,
        num_query_groups=2,
        kv_channels=16,
        qk_layernorm=True,
        qk_layernorm_over="heads",
        pre_layernorms=False,
        post_layernorms=True,
    ),
    "pythia": ModelConfig(
        **SIZES,
        normalization="LayerNorm",
        swiglu=False,
        add_bias_linear=True,
        parallel_residual=True,
        rotary_percent=0.25,
        untie_embeddings_and_output_weights=True,
    ),
    "qwen3.5": HYBRID,
    "biases of gates": ModelConfig(**SIZES, num_query_groups=2, add_bias_linear=True),
}
"""Layers with other norms and biases than the first ones."""

EXPERTS = [
    (
        ModelConfig(
            **SIZES,
            num_experts=8,
            moe_ffn_hidden_size=24,
            moe_shared_expert_intermediate_size=48,
            moe_shared_expert_gate=True,
        ),
        precision,
    )
    for precision in ("fp32", "bf16")
]
EXPERTS.append(
    (
        ModelConfig(
            **SIZES,
            num_query_groups=2,
            num_experts=8,
            moe_ffn_hidden_size=24,
            add_bias_linear=True,
            attention_sinks=True,
            gate_activation="quick_gelu",
            gate_limit=7.0,
            gated_offset=1.0,
        ),
        "fp32",
    )
)


LATENT = ModelConfig(
    **SIZES,
    q_lora_rank=20,
    kv_lora_rank=12,
    qk_head_dim=10,
    qk_pos_emb_head_dim=8,
    v_head_dim=6,
    num_experts=4,
    moe_first_dense_layers=1,
    moe_ffn_hidden_size=24,
    moe_shared_expert_intermediate_size=48,
    moe_router_score_function="sigmoid",
    moe_router_expert_bias=True,
)
"""One dense layer and one with experts."""


def planned_run(
    student=None, *, precision="fp32", global_batch_size=8, packing=False, loss=None, **parallel
):
    """A student and a teacher twice as wide."""
    teacher = ModelConfig(**{**SIZES, "hidden_size": 64, "seq_length": 40})
    return DistillConfig(
        run_dir="run",
        tokenizer=TokenizerConfig(),
        student=student or MODELS[0][0],
        data=DataConfig(train=("text",), packing=packing),
        teacher=TeacherConfig(tokenizer=TokenizerConfig(), model=teacher, checkpoint="teacher"),
        loss=loss or LossConfig(),
        training=TrainingConfig(
            train_iters=1,
            micro_batch_size=BATCH,
            global_batch_size=global_batch_size,
            precision=precision,
        ),
        parallel=ParallelConfig(**parallel),
    )


def plan_of(config, world_size=1, *, has_flash=False):
    """With vocabularies of 64 and 128: heads of 128 rows, of 256 over two ranks."""
    run = RunPlan.of(config)
    return Plan.of(
        run,
        world_size=world_size,
        vocab_size=64,
        teacher_rows={name: head_rows(teacher, 128) for name, teacher in run.teachers.items()},
        state_layers=state_layers(run.teachers),
        has_flash=has_flash,
    )
