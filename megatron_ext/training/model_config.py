"""The configuration of a model, and checks of numbers that other sections have too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers.build import padded_vocab_size


@dataclass(kw_only=True, frozen=True, slots=True)
class ModelConfig:
    """A dense decoder-only transformer (megatron-core ``GPTModel``).

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

    ffn_hidden_size: int | None = None
    """Inner width of the feed-forward layers; 4 x hidden_size when not given."""

    seq_length: int = 1024
    """Longest sequence in this model's own tokens."""

    position_embedding_type: Literal["rope", "learned_absolute"] = "rope"
    """Encoding of positions."""

    rotary_base: int = 10000
    """Base period of rotary embeddings."""

    use_rope_scaling: bool = False
    """Scale rotary embeddings as Llama 3.1 and 3.2 do."""

    rope_scaling_factor: float = 8.0
    """Factor of that scaling: 8 in Llama 3.1, 32 in Llama 3.2."""

    rotary_seq_len_interpolation_factor: float | None = None
    """Divide positions by this (the linear scaling of transformers)."""

    local_rotary_base: int | None = None
    """Base period of rotary embeddings in the layers with a window (Gemma 3)."""

    full_attention_interval: int | None = None
    """Interval of layers with full attention; the others have a window and
    ``local_rotary_base``."""

    window_size: int | None = None
    """Tokens of the window, in layers without full attention. megatron-core cannot combine such
    layers with masks, so ``seq_length`` must not be longer: up to that length all attend to all."""

    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """Normalisation of every layer."""

    layernorm_epsilon: float = 1e-5
    """Constant that normalisations add to the variance."""

    layernorm_zero_centered_gamma: bool = False
    """Weights of normalisations are added to one (Gemma)."""

    qk_layernorm: bool = False
    """Normalise each head's query and key (Qwen3)."""

    post_layernorms: bool = False
    """Normalise the outputs of attention and feed-forward layers too (Gemma 3)."""

    softmax_scale: float | None = None
    """Factor of attention scores; 1 / sqrt(kv_channels) when not given."""

    add_qkv_bias: bool = False
    """Biases of query, key and value (Qwen2)."""

    swiglu: bool = True
    """Gated SiLU feed-forward layers; GELU otherwise."""

    gate_activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of the gate in ``swiglu`` layers: SiLU, or GELU in its tanh form (Gemma)."""

    scale_embeddings: bool = False
    """Multiply embeddings by the square root of hidden_size (Gemma)."""

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
        check_positive(
            self,
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "ffn_hidden_size",
            "seq_length",
            "rotary_base",
            "rope_scaling_factor",
            "rotary_seq_len_interpolation_factor",
            "local_rotary_base",
            "full_attention_interval",
            "window_size",
            "softmax_scale",
            "layernorm_epsilon",
            "vocab_size",
            "make_vocab_size_divisible_by",
        )
        check_not_negative(self, "init_method_std")
        if self.kv_channels is None:
            check_divides(self, "hidden_size", "num_attention_heads")
        if self.window_size is not None and self.seq_length > self.window_size:
            raise ConfigError(
                "some layers of this model do not see whole sequences of seq_length",
                got=f"seq_length {self.seq_length}, window_size {self.window_size}",
                fix="set seq_length to window_size at most",
            )
        if (self.local_rotary_base is None) != (self.full_attention_interval is None):
            raise ConfigError(
                "layers with a window need both of local_rotary_base and full_attention_interval",
                got=f"{self.local_rotary_base} and {self.full_attention_interval}",
            )
        if self.layernorm_zero_centered_gamma and self.normalization != "RMSNorm":
            raise ConfigError(
                "layernorm_zero_centered_gamma is of RMSNorm alone", got=self.normalization
            )
        if self.gate_activation != "silu" and not self.swiglu:
            raise ConfigError("gate_activation needs a gate", got="swiglu false")
        head_width = self.head_width
        if self.position_embedding_type == "rope" and head_width % 2:
            raise ConfigError(
                "rotary embeddings need heads of an even width",
                got=f"{head_width} (kv_channels, or hidden_size / num_attention_heads)",
                fix="change one of them, or position_embedding_type",
            )
        if self.num_query_groups is not None:
            check_divides(self, "num_attention_heads", "num_query_groups")

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key-value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_width(self) -> int:
        """Inner width of the feed-forward layers."""
        return self.ffn_hidden_size or 4 * self.hidden_size

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
