"""Sizes of a run that its memory, traffic and arithmetic follow from: layout, models and pairs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from megatron_ext.distributed.layout import Layout
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import VocabularyLayout
from megatron_ext.projection.layout.vocabulary_layout import LayoutStatistics
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.training.configuration.config import ModelConfig
from megatron_ext.training.configuration.lora import PARTS, LoraConfig
from megatron_ext.training.run_plan import RunPlan


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

    ep: int = 1
    """Ranks that share the experts of a layer."""

    etp: int = 1
    """Ranks that share an expert."""

    chunks: int = 1
    """Chunks of a pipeline rank."""

    @property
    def layers(self) -> int:
        """Layers of a stage."""
        return self.model.num_layers // self.pp

    @property
    def heads(self) -> int:
        """Attention heads of a rank."""
        return self.model.num_attention_heads // self.tp

    @property
    def query_groups(self) -> int:
        """Key-value heads of a rank."""
        return self.model.query_groups // self.tp

    @property
    def ffn(self) -> int:
        """Inner width of a rank's feed-forward layers."""
        return self.model.ffn_width // self.tp

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
        """Weights of a layer in matrix products, on a rank; of one with experts where some are."""
        if self.model.num_experts is None:
            return self.dense_products
        return self.attention_products + self._router + self._shared_expert + self.expert_products

    @property
    def dense_products(self) -> int:
        """``layer_products`` of a layer without experts."""
        return self.attention_products + self.model.hidden_size * self.ffn * self.matrices

    def dense_layers(self, stage: int) -> int:
        """Layers of a stage that are dense where others have experts."""
        each = self.layers // self.chunks
        first = [(chunk * self.pp + stage) * each for chunk in range(self.chunks)]
        return sum(min(max(self.model.moe_first_dense_layers - start, 0), each) for start in first)

    @property
    def attention_products(self) -> int:
        """Weights of full attention in matrix products, on a rank."""
        model, hidden = self.model, self.model.hidden_size
        if not model.is_latent:
            of_heads = (2 + model.attention_output_gate) * self.heads
            return hidden * model.head_width * (of_heads + 2 * self.query_groups)
        narrow, values = model.kv_lora_rank or 0, model.v_head_dim or 0
        keys = hidden * (narrow + model.rotary_width)
        keys += narrow * self.heads * ((model.qk_head_dim or 0) + values)
        queries = hidden * self.heads * model.head_width
        if model.q_lora_rank is not None:
            queries = model.q_lora_rank * (hidden + self.heads * model.head_width)
        return keys + queries + self.heads * values * hidden

    def linear_layers(self, stage: int) -> int:
        """Layers of a stage that have linear attention."""
        each = self.layers // self.chunks
        first = [(chunk * self.pp + stage) * each for chunk in range(self.chunks)]
        return sum(
            self.model.has_linear_attention(start + number)
            for start in first
            for number in range(1, each + 1)
        )

    @property
    def linear_share(self) -> float:
        """Part of all layers that have linear attention."""
        layers = self.model.num_layers
        return sum(map(self.model.has_linear_attention, range(1, layers + 1))) / layers

    @property
    def linear_values(self) -> int:
        """Width of the values of a rank's heads in linear attention."""
        model = self.model
        return (model.linear_num_value_heads or 0) * (model.linear_value_head_dim or 0) // self.tp

    @property
    def linear_width(self) -> int:
        """Width of the first product of linear attention on a rank."""
        model = self.model
        keys = (model.linear_num_key_heads or 0) * (model.linear_key_head_dim or 0) // self.tp
        heads = (model.linear_num_value_heads or 0) // self.tp
        return 2 * (keys + self.linear_values + heads)

    @property
    def linear_products(self) -> int:
        """Weights of linear attention in matrix products, on a rank."""
        return self.model.hidden_size * (self.linear_width + self.linear_values)

    @property
    def _linear_attention(self) -> int:
        """Weights of linear attention on a rank without its norm."""
        heads = (self.model.linear_num_value_heads or 0) // self.tp
        channels = self.linear_width - self.linear_values - 2 * heads
        convolution = channels * (self.model.linear_conv_kernel_dim or 0)
        return self.linear_products + convolution + 2 * heads

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward layer."""
        return 3 if self.model.swiglu else 2

    @property
    def expert_products(self) -> int:
        """Weights of a layer's experts on a rank."""
        experts = (self.model.num_experts or 0) // self.ep
        return experts * self.model.hidden_size * self.expert_ffn * self.matrices

    @property
    def expert_ffn(self) -> int:
        """Inner width of a rank's part of an expert."""
        return self.model.expert_width // self.etp

    @property
    def shared_ffn(self) -> int:
        """Inner width of a rank's shared experts."""
        return (self.model.moe_shared_expert_intermediate_size or 0) // self.tp

    @property
    def _router(self) -> int:
        return (self.model.num_experts or 0) * self.model.hidden_size

    @property
    def _shared_expert(self) -> int:
        gate = self.model.hidden_size * self.model.moe_shared_expert_gate
        return self.model.hidden_size * self.shared_ffn * self.matrices + gate

    @property
    def token_products(self) -> int:
        """Weights of a layer, over all ranks, that a token is multiplied with."""
        if self.model.num_experts is None:
            return self.tp * self.layer_products
        dense = self.tp * (self.layer_products - self.expert_products)
        expert = self.model.hidden_size * self.model.expert_width * self.matrices
        return dense + self.model.moe_router_topk * expert

    @property
    def _biases(self) -> int:
        """Biases that only some families' layers have, on a rank."""
        model = self.model
        product = model.head_width * (self.heads + 2 * self.query_groups)
        if not model.add_bias_linear:
            return product * model.add_qkv_bias
        # Every rank has those of whole outputs.
        if model.num_experts is not None:
            return product + model.hidden_size + model.num_experts + self.expert_biases
        return product + model.hidden_size + self.ffn * self.opened + model.hidden_size

    @property
    def opened(self) -> int:
        """Halves of what the first matrix of a feed-forward layer gives."""
        return 2 if self.model.swiglu else 1

    @property
    def expert_biases(self) -> int:
        """Biases of a layer's experts on a rank."""
        experts = (self.model.num_experts or 0) // self.ep * self.model.add_bias_linear
        return experts * (self.expert_ffn * self.opened + self.model.hidden_size)

    @property
    def _other_norms(self) -> int:
        """Norms that only some families' layers have, on a rank."""
        model = self.model
        behind = 2 * model.hidden_size * model.post_layernorms
        if model.is_latent:
            return (model.kv_lora_rank or 0) + (model.q_lora_rank or 0)
        if not model.qk_layernorm:
            return behind
        heads = 2 * (2 if model.normalization == "LayerNorm" else 1)
        if model.qk_layernorm_over == "heads":
            heads = model.num_attention_heads + model.query_groups
        return heads * model.head_width + behind

    def is_last(self, stage: int) -> bool:
        """Whether a stage has the head."""
        return stage == self.pp - 1

    def parameters(self, stage: int) -> int:
        """Parameters of a stage on one rank, as megatron-core's ``GPTModel`` has them."""
        return self.learning(stage, frozenset(PARTS))

    def learning(self, stage: int, parts: Collection[str]) -> int:
        """Parameters of a stage on one rank that belong to ``parts`` (``training.trainable``)."""
        norm = self.model.hidden_size * (2 if self.model.normalization == "LayerNorm" else 1)
        norms = self.layers * (2 * norm * self.model.pre_layernorms + self._other_norms)
        linear = self.linear_layers(stage)
        norms += linear * ((self.model.linear_value_head_dim or 0) - self._other_norms)
        sinks = self.heads * self.model.attention_sinks
        layers = self.layers * (self.layer_products + self._biases + sinks) + norms
        layers += linear * (self._linear_attention - self.attention_products)
        layers -= self.dense_layers(stage) * (self.layer_products - self.dense_products)
        vocabulary = self.head_rows * self.model.hidden_size
        total = layers
        if "layers" not in parts:
            experts = (self.expert_products + self.expert_biases) * ("experts" in parts)
            routers = self._router + (self.model.num_experts or 0) * self.model.add_bias_linear
            of_experts = self.layers - self.dense_layers(stage)
            total = norms * ("norms" in parts)
            total += of_experts * (experts + routers * ("routers" in parts))
        if stage == 0 and "embeddings" in parts:
            total += vocabulary
            if self.model.position_embedding_type == "learned_absolute":
                total += self.model.seq_length * self.model.hidden_size
        if self.is_last(stage):
            total += norm if "norms" in parts else 0
            # A tied head is the embedding itself on one stage, and a copy of it on another.
            if "head" in parts and not (self.is_tied and stage == 0):
                total += vocabulary
        return total

    def adapters(self, stage: int, lora: LoraConfig) -> int:
        """Parameters of a stage's adapters on one rank."""
        hidden, width = self.model.hidden_size, self.model.head_width
        of_heads = (1 + self.model.attention_output_gate) * self.heads
        attention = {
            "linear_qkv": hidden + width * (of_heads + 2 * self.query_groups),
            "linear_proj": width * self.heads + hidden,
        }
        of_linear = {
            "linear_qkv": hidden + self.linear_width,
            "linear_proj": self.linear_values + hidden,
        }
        linear = self.linear_layers(stage)
        total = sum(
            count * sizes.get(name, 0)
            for count, sizes in ((self.layers - linear, attention), (linear, of_linear))
            for name in lora.targets
        )
        dense = self.layers if self.model.num_experts is None else self.dense_layers(stage)
        total += dense * self._fed(lora, self.ffn, "linear_fc")
        if self.shared_ffn:
            total += (self.layers - dense) * self._fed(lora, self.shared_ffn, "linear_fc")
        return lora.rank * total + (self.layers - dense) * self.expert_adapters(lora)

    def expert_adapters(self, lora: LoraConfig) -> int:
        """Parameters of the adapters of a layer's experts on one rank."""
        experts = (self.model.num_experts or 0) // self.ep
        return experts * lora.rank * self._fed(lora, self.expert_ffn, "experts.linear_fc")

    def _fed(self, lora: LoraConfig, inner: int, name: str) -> int:
        """Inputs and outputs of a feed-forward layer's matrices with adapters."""
        hidden = self.model.hidden_size
        sides = {f"{name}1": hidden + inner * self.opened, f"{name}2": inner + hidden}
        return sum(sides.get(target, 0) for target in lora.targets)


