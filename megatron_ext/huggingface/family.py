"""A family of HuggingFace models, and the tensors that most families have."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_ext.huggingface.tensor_map import Part, Rule, Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture of transformers: its tensors, and the meaning of its ``config.json``."""

    architecture: str
    """Class name in ``architectures`` of ``config.json``."""

    model_type: str

    models: str
    """Published models of the family."""

    rules: tuple[Rule, ...]
    """Tensors, from the embedding to the head, which a model with tied embeddings lacks."""

    entries: tuple[Rule, ...] = ()
    """Rules in the place of those for single experts, of files that have the experts of a layer in
    one tensor."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Keys of ``config.json`` by the setting that they become, beside those of all families."""

    synonyms: Mapping[str, str] = field(default_factory=dict)
    """Keys that are taken from another one: those of published files from the name that later
    releases of transformers write."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings common to all models of the family that differ from Llama's."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers for keys that ``config.json`` may leave out."""

    unread: tuple[str, ...] = ()
    """Keys of other families that are not read here."""

    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values supported by megatron-core, by key, the usual one first; other keys are unchecked."""

    turns_all_layers: bool = True
    """Whether layers without a window have rotary embeddings beside others with one."""

    quantisations: tuple[str, ...] = ("fp8", "fbgemm_fp8", "compressed-tensors")
    """Values of ``quant_method`` whose weights are read."""

    ignored: tuple[str, ...] = ()
    """Suffixes of tensor names that hold no trained weights."""

    @property
    def reads_kinds(self) -> bool:
        """Whether layers with a window and layers without one may follow one another."""
        keys = {"sliding_window_pattern", "max_window_layers", "layer_types"}
        return bool(keys & self.defaults.keys())

    def of_tensors(self, names: Container[str]) -> Family:
        """The family with the rules for files that have tensors of these names."""
        if not self.entries or self.entries[0].parts[0].name.format(layer=0) not in names:
            return self
        entries = {rule.megatron: rule for rule in self.entries}
        return replace(self, rules=tuple(entries.get(rule.megatron, rule) for rule in self.rules))

    @property
    def embedding(self) -> str:
        """Name of the tensor with a row for each token that the model reads."""
        return self.rules[0].parts[0].name

    @property
    def head(self) -> str:
        """Name of the tensor with a row for each token that it writes, where that is not tied."""
        return self.rules[-1].parts[0].name


def only_with(rule: Rule, *sizes: Size) -> Rule:
    """A rule of vectors that a model may be without."""
    parts = zip(rule.parts, sizes, strict=True)
    return replace(rule, parts=tuple(replace(part, shape=(size,)) for part, size in parts))


EMBEDDING = Rule(
    "embedding.word_embeddings.weight",
    (Part("model.embed_tokens.weight", ("vocabulary", "hidden")),),
)
INPUT_NORM = Rule(
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    (Part("model.layers.{layer}.input_layernorm.weight", ("hidden",)),),
)
QKV = Rule(
    "decoder.layers.self_attention.linear_qkv.weight",
    (
        Part("model.layers.{layer}.self_attn.q_proj.weight", ("query", "hidden")),
        Part("model.layers.{layer}.self_attn.k_proj.weight", ("key_value", "hidden")),
        Part("model.layers.{layer}.self_attn.v_proj.weight", ("key_value", "hidden")),
    ),
    order="by_query_group",
)
ATTENTION_OUTPUT = Rule(
    "decoder.layers.self_attention.linear_proj.weight",
    (Part("model.layers.{layer}.self_attn.o_proj.weight", ("hidden", "query")),),
)
MLP_NORM = Rule(
    "decoder.layers.mlp.linear_fc1.layer_norm_weight",
    (Part("model.layers.{layer}.post_attention_layernorm.weight", ("hidden",)),),
)
MLP_INPUT = Rule(
    "decoder.layers.mlp.linear_fc1.weight",
    (
        Part("model.layers.{layer}.mlp.gate_proj.weight", ("ffn", "hidden")),
        Part("model.layers.{layer}.mlp.up_proj.weight", ("ffn", "hidden")),
    ),
)
MLP_OUTPUT = Rule(
    "decoder.layers.mlp.linear_fc2.weight",
    (Part("model.layers.{layer}.mlp.down_proj.weight", ("hidden", "ffn")),),
)
FINAL_NORM = Rule("decoder.final_layernorm.weight", (Part("model.norm.weight", ("hidden",)),))
HEAD = Rule("output_layer.weight", (Part("lm_head.weight", ("vocabulary", "hidden")),))

RULES = (
    EMBEDDING,
    INPUT_NORM,
    QKV,
    ATTENTION_OUTPUT,
    MLP_NORM,
    MLP_INPUT,
    MLP_OUTPUT,
    FINAL_NORM,
    HEAD,
)

QKV_BIAS = Rule(
    "decoder.layers.self_attention.linear_qkv.bias",
    (
        Part("model.layers.{layer}.self_attn.q_proj.bias", ("query",)),
        Part("model.layers.{layer}.self_attn.k_proj.bias", ("key_value",)),
        Part("model.layers.{layer}.self_attn.v_proj.bias", ("key_value",)),
    ),
    order="by_query_group",
)
QUERY_NORM = Rule(
    "decoder.layers.self_attention.q_layernorm.weight",
    (Part("model.layers.{layer}.self_attn.q_norm.weight", ("head",)),),
)
KEY_NORM = Rule(
    "decoder.layers.self_attention.k_layernorm.weight",
    (Part("model.layers.{layer}.self_attn.k_norm.weight", ("head",)),),
)
POST_ATTENTION_NORM = Rule(
    "decoder.layers.self_attention.linear_proj.post_layernorm.weight",
    (Part("model.layers.{layer}.post_attention_layernorm.weight", ("hidden",)),),
)
POST_MLP_NORM = Rule(
    "decoder.layers.mlp.linear_fc2.post_layernorm.weight",
    (Part("model.layers.{layer}.post_feedforward_layernorm.weight", ("hidden",)),),
)
