"""A model's sizes on one rank, and how many parameters a pipeline stage of it has there."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.training.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model under tensor and pipeline parallelism; all ranks of a stage are alike."""

    model: ModelConfig

    padded_vocab_size: int
    """Rows of the whole head."""

    tp: int
    """Tensor-parallel ranks."""

    pp: int
    """Pipeline stages."""

    @property
    def layers(self) -> int:
        """Layers of a stage."""
        return self.model.num_layers // self.pp

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.model.head_width

    @property
    def heads(self) -> int:
        """Attention heads of a rank."""
        return self.model.num_attention_heads // self.tp

    @property
    def query_groups(self) -> int:
        """Key-value heads of a rank."""
        return (self.model.num_query_groups or self.model.num_attention_heads) // self.tp

    @property
    def ffn(self) -> int:
        """Inner width of a rank's feed-forward layers."""
        return (self.model.ffn_hidden_size or 4 * self.model.hidden_size) // self.tp

    @property
    def head_rows(self) -> int:
        """Rows of the head, and of the embedding, on a rank."""
        return self.padded_vocab_size // self.tp

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        return not self.model.untie_embeddings_and_output_weights

    @property
    def layer_products(self) -> int:
        """Weights of a layer that tokens are multiplied by, on a rank."""
        hidden, width = self.model.hidden_size, self.head_width
        attention = hidden * width * (2 * self.heads + 2 * self.query_groups)
        return attention + hidden * self.ffn * (3 if self.model.swiglu else 2)

    @property
    def _attention_extras(self) -> int:
        """Biases and norms that only some families' layers have, on a rank."""
        bias = self.head_width * (self.heads + 2 * self.query_groups)
        norms = 2 * self.head_width * (2 if self.model.normalization == "LayerNorm" else 1)
        extras = bias * self.model.add_qkv_bias + norms * self.model.qk_layernorm
        return extras + 2 * self.model.hidden_size * self.model.post_layernorms

    def is_last(self, stage: int) -> bool:
        """Whether a stage has the head."""
        return stage == self.pp - 1

    def parameters(self, stage: int) -> int:
        """Parameters of a stage on one rank, as megatron-core's ``GPTModel`` has them."""
        norm = self.model.hidden_size * (2 if self.model.normalization == "LayerNorm" else 1)
        total = self.layers * (self.layer_products + 2 * norm + self._attention_extras)
        vocabulary = self.head_rows * self.model.hidden_size
        if stage == 0:
            total += vocabulary
            if self.model.position_embedding_type == "learned_absolute":
                total += self.model.seq_length * self.model.hidden_size
        if self.is_last(stage):
            total += norm
            # A tied head is the embedding itself on one stage, and a copy of it on another.
            if not (self.is_tied and stage == 0):
                total += vocabulary
        return total
