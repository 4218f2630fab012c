"""The configuration of a distillation run, as frozen dataclasses.

Names are megatron-core's wherever it has one. The YAML file nests as the dataclasses do; every leaf
also has a flag (``training.arguments``). The string under a field is its help text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from megatron_ext.constants import MAX_RECORD_MIB
from megatron_ext.distributed.layout import Layout
from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers.config import TokenizerConfig
from megatron_ext.training.exclusions import check_exclusions
from megatron_ext.training.teacher_config import (
    STUDENT_RANKS,
    EvaluationConfig,
    Placement,
    ServingConfig,
    check_placement,
)

TEACHER: Final = "teacher"
"""Name of the one teacher of a ``teacher`` section."""


@dataclass(kw_only=True, frozen=True, slots=True)
class ModelConfig:
    """A dense decoder-only transformer (megatron-core ``GPTModel``).

    For a model whose weights come from HuggingFace, keys that are left out are taken from its
    ``config.json``.
    """

    hf: str | None = None
    """HuggingFace folder whose config.json gives the keys that are left out here; that of the
    model's checkpoint when not given."""

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
        _check_positive(
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
        _check_not_negative(self, "init_method_std")
        if self.kv_channels is None:
            _check_divides(self, "hidden_size", "num_attention_heads")
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
            _check_divides(self, "num_attention_heads", "num_query_groups")

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    def padded_ids(self, vocab_size: int) -> int:
        """Rows that a vocabulary of ``vocab_size`` ids has before it is padded."""
        return max(vocab_size, self.vocab_size or 0)


@dataclass(kw_only=True, frozen=True, slots=True)
class TeacherConfig:
    """The frozen model to learn from."""

    tokenizer: TokenizerConfig = field(metadata={"prefix": "tokenizer-"})

    model: ModelConfig = field(metadata={"prefix": ""})

    checkpoint: str
    """Checkpoint of the teacher: a run's folder, its ``checkpoints``, one iteration in them, or a
    HuggingFace folder."""

    allow_other_tokenizer: bool = False
    """Accept a checkpoint that was trained with another tokenizer, or has too few rows for this
    one; an error otherwise."""

    objective: str | None = None
    """Objective for this teacher; ``loss.objective`` when not given."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of this teacher's objective, added to ``loss.options``, or in their place where the
    teacher has an objective of its own."""

    temperature: float | None = None
    """Temperature for this teacher; ``loss.temperature`` when not given."""

    weight: float = 1.0
    """Weight of this teacher's mean among the teachers'."""

    projection: str | None = None
    """Projection file for this teacher; built once into ``run_dir`` when not given."""

    cache: str | None = None
    """Folder that ``megatron-ext cache-teacher`` made of this teacher: its targets are read from
    there and its model is not built."""

    library: Literal["megatron", "huggingface"] = "megatron"
    """Library that runs the model: megatron-core, in the layout of its ranks, or transformers,
    whole on each device, for any causal language model of a HuggingFace folder."""

    offload: bool = False
    """Keep the weights in the host's memory between one global batch and the next."""

    placement: Placement = "student_ranks"
    """Place of the model: the student's ranks, ranks of its own in the same launch, a process
    beside each replica of the student, or a server that was started before."""

    serving: ServingConfig = field(default_factory=ServingConfig, metadata={"prefix": "serving-"})

    @property
    def is_remote(self) -> bool:
        """Whether the model runs in other processes than the student's."""
        return self.placement != STUDENT_RANKS

    def __post_init__(self) -> None:
        _check_positive(self, "temperature")
        check_placement(self.placement, self.serving, library=self.library)
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ConfigError(
                "a teacher's weight cannot be used", got=self.weight, expected="a number, >= 0"
            )
        if self.objective == "next_token":
            raise ConfigError(
                "a teacher has an objective that reads no teacher",
                got="next_token",
                fix="leave the teacher out, or give it weight 0",
            )


@dataclass(kw_only=True, frozen=True, slots=True)
class ParallelConfig:
    """Parallelism of one model; the remaining factor of the processes is data parallelism."""

    tensor_model_parallel_size: int = 1
    """Processes that share each layer and the vocabulary."""

    pipeline_model_parallel_size: int = 1
    """Pipeline stages."""

    virtual_pipeline_model_parallel_size: int = 1
    """Model chunks of a pipeline rank, for megatron-core's interleaved schedule; 1 for the plain
    schedule."""

    context_parallel_size: int = 1
    """Processes that share every sequence, of the student and of the teachers."""

    use_distributed_optimizer: bool = False
    """Shard the optimizer's state over data-parallel ranks."""

    sequence_parallel: bool = False
    """Give each tensor-parallel rank a part of every sequence between the layers' matrices."""

    overlap_grad_reduce: bool = False
    """Sum gradients over replicas while the backward pass still runs."""

    overlap_param_gather: bool = False
    """Gather updated weights from replicas while the next forward pass runs; needs
    ``use_distributed_optimizer`` and ``overlap_grad_reduce``."""

    distributed_timeout_minutes: int = 30
    """Longest time without progress on a rank, in minutes, before the run ends with an error that
    says which rank waits where."""

    @property
    def layout(self) -> Layout:
        """The sizes by which processes divide the model."""
        return Layout(
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=self.virtual_pipeline_model_parallel_size,
            context_parallel_size=self.context_parallel_size,
            sequence_parallel=self.sequence_parallel,
        )

    def __post_init__(self) -> None:
        _check_positive(
            self,
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "distributed_timeout_minutes",
        )
        if self.virtual_pipeline_model_parallel_size > 1 and self.pipeline_model_parallel_size == 1:
            raise ConfigError(
                "virtual_pipeline_model_parallel_size needs a pipeline to interleave",
                got=f"{self.virtual_pipeline_model_parallel_size} chunks of 1 pipeline stage",
                fix="raise pipeline_model_parallel_size, or remove it",
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError(
                "sequence_parallel needs tensor-parallel ranks to share a sequence",
                got="tensor_model_parallel_size 1",
                fix="raise tensor_model_parallel_size, or remove it",
            )
        if self.overlap_param_gather and not (
            self.use_distributed_optimizer and self.overlap_grad_reduce
        ):
            raise ConfigError(
                "overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce",
                got=f"{self.use_distributed_optimizer} and {self.overlap_grad_reduce}",
                fix="set both, or remove it",
            )


@dataclass(kw_only=True, frozen=True, slots=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = 1e-4
    """Peak learning rate."""

    min_lr: float = 0.0
    """Learning rate at the end of the decay."""

    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the decay after the warm-up, over all of ``train_iters``."""

    weight_decay: float = 0.01
    """Decoupled weight decay."""

    adam_beta1: float = 0.9
    """First-moment decay."""

    adam_beta2: float = 0.95
    """Second-moment decay."""

    adam_eps: float = 1e-8
    """Denominator term of AdamW."""

    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""

    def __post_init__(self) -> None:
        _check_positive(self, "lr", "adam_eps")
        _check_not_negative(self, "min_lr", "lr_warmup_iters", "weight_decay", "clip_grad")
        if self.min_lr > self.lr:
            raise ConfigError(
                "min_lr is above lr", got=self.min_lr, expected=f"at most lr, {self.lr}"
            )
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is no decay", got=getattr(self, name), expected="0 <= decay < 1"
                )


@dataclass(kw_only=True, frozen=True, slots=True)
class DataConfig:
    """Text to train on and text to measure on."""

    train: tuple[str, ...]
    """Training files: JSON lines, Parquet, Arrow, plain text, or Megatron's ``.bin`` with ``.idx``
    by their prefix; also folders, patterns, and a blend as ``weight path weight path``."""

    validation: tuple[str, ...] = ()
    """Held-out files."""

    text_key: str = "text"
    """Field of a record that holds the text."""

    conversations: bool = False
    """Records hold conversations, which each model reads in its own prompt format: every tokenizer
    needs a ``prompt_format`` (``auto``: its own chat template), or the mode ``sft``."""

    messages_key: str | None = None
    """Field of a record that holds the turns of a conversation; detected for each record when not
    given."""

    indexed_tokenizer: str | None = None
    """Tokenizer of the ids of a ``.bin`` that has no report of ``megatron-ext tokenize`` beside it:
    ``student``, the name of a teacher, or a tokenizer file or folder."""

    append_eod: bool = True
    """End every document with the end-of-document token."""

    packing: bool = False
    """Fill rows with several documents, which do not attend to one another."""

    num_workers: int = 0
    """Processes on each rank that read, tokenize and align ahead; 0 for none."""

    index_cache: str | None = None
    """Folder for indices of the files' documents; beside the first file when not given."""

    alignment_cache: str | None = None
    """Folder for tokens and alignments by content, for all ranks and runs; none when not given."""

    bad_documents: Literal["stop", "skip"] = "stop"
    """Treatment of a document that cannot be read: an error with its place, or a line in
    ``quarantine.jsonl`` of the run."""

    max_record_mib: int = MAX_RECORD_MIB
    """MiB of a record; a longer one cannot be read, and no more of it is held in memory."""

    def __post_init__(self) -> None:
        if not self.train:
            raise ConfigError("no training data", expected="at least one file in data.train")
        _check_not_negative(self, "num_workers")
        _check_positive(self, "max_record_mib")


@dataclass(kw_only=True, frozen=True, slots=True)
class LossConfig:
    """The loss, ``kd_weight * KD / count + ce_weight * CE / tokens``, with global counts."""

    objective: str = "projected_kl"
    """Distillation objective, a name of docs/losses.md, or ``next_token`` to train without a
    teacher."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the objective, see docs/losses.md; as a flag ``'{"top_k": 32}'``, which replaces
    all options of the file."""

    temperature: float | None = None
    """Temperature of both models in the distillation term; the objective's own when not given."""

    kd_weight: float = 1.0
    """Weight of the distillation term, a mean over the chunks or labels of the objective."""

    ce_weight: float = 1.0
    """Weight of the next-token cross-entropy, per token."""

    weighting: Literal["fixed", "scheduled", "matched", "gradient_magnitude"] = "fixed"
    """Course of the two weights over the steps: fixed, by a schedule, with distillation matched to
    the size of cross-entropy, or both by the size of their gradients."""

    weighting_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the weighting, see docs/losses.md; as a flag ``'{"kd_schedule": "cosine"}'``."""

    teacher_mode: Literal["sum", "averaged_logits", "select_teacher"] = "sum"
    """Combination of several teachers: a weighted sum of their terms, one teacher with the mean of
    their logits, or for each row the teacher that predicts its text best."""

    teacher_weights: Literal["static", "bits_per_byte", "entropy", "max_prob"] = "static"
    """Weights of several teachers in a sum: the configured ones, or by how well each predicts the
    text of a global batch."""

    teacher_weights_alpha: float = 1.0
    """Strength with which teacher_weights follow the texts; 0 for equal weights."""

    vocab_normalisation: Literal["none", "log_vocab", "nemo"] = "none"
    """Normalisation of the teachers' weights in a sum by the sizes of their vocabularies."""

    learned_projection: bool = False
    """Train the shares of the projection's inexact rows with the student (projected_kl)."""

    linear: bool = False
    """Compute the loss from hidden states and heads, one tile of logits at a time, and never all
    logits; for the objectives that are sums over chunks or labels."""

    linear_tile_rows: int = 2048
    """Most rows of a tile of the linear form, of either model."""

    def __post_init__(self) -> None:
        _check_positive(self, "temperature", "linear_tile_rows")
        _check_not_negative(self, "kd_weight", "ce_weight")

    def of_teacher(self, teacher: TeacherConfig) -> LossConfig:
        """The loss against one teacher: with its own objective, options and temperature."""
        options = teacher.options
        if teacher.objective is None:
            options = {**self.options, **teacher.options}
        temperature = self.temperature if teacher.temperature is None else teacher.temperature
        return replace(
            self,
            objective=teacher.objective or self.objective,
            options=options,
            temperature=temperature,
        )


@dataclass(kw_only=True, frozen=True, slots=True)
class TrainingConfig:
    """The training loop."""

    train_iters: int
    """Optimizer steps."""

    micro_batch_size: int = 1
    """Sequences per forward pass and data-parallel rank."""

    global_batch_size: int = 8
    """Sequences per optimizer step, over all ranks and microbatches."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Parameter and activation dtype; gradients are accumulated in fp32."""

    vocabulary_layout: Literal["original", "co_sharded"] = "original"
    """Order of the heads' rows during training: that of the token ids, or one in which tokens that
    both models have are on the same rank. Losses and checkpoints are the same, see
    docs/projection.md. Needs an objective with a projection."""

    variable_seq_lengths: bool = False
    """Make the rows of a microbatch only as long as its longest, instead of ``seq_length``. Losses
    are the same."""

    seq_length_multiple: int = 64
    """Multiple to which rows of variable length are padded, at most to ``seq_length``."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Activations of the student that the backward pass computes again instead of keeping: those of
    whole layers, or those of the attention alone; none when not given."""

    recompute_method: Literal["uniform", "block"] | None = None
    """Layers that ``full`` recomputes: all, ``recompute_num_layers`` at a time, or the first
    ``recompute_num_layers`` of every chunk of a stage."""

    recompute_num_layers: int | None = None
    """Layers of ``recompute_method``."""

    require_gpu: bool = False
    """Refuse to start where no CUDA device is visible; otherwise the run uses the CPU."""

    seed: int = 1234
    """Seed of the initial weights and of the order of the data."""

    eval_interval: int = 100
    """Iterations between measurements on held-out text; one is always made at the end."""

    save_interval: int = 100
    """Iterations between checkpoints; one is always made at the end."""

    keep_checkpoints: int = 2
    """Newest checkpoints kept."""

    tensorboard_dir: str | None = None
    """Folder for TensorBoard's event files; none when not given."""

    wandb_project: str | None = None
    """Project of Weights & Biases that the run is logged to; ``WANDB_MODE=offline`` in the
    environment keeps it on this machine."""

    async_save: bool = False
    """Write checkpoints in the background while training goes on."""

    verify_checkpoints: bool = True
    """Check the files of checkpoints that are loaded against the sizes and checksums that they were
    saved with; those without a manifest are loaded as they are."""

    nan_policy: Literal["stop", "skip"] = "stop"
    """Treatment of an iteration whose loss or gradient is not finite: the end of the run, or no
    update, counted as ``skipped_iterations``."""

    max_consecutive_skips: int = 10
    """Iterations in a row that may be skipped; one more ends the run."""

    def __post_init__(self) -> None:
        _check_positive(
            self,
            "train_iters",
            "micro_batch_size",
            "global_batch_size",
            "eval_interval",
            "save_interval",
            "keep_checkpoints",
            "seq_length_multiple",
            "recompute_num_layers",
            "max_consecutive_skips",
        )
        _check_divides(self, "global_batch_size", "micro_batch_size")
        _check_recompute(self)
        if not 0 <= self.seed < 2**32:
            raise ConfigError("seed is out of range", got=self.seed, expected="0 to 2**32 - 1")


@dataclass(kw_only=True, frozen=True, slots=True)
class DistillConfig:
    """One run of ``megatron-ext distill``."""

    run_dir: str
    """Folder for checkpoints, metrics, plot and projection; a run in the folder is resumed."""

    tokenizer: TokenizerConfig = field(metadata={"prefix": "tokenizer-"})

    student: ModelConfig = field(metadata={"prefix": ""})

    data: DataConfig = field(metadata={"prefix": "data-"})

    training: TrainingConfig = field(metadata={"prefix": ""})

    teacher: TeacherConfig | None = field(default=None, metadata={"prefix": "teacher-"})

    teachers: Mapping[str, TeacherConfig] = field(default_factory=dict)
    """Several teachers in place of ``teacher``: sections with the keys of that one, by name, or as
    a list with a ``name`` in each."""

    loss: LossConfig = field(default_factory=LossConfig, metadata={"prefix": "loss-"})

    parallel: ParallelConfig = field(default_factory=ParallelConfig, metadata={"prefix": ""})

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig, metadata={"prefix": ""})

    initial_checkpoint: str | None = None
    """Checkpoint or HuggingFace folder to take the student's first weights from; random weights
    when not given."""

    allow_other_tokenizer: bool = False
    """Accept first weights that were trained with another tokenizer, or have too few rows for this
    one; an error otherwise."""

    projection: str | None = None
    """Projection file (safetensors, or .pt of NeMo RL's tools); built once into ``run_dir`` when
    not given."""

    evaluation: EvaluationConfig = field(
        default_factory=EvaluationConfig, metadata={"prefix": "evaluation-"}
    )

    def __post_init__(self) -> None:
        _check_teachers(self)
        check_exclusions(self, "configuration")
        if self.optimizer.lr_warmup_iters >= self.training.train_iters:
            raise ConfigError(
                "lr_warmup_iters leaves no iteration at the full learning rate",
                got=self.optimizer.lr_warmup_iters,
                expected=f"less than train_iters, {self.training.train_iters}",
            )
        tp, pp, vp = (
            self.parallel.tensor_model_parallel_size,
            self.parallel.pipeline_model_parallel_size,
            self.parallel.virtual_pipeline_model_parallel_size,
        )
        stages = "pipeline_model_parallel_size"
        if vp > 1:
            stages += " x virtual_pipeline_model_parallel_size"
        for name, model in self._models():
            _check_model(name, model, tp, pp * vp, ("tensor_model_parallel_size", stages))
            if self.parallel.sequence_parallel:
                axis = "tensor_model_parallel_size, which sequence_parallel cuts sequences by"
                _check_layout(name, "seq_length", model.seq_length, tp, axis)
        self._check_served()
        if self.parallel.sequence_parallel and self.training.variable_seq_lengths:
            multiple = self.training.seq_length_multiple
            _check_layout("run", "seq_length_multiple", multiple, tp, "tensor_model_parallel_size")

    @property
    def distils(self) -> bool:
        """Whether the objective consumes a teacher."""
        return self.loss.objective != "next_token"

    @property
    def named_teachers(self) -> Mapping[str, TeacherConfig]:
        """All teachers by name; the one of a ``teacher`` section is called ``teacher``."""
        return self.teachers if self.teacher is None else {TEACHER: self.teacher}

    def section_of(self, teacher: str) -> str:
        """The section of a teacher, for errors."""
        return TEACHER if self.teacher is not None else f"teachers.{teacher}"

    def projection_of(self, teacher: str) -> str | None:
        """Projection file of a teacher; None where none is configured."""
        return self.named_teachers[teacher].projection or self.projection

    @property
    def teacher_ranks(self) -> Mapping[str, int]:
        """Number of a teacher's own processes in the launch, by name, for those that have any."""
        if not self.distils:
            return {}
        return {
            name: teacher.serving.ranks
            for name, teacher in self.named_teachers.items()
            if teacher.serving.ranks is not None
        }

    def _models(self) -> list[tuple[str, ModelConfig]]:
        """Models that are divided over the student's ranks, by what errors call them."""
        return [
            ("student", self.student),
            *(
                (side_of(name), teacher.model)
                for name, teacher in self.named_teachers.items()
                if teacher.library == "megatron" and not teacher.is_remote
            ),
        ]

    def _check_served(self) -> None:
        """Check the remote teachers, which have layouts of their own."""
        for name, teacher in self.named_teachers.items():
            if not teacher.is_remote:
                continue
            serving = teacher.serving
            sizes = serving.tensor_model_parallel_size, serving.pipeline_model_parallel_size
            axes = (
                "serving.tensor_model_parallel_size",
                "serving.pipeline_model_parallel_size",
            )
            _check_model(side_of(name), teacher.model, *sizes, axes)


def _check_teachers(config: DistillConfig) -> None:
    if config.distils and not config.named_teachers:
        # An unknown objective raises its own error here; importing torch for it does no harm.
        from megatron_ext.losses import LOSS_REGISTRY

        _ = LOSS_REGISTRY[config.loss.objective]
        raise ConfigError(
            f"the objective {config.loss.objective!r} needs a teacher",
            got="no teacher section",
            fix="add one, or set loss.objective to next_token",
        )
    for name in config.teachers:
        # Part of metric names, file names and names of parameters.
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) or name == "average":
            raise ConfigError(
                "a teacher cannot be called so",
                got=repr(name),
                expected="letters, digits, - and _, but not 'average'",
                where="teachers",
            )


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        # Not ``value <= 0``, which NaN passes.
        if value is not None and not value > 0:
            raise ConfigError(f"{name} must be positive", got=value)


def _check_not_negative(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value >= 0:
            raise ConfigError(f"{name} must not be negative", got=value)


def _check_recompute(training: TrainingConfig) -> None:
    names = ("recompute_method", "recompute_num_layers")
    given = [name for name in names if getattr(training, name) is not None]
    is_full = training.recompute_granularity == "full"
    if len(given) != (2 if is_full else 0):
        raise ConfigError(
            "activations are recomputed layer by layer with recompute_granularity full alone",
            got=f"recompute_granularity {training.recompute_granularity} with "
            f"{' and '.join(given) or 'neither recompute_method nor recompute_num_layers'}",
            expected="recompute_method and recompute_num_layers, if and only if it is full",
        )


def _check_divides(config: object, whole: str, part: str) -> None:
    if getattr(config, whole) % getattr(config, part):
        raise ConfigError(
            f"{whole} is not a multiple of {part}",
            got=f"{whole} {getattr(config, whole)} and {part} {getattr(config, part)}",
        )


def side_of(name: str) -> str:
    """What errors call a teacher."""
    return TEACHER if name == TEACHER else f"teacher {name}"


def _check_model(
    name: str, model: ModelConfig, tp: int, stages: int, axes: tuple[str, str]
) -> None:
    """Check that a model divides over tensor-parallel ranks and over stages."""
    _check_layout(name, "num_layers", model.num_layers, stages, axes[1])
    heads = model.num_query_groups or model.num_attention_heads
    _check_layout(name, "attention heads", heads, tp, axes[0])
    ffn = model.ffn_hidden_size or 4 * model.hidden_size
    _check_layout(name, "ffn_hidden_size", ffn, tp, axes[0])


def _check_layout(model: str, what: str, count: int, size: int, axis: str) -> None:
    if count % size:
        raise ConfigError(
            f"the {model}'s {what} do not divide over {axis}",
            got=f"{count} over {size}",
            expected=f"a multiple of {size}",
            fix=f"change {model} {what} or {axis}",
        )