FP32: Final = 4
ELEMENT_BYTES: Final = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCost:
    """Sizes of a pair's projection over the ranks of the heads; 0 without a projection."""

    entries: int = 0
    """Most entries of the projection on a rank."""

    crossing_columns: int = 0
    """Teacher tokens with an entry on another tensor-parallel rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run on a number of processes."""

    run: RunPlan
    world_size: int
    dp: int
    student: ModelShape

    teachers: Mapping[str, ModelShape]
    """By name; empty for an objective without teachers."""

    pairs: Mapping[str, PairCost] = field(default_factory=dict)
    """By teacher with a projection."""

    forms: Mapping[str, TargetForm] = field(default_factory=dict)
    """Forms of targets by name, of teachers that are remote or cached."""

    state_layers: Mapping[str, int] = field(default_factory=dict)
    """The result of ``objective.state_layers``."""

    has_flash: bool = False
    """Whether layers are Transformer Engine's, which keep no attention scores."""

    @classmethod
    def of(
        cls,
        run: RunPlan,
        *,
        world_size: int,
        vocab_size: int,
        teacher_rows: Mapping[str, int],
        forms: Mapping[str, TargetForm] | None = None,
        state_layers: Mapping[str, int] | None = None,
        has_flash: bool = False,
    ) -> Plan:
        """The plan of a checked configuration.

        Args:
            vocab_size: Number of the student's ids.
            teacher_rows: Rows of each teacher's head by name, from ``objective.head_rows``.
            state_layers: From ``objective.state_layers``; None: every teacher has a model of its
                own, of which the last states are targets.

        Raises:
            ConfigError: The processes do not divide into replicas.
        """
        layout = run.parallel.layout
        rows = run.student.head_rows(vocab_size, tensor_ranks=layout.tensor_model_parallel_size)
        return cls(
            run=run,
            world_size=world_size,
            dp=layout.replicas(world_size),
            student=_shape(run.student, rows, layout),
            teachers={
                name: _shape(teacher.config.model, teacher_rows[name], layout)
                for name, teacher in run.teachers.items()
            },
            forms=forms or {},
            state_layers=dict.fromkeys(run.teachers, 1) if state_layers is None else state_layers,
            has_flash=has_flash,
        )

    @property
    def learning_parts(self) -> Collection[str]:
        """Parts of the student's own weights that learn, by the names of ``training.trainable``."""
        trainable = self.run.training.trainable
        if trainable is None:
            return () if self.run.lora else PARTS
        return trainable

    def learning(self, stage: int) -> int:
        """Parameters of the student's stage on one rank that learn."""
        adapters = self.student.adapters(stage, self.run.lora) if self.run.lora else 0
        return adapters + self.student.learning(stage, self.learning_parts)

    def expert_learning(self, stage: int) -> int:
        """Those of ``learning`` that are of experts."""
        student, lora = self.student, self.run.lora
        layers = student.layers - student.dense_layers(stage)
        learn = not {"layers", "experts"}.isdisjoint(self.learning_parts)
        own = (student.expert_products + student.expert_biases) * learn
        return layers * (own + (student.expert_adapters(lora) if lora else 0))

    @property
    def expert_ranks(self) -> int:
        """Ranks that gradients of experts are summed over."""
        student = self.student
        return self.world_size // (student.pp * student.ep * student.etp)

    def student_parameters(self, stage: int) -> int:
        """Parameters of the student's stage on one rank, adapters included."""
        lora = self.run.lora
        return self.student.parameters(stage) + (self.student.adapters(stage, lora) if lora else 0)

    @property
    def models(self) -> list[str]:
        """Names of the teachers but those whose model an earlier one has loaded."""
        return [name for name in self.teachers if name in self.state_layers]

    @property
    def local_teachers(self) -> list[ModelShape]:
        """Models of teachers that are on the student's ranks."""
        return [self.teachers[name] for name in self.models if name not in self.forms]

    @property
    def cp(self) -> int:
        """Context-parallel ranks, each with a part of every row."""
        return self.run.parallel.context_parallel_size

    @property
    def gradient_ranks(self) -> int:
        """Ranks that gradients are summed over: replicas, and context-parallel ranks of each."""
        return self.dp * self.cp

    @property
    def element(self) -> int:
        """Bytes of a weight and of an activation."""
        return ELEMENT_BYTES[self.run.training.precision]

    @property
    def batch(self) -> int:
        """Rows of a microbatch."""
        return self.run.training.micro_batch_size

    @property
    def microbatches(self) -> int:
        """Microbatches of a replica in a step."""
        return self.run.training.global_batch_size // (self.batch * self.dp)

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.student.pp

    @property
    def chunks(self) -> int:
        """Model chunks of a pipeline rank."""
        return self.run.parallel.virtual_pipeline_model_parallel_size

    @property
    def recomputed_share(self) -> float:
        """Share of the student's layers that run forward twice."""
        training = self.run.training
        if training.recompute_granularity != "full":
            return 0.0
        if training.recompute_method == "uniform":
            return 1.0
        layers = self.student.layers // self.chunks
        return min(1.0, (training.recompute_num_layers or 0) / layers)

    def hidden_bytes(self, shape: ModelShape) -> int:
        """Bytes of a microbatch's hidden states between two layers, on a rank."""
        ranks = shape.tp if self.run.parallel.sequence_parallel else 1
        return self.tokens(shape) * shape.model.hidden_size * self.element // ranks

    def tokens(self, shape: ModelShape) -> int:
        """Tokens of a microbatch as a model reads it on a rank; rows are taken to be full."""
        return self.batch * self.row_length(shape) // self.cp

    def row_length(self, shape: ModelShape) -> int:
        """Positions of a row, over all context-parallel ranks."""
        multiple = self.run.parallel.layout.sequence_multiple
        return -(-shape.model.seq_length // multiple) * multiple


def _shape(model: ModelConfig, rows: int, layout: Layout) -> ModelShape:
    return ModelShape(
        model=model,
        padded_vocab_size=rows,
        tp=layout.tensor_model_parallel_size,
        pp=layout.pipeline_model_parallel_size,
        ep=1 if model.num_experts is None else layout.expert_model_parallel_size,
        etp=layout.expert_tensor_ranks,
        chunks=layout.virtual_pipeline_model_parallel_size,
    )


def pair_cost(
    projection: SparseProjection, student: ModelShape, teacher: ModelShape, *, is_laid_out: bool
) -> PairCost:
    """The cost of a pair over the ranks of its heads.

    Args:
        is_laid_out: Whether the heads are in a layout's order (``training.vocabulary_layout``).
    """
    ranks = student.tp
    if is_laid_out:
        layout = VocabularyLayout.of(
            projection,
            rank_count=ranks,
            student_size=student.padded_vocab_size,
            teacher_size=teacher.padded_vocab_size,
        )
        statistics = LayoutStatistics.of(projection, layout)
        owner = layout.student.rank_of(projection.entry_rows)
        crossing = statistics.crossing_columns
    else:
        owner = projection.entry_rows // student.head_rows
        crosses = owner != projection.indices // teacher.head_rows
        crossing = len(np.unique(projection.indices[crosses]))
    return PairCost(
        entries=int(np.bincount(owner, minlength=ranks).max()), crossing_columns=crossing
    )
