"""The configuration of a model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal

from megatron_ext.tokenizers.build import padded_vocab_size
from megatron_ext.training.configuration.model_checks import (
    OF_LINEAR,
    check_model,
    is_of_experts,
)
from megatron_ext.training.configuration.number_checks import check_not_negative, check_positive


@dataclass(kw_only=True, frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer (megatron-core ``GPTModel``), dense or a mixture of experts.

    For a model whose weights come from HuggingFace, keys that are left out are taken from its
    ``config.json``.
    """

    hf: str | None = None
    """HuggingFace folder, or name on the hub, whose config.json gives the keys that are left out
    here; that of the model's checkpoint when not given."""

    num_layers: int
    """Transformer layers, over all pipeline stages."""

    hidden_size: int
    """Width of the residual stream."""

    num_attention_heads: int
    """Attention heads."""

    num_query_groups: int | None = None
    """Key-value heads of grouped-query attention; as many as attention heads when not given."""

    kv_channels: int | None = None
    """Width of an attention head; hidden_size / num_attention_heads when not given."""

    kv_lora_rank: int | None = None
    """Width of the narrow product that keys and values are made from in latent attention (MLA,
    DeepSeek); other attention when not given."""

    q_lora_rank: int | None = None
    """Width of the narrow product that queries are made from in latent attention; they are made
    from the hidden states when not given."""

    qk_head_dim: int | None = None
    """Numbers of a query and of a key that are not rotated, in latent attention."""

    qk_pos_emb_head_dim: int | None = None
    """Numbers of a query and of a key that are rotated, in latent attention; those of keys are the
    same in every head."""

    v_head_dim: int | None = None
    """Width of a value in latent attention."""

    linear_attention_freq: int | None = None
    """Interval of layers with full attention among those with linear attention, a gated delta net
    (Qwen3-Next, Qwen3.5); no layer has linear attention when not given."""

    linear_num_key_heads: int | None = None
    """Key heads of linear attention."""

    linear_num_value_heads: int | None = None
    """Value heads of linear attention, a multiple of its key heads."""

    linear_key_head_dim: int | None = None
    """Width of a query and of a key in linear attention."""

    linear_value_head_dim: int | None = None
    """Width of a value in linear attention."""

    linear_conv_kernel_dim: int | None = None
    """Positions of the causal convolution in linear attention."""

    attention_output_gate: bool = False
    """Multiply the output of full attention by a sigmoid of the token (Qwen3-Next)."""

    ffn_hidden_size: int | None = None
    """Inner width of the feed-forward layers; 4 x hidden_size when not given."""

    seq_length: int = 1024
    """Longest sequence in this model's own tokens."""

    position_embedding_type: Literal["rope", "learned_absolute"] = "rope"
    """Encoding of positions."""

    rotary_base: int = 10000
    """Base period of rotary embeddings."""

    rotary_percent: float = 1.0
    """Part of each head, from its first number on, that rotary embeddings turn (Phi-4, Pythia)."""

    unrotated_interval: int | None = None
    """Interval of layers without rotary embeddings (SmolLM3); every layer has them when not
    given."""

    use_rope_scaling: bool = False
    """Scale rotary embeddings as Llama 3.1 and 3.2 do."""

    rope_scaling_factor: float = 8.0
    """Factor of ``use_rope_scaling``: 8 in Llama 3.1, 32 in Llama 3.2."""

    rotary_seq_len_interpolation_factor: float | None = None
    """Divide positions by this (the linear scaling of transformers)."""

    rotary_divisors: tuple[float, ...] | None = None
    """Divisor of the frequency of each pair of numbers that rotary embeddings turn: the short
    factors of LongRoPE (Phi-3.5, Phi-4-mini), or those of YaRN (gpt-oss, Qwen3) and of Llama 3's
    scaling with other factors than Meta's."""

    rotary_magnitude: float = 1.0
    """Factor of the numbers of queries and keys that rotary embeddings turn (LongRoPE, YaRN)."""

    rotary_longest: int | None = None
    """Longest ``seq_length`` that rotary embeddings are of; LongRoPE and dynamic scaling have
    others for longer sequences, and Ministral 3 larger queries, which are not supported."""

    window_size: int | None = None
    """Tokens that a position sees, with itself, in layers with a window; no layer has one when not
    given."""

    full_attention_interval: int | None = None
    """Interval of layers with full attention among those with a window (Gemma 3, gpt-oss); every
    layer has the window when not given."""

    local_rotary_base: int | None = None
    """Base period of rotary embeddings in the layers with a window (Gemma 3,
    OLMo 3), which nothing scales."""

    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """Normalisation of every layer."""

    layernorm_epsilon: float = 1e-5
    """Constant that normalisations add to the variance."""

    layernorm_zero_centered_gamma: bool = False
    """Weights of normalisations are added to one (Gemma)."""

    qk_layernorm: bool = False
    """Normalise queries and keys (Qwen3)."""

    qk_layernorm_over: Literal["head", "heads"] = "head"
    """What ``qk_layernorm`` normalises at a time: one head, or all heads of a position together
    (OLMo-2)."""

    pre_layernorms: bool = True
    """Normalise the inputs of attention and feed-forward layers."""

    post_layernorms: bool = False
    """Normalise the outputs of attention and feed-forward layers (Gemma 3, OLMo-2)."""

    parallel_residual: bool = False
    """Have attention and feed-forward layer read the same input, and add both to it (Pythia)."""

    residual_multiplier: float = 1.0
    """Factor of what attention and feed-forward layers add to the residual stream (Granite)."""

    softmax_scale: float | None = None
    """Factor of attention scores; 1 / sqrt(kv_channels) when not given."""

    attention_cap: float | None = None
    """Cap of attention scores: ``cap tanh(score / cap)`` (Gemma 2); none when not given."""

    attention_sinks: bool = False
    """Give every head a learned number, whose exponential is one more term of the sum that the
    softmax of its scores divides by (gpt-oss)."""

    add_qkv_bias: bool = False
    """Biases of query, key and value (Qwen2)."""

    add_bias_linear: bool = False
    """Biases of every linear layer of attention and feed-forward layers, those included, and of
    routers (Pythia, gpt-oss)."""

    swiglu: bool = True
    """Gated SiLU feed-forward layers; GELU otherwise."""

    gate_activation: Literal["silu", "gelu_tanh", "quick_gelu"] = "silu"
    """Activation of the gate in ``swiglu`` layers: SiLU, GELU in its tanh form (Gemma), or
    x sigmoid(1.702 x) (gpt-oss)."""

    gate_limit: float | None = None
    """Largest input of the gate in ``swiglu`` layers, and largest magnitude of what it is
    multiplied with (gpt-oss); no limit when not given."""

    gated_offset: float = 0.0
    """Added to what the gate is multiplied with in ``swiglu`` layers (gpt-oss)."""

    scale_embeddings: bool = False
    """Multiply embeddings by the square root of hidden_size (Gemma)."""

    embedding_multiplier: float = 1.0
    """Multiply embeddings by this (Granite)."""

    logits_scaling: float = 1.0
    """Divide logits by this (Granite), which is done to the hidden states that the head reads."""

    logit_cap: float | None = None
    """Cap of logits: ``cap tanh(logit / cap)`` (Gemma 2); none when not given."""

    num_experts: int | None = None
    """Experts of every feed-forward layer; dense layers when not given."""

    moe_first_dense_layers: int = 0
    """Layers before those of experts, which are dense (DeepSeek-V3)."""

    moe_router_topk: int = 2
    """Experts that a token goes to."""

    moe_ffn_hidden_size: int | None = None
    """Inner width of an expert; ``ffn_hidden_size`` when not given."""

    moe_shared_expert_intermediate_size: int | None = None
    """Inner width of the shared experts, together, which every token goes to; none when not
    given."""

    moe_shared_expert_gate: bool = False
    """Multiply the shared experts' output by a sigmoid of the token (Qwen2-MoE)."""

    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function of the router's logits that weighs experts. Softmax is over the chosen experts;
    sigmoids of these are divided by their sum."""

    moe_router_pre_softmax: bool = False
    """Softmax over all experts instead, without dividing by the sum of the chosen ones."""

    moe_router_topk_scaling_factor: float | None = None
    """Factor of the chosen experts' weights."""

    moe_router_num_groups: int | None = None
    """Groups of experts, of which a token goes to some (DeepSeek-V3); no groups when not given."""

    moe_router_group_topk: int | None = None
    """Groups that a token goes to: those with the largest sums of scores of as many experts as a
    token has in each, on average."""

    moe_router_expert_bias: bool = False
    """Add a bias to the score of every expert when experts are chosen (DeepSeek-V3), which has no
    gradient; it stays as it is without ``moe_router_bias_update_rate``."""

    moe_router_bias_update_rate: float | None = None
    """Step of loss-free balancing (sigmoid scores only): every expert has a bias, added to its
    score when experts are chosen, which an update raises for experts with fewer tokens than the
    mean and lowers for others, unless routers are frozen; no bias when not given."""

    moe_aux_loss_coeff: float = 0.0
    """Weight of the load-balancing loss, which has no gradient where routers are frozen."""

    moe_z_loss_coeff: float = 0.0
    """Weight of the z-loss, the mean square of the logarithm of the router's normaliser; likewise
    without a gradient."""

    untie_embeddings_and_output_weights: bool = False
    """Give the head weights of its own."""

    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""

    vocab_size: int | None = None
    """Least number of rows of the embedding, for checkpoints with more rows than their tokenizer
    has ids; the number of ids when not given."""

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""

    def __post_init__(self) -> None:
        check_positive(self, *_POSITIVE)
        check_not_negative(self, *_OR_ZERO)
        check_model(self)

    @property
    def head_width(self) -> int:
        """Width of an attention head's query."""
        if self.qk_head_dim is not None and self.qk_pos_emb_head_dim is not None:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def is_latent(self) -> bool:
        """Whether attention is latent."""
        return self.kv_lora_rank is not None

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers have linear attention."""
        return self.linear_attention_freq is not None

    def has_linear_attention(self, layer: int) -> bool:
        """Whether a layer, counted from 1, has linear attention."""
        return self.linear_attention_freq is not None and layer % self.linear_attention_freq > 0

    @property
    def has_expert_bias(self) -> bool:
        """Whether experts have a bias when they are chosen."""
        return self.moe_router_expert_bias or self.moe_router_bias_update_rate is not None

    @property
    def has_window(self) -> bool:
        """Whether some layers do not see whole sequences."""
        return self.window_size is not None and self.window_size < self.seq_length

    @property
    def rotary_width(self) -> int:
        """Numbers of a head that rotary embeddings turn."""
        if self.qk_pos_emb_head_dim is not None:
            return self.qk_pos_emb_head_dim
        return int(self.head_width * self.rotary_percent)

    @property
    def query_groups(self) -> int:
        """Key-value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_width(self) -> int:
        """Inner width of the feed-forward layers."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def has_dense_layers(self) -> bool:
        """Whether there are feed-forward layers that every token passes."""
        shared = self.moe_shared_expert_intermediate_size is not None
        return self.num_experts is None or self.moe_first_dense_layers > 0 or shared

    @property
    def expert_width(self) -> int:
        """Inner width of an expert."""
        return self.moe_ffn_hidden_size or self.ffn_width

    def padded_ids(self, vocab_size: int) -> int:
        """Rows that a vocabulary of ``vocab_size`` ids has before it is padded."""
        return max(vocab_size, self.vocab_size or 0)

    def head_rows(self, vocab_size: int, *, tensor_ranks: int) -> int:
        """Rows of the whole head for a vocabulary of ``vocab_size`` ids, padded."""
        return padded_vocab_size(
            self.padded_ids(vocab_size),
            make_vocab_size_divisible_by=self.make_vocab_size_divisible_by,
            tensor_model_parallel_size=tensor_ranks,
        )


_OR_ZERO: Final = (
    "moe_first_dense_layers",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "init_method_std",
)

_POSITIVE: Final = tuple(
    field.name
    for field in fields(ModelConfig)
    if str(field.type).startswith(("int", "float"))
    and field.name not in (*_OR_ZERO, "gated_offset")
)
"""Every other number of a model, where it is given; an offset has any sign."""

OF_EXPERTS: Final = tuple(field.name for field in fields(ModelConfig) if is_of_experts(field.name))
"""Settings of models with experts."""

OF_HYBRID: Final = ("linear_attention_freq", *OF_LINEAR, "attention_output_gate")
"""Settings of models with linear attention."""
