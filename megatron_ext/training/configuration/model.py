"""The configuration of a model, and checks of numbers that other sections have too."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal

from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers.build import padded_vocab_size


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
        _check_experts(self)
        _check_latent(self)
        _check_linear(self)
        if self.kv_channels is None and not self.is_latent:
            check_divides(self, "hidden_size", "num_attention_heads")
        if self.local_rotary_base is not None and self.full_attention_interval is None:
            raise ConfigError(
                "local_rotary_base needs full_attention_interval", got=self.local_rotary_base
            )
        if self.layernorm_zero_centered_gamma and self.normalization != "RMSNorm":
            raise ConfigError(
                "layernorm_zero_centered_gamma is of RMSNorm alone", got=self.normalization
            )
        for name, off in (("gate_activation", "silu"), ("gate_limit", None), ("gated_offset", 0.0)):
            if getattr(self, name) != off and not self.swiglu:
                raise ConfigError(f"{name} needs a gate", got="swiglu false")
        _check_rotation(self)
        _check_layer(self)
        if self.num_query_groups is not None:
            check_divides(self, "num_attention_heads", "num_query_groups")

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


def _check_rotation(model: ModelConfig) -> None:
    """Refuse rotary embeddings that cannot be."""
    if model.position_embedding_type != "rope":
        return
    if model.rotary_percent > 1:
        raise ConfigError("rotary_percent is a part of 1", got=model.rotary_percent)
    width = model.rotary_width
    if width % 2 or not width:
        raise ConfigError(
            "rotary embeddings need heads of an even width",
            got=f"{width} of {model.head_width} (kv_channels, or hidden_size / "
            "num_attention_heads) by rotary_percent",
            fix="change one of them, or position_embedding_type",
        )
    if model.rotary_longest is not None and model.seq_length > model.rotary_longest:
        raise ConfigError(
            "longer sequences would need the long factors of LongRoPE, dynamic scaling, or queries "
            "that grow (Ministral 3), which are not supported",
            got=f"seq_length {model.seq_length}, rotary_longest {model.rotary_longest}",
            fix="set seq_length to rotary_longest at most",
        )
    divisors = model.rotary_divisors
    if divisors is not None and len(divisors) != width // 2:
        raise ConfigError(
            "rotary_divisors has not a number for each pair that is turned",
            got=len(divisors),
            expected=width // 2,
        )


def _check_layer(model: ModelConfig) -> None:
    """Refuse parts of a layer that do not go together."""
    if model.attention_cap is not None and model.attention_sinks:
        raise ConfigError("attention_cap does not go with attention_sinks", got="both")
    if model.qk_layernorm_over == "heads" and not (
        model.qk_layernorm
        and model.normalization == "RMSNorm"
        and not model.layernorm_zero_centered_gamma
    ):
        raise ConfigError(
            "qk_layernorm_over heads needs qk_layernorm, of RMSNorm with weights from one",
            got=f"qk_layernorm {model.qk_layernorm}, {model.normalization}",
        )
    if model.post_layernorms and (model.add_bias_linear or model.parallel_residual):
        raise ConfigError(
            "layers with post_layernorms have neither biases nor a parallel residual",
            got="add_bias_linear" if model.add_bias_linear else "parallel_residual",
        )
    if not (model.pre_layernorms or model.post_layernorms):
        raise ConfigError(
            "layers without pre_layernorms need post_layernorms", got="pre_layernorms false"
        )
    if model.parallel_residual and model.residual_multiplier != 1:
        raise ConfigError(
            "residual_multiplier is not of a parallel residual", got=model.residual_multiplier
        )
    if model.scale_embeddings and model.embedding_multiplier != 1:
        raise ConfigError(
            "embeddings have one factor: scale_embeddings, or embedding_multiplier", got="both"
        )


def _check_latent(model: ModelConfig) -> None:
    """Refuse latent attention that is not whole, and what does not go with it."""
    sizes = ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    if not model.is_latent:
        for name in ("q_lora_rank", *sizes):
            if getattr(model, name) is not None:
                raise ConfigError(f"{name} is of latent attention", fix="set kv_lora_rank")
        return
    for name in sizes:
        if getattr(model, name) is None:
            raise ConfigError(f"latent attention needs {name}", got="none")
    for name, off in (
        ("num_query_groups", (None, model.num_attention_heads)),
        ("kv_channels", (None, model.head_width)),
        ("window_size", (None,)),
        ("unrotated_interval", (None,)),
        ("rotary_magnitude", (1.0,)),
        ("rotary_percent", (1.0,)),
        ("position_embedding_type", ("rope",)),
        ("use_rope_scaling", (False,)),
        ("rotary_seq_len_interpolation_factor", (None,)),
        ("local_rotary_base", (None,)),
        ("attention_cap", (None,)),
        ("normalization", ("RMSNorm",)),
        ("layernorm_zero_centered_gamma", (False,)),
        *((name, (False,)) for name in ("qk_layernorm", "attention_sinks", "add_qkv_bias")),
        *((name, (False,)) for name in ("add_bias_linear", "post_layernorms")),
        ("attention_output_gate", (False,)),
        ("pre_layernorms", (True,)),
    ):
        if getattr(model, name) not in off:
            raise ConfigError(f"latent attention does not go with {name}", got=getattr(model, name))


OF_LINEAR: Final = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
"""Sizes of linear attention."""


def _check_linear(model: ModelConfig) -> None:
    """Refuse linear attention that is not whole, and what does not go with it."""
    given = {name: getattr(model, name) for name in OF_LINEAR}
    if not model.is_hybrid:
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{name} is of linear attention", got=value, fix="set linear_attention_freq"
                )
        return
    for name, value in given.items():
        if value is None:
            raise ConfigError(f"linear attention needs {name}", got="none")
    if model.linear_attention_freq == 1:
        raise ConfigError(
            "every layer would have full attention",
            got="linear_attention_freq 1",
            fix="leave it out, or set it to 2 or more",
        )
    check_divides(model, "linear_num_value_heads", "linear_num_key_heads")
    for name, off in (
        ("kv_lora_rank", None),
        ("window_size", None),
        ("unrotated_interval", None),
        ("local_rotary_base", None),
        ("parallel_residual", False),
        ("post_layernorms", False),
        ("add_bias_linear", False),
        ("moe_first_dense_layers", 0),
    ):
        if getattr(model, name) != off:
            raise ConfigError(f"linear attention does not go with {name}", got=getattr(model, name))


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

OF_EXPERTS: Final = (
    "num_experts",
    *(field.name for field in fields(ModelConfig) if field.name.startswith("moe_")),
)
"""Settings of models with experts."""


def _check_experts(model: ModelConfig) -> None:
    """Refuse settings of experts that contradict each other, or are of a dense model."""
    if model.num_experts is None:
        for field in fields(ModelConfig):
            value = getattr(model, field.name)
            if field.name in OF_EXPERTS and value != field.default:
                raise ConfigError(
                    f"{field.name} is of a model with experts",
                    got=f"{value} without num_experts",
                    fix="set num_experts, or leave it out",
                )
        return
    if model.moe_router_topk > model.num_experts:
        raise ConfigError(
            "a token cannot go to more experts than there are",
            got=f"moe_router_topk {model.moe_router_topk} of num_experts {model.num_experts}",
        )
    softmax = model.moe_router_score_function == "softmax"
    if softmax and model.moe_router_topk == 1 and not model.moe_router_pre_softmax:
        raise ConfigError(
            "the softmax over a single chosen expert is 1, so that the router would not learn",
            got="moe_router_topk 1",
            fix="set moe_router_pre_softmax",
        )
    if softmax and model.has_expert_bias:
        raise ConfigError(
            "a bias of experts needs sigmoid scores",
            got="moe_router_score_function softmax",
            fix="set it to sigmoid, or balance by moe_aux_loss_coeff",
        )
    if not softmax and model.moe_router_pre_softmax:
        raise ConfigError("moe_router_pre_softmax needs softmax scores", got="sigmoid")
    _check_groups(model)
    if model.moe_first_dense_layers >= model.num_layers:
        raise ConfigError(
            "a model with experts has a layer of them",
            got=f"moe_first_dense_layers {model.moe_first_dense_layers} of {model.num_layers}",
        )
    if model.moe_shared_expert_gate and model.moe_shared_expert_intermediate_size is None:
        raise ConfigError(
            "moe_shared_expert_gate needs moe_shared_expert_intermediate_size", got="none"
        )
    for name in ("post_layernorms", "parallel_residual"):
        if getattr(model, name):
            raise ConfigError(f"layers with {name} have no experts", got=model.num_experts)
    if model.add_bias_linear and model.moe_shared_expert_intermediate_size is not None:
        raise ConfigError("shared experts have no biases", got="add_bias_linear")


def _check_groups(model: ModelConfig) -> None:
    """Refuse groups of experts that cannot be."""
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is None and chosen is None:
        return
    if groups is None or chosen is None or chosen > groups:
        raise ConfigError(
            "groups of experts need moe_router_num_groups, and as many chosen at most",
            got=f"moe_router_num_groups {groups}, moe_router_group_topk {chosen}",
        )
    check_divides(model, "num_experts", "moe_router_num_groups")
    check_divides(model, "moe_router_topk", "moe_router_group_topk")


def check_positive(config: object, *names: str) -> None:
    """Refuse the first of some fields that is given and not positive."""
    for name in names:
        value = getattr(config, name)
        # Not ``value <= 0``, which NaN passes.
        if value is not None and not value > 0:
            raise ConfigError(f"{name} must be positive", got=value)


def check_not_negative(config: object, *names: str) -> None:
    """Refuse the first of some fields that is negative."""
    for name in names:
        value = getattr(config, name)
        if not value >= 0:
            raise ConfigError(f"{name} must not be negative", got=value)


def check_divides(config: object, whole: str, part: str) -> None:
    """Refuse a field ``whole`` that is no multiple of a field ``part``."""
    if getattr(config, whole) % getattr(config, part):
        raise ConfigError(
            f"{whole} is not a multiple of {part}",
            got=f"{whole} {getattr(config, whole)} and {part} {getattr(config, part)}",
        )
