"""The configuration of a distillation run, as frozen dataclasses.

Names are megatron-core's wherever it has one. The YAML file nests as the dataclasses do; every leaf
also has a flag (``arguments``). The string under a field is its help text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from megatron_ext.constants import MAX_RECORD_MIB
from megatron_ext.engines.engine import EngineConfig
from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers.config import TokenizerConfig
from megatron_ext.training.configuration.exclusions import check_exclusions
from megatron_ext.training.configuration.loop import OptimizerConfig as OptimizerConfig
from megatron_ext.training.configuration.loop import ParallelConfig as ParallelConfig
from megatron_ext.training.configuration.loop import TrainingConfig as TrainingConfig
from megatron_ext.training.configuration.lora import LoraConfig, check_experts, check_tied
from megatron_ext.training.configuration.model import ModelConfig as ModelConfig
from megatron_ext.training.configuration.number_checks import check_not_negative, check_positive
from megatron_ext.training.configuration.rollouts import RolloutConfig
from megatron_ext.training.configuration.teachers import (
    NEW_TOKENS,
    STUDENT_RANKS,
    EvaluationConfig,
    Placement,
    ServingConfig,
    check_placement,
)

TEACHER: Final = "teacher"
"""Name of the one teacher of a ``teacher`` section."""


@dataclass(kw_only=True, frozen=True, slots=True)
class TeacherConfig:
    """The frozen model to learn from."""

    tokenizer: TokenizerConfig = field(metadata={"prefix": "tokenizer-"})

    model: ModelConfig = field(metadata={"prefix": ""})

    checkpoint: str
    """Checkpoint of the teacher: a run's folder, its ``checkpoints``, one iteration in them, a
    HuggingFace folder, or ``OWNER/NAME`` or ``OWNER/NAME@REVISION`` of a model on the hub."""

    allow_other_tokenizer: bool = False
    """Accept a checkpoint that was trained with another tokenizer, or has too few or too many rows
    for this one; an error otherwise."""

    ema_decay: float | None = None
    """Decay of the exponential moving average of the student's weights, for a teacher that is this
    average and has no checkpoint; the student's tokenizer, and its keys of the model, are taken
    where not given."""

    objective: str | None = None
    """Objective for this teacher; ``loss.objective`` when not given."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of this teacher's objective, added to ``loss.options``; if the teacher has an
    objective of its own, they replace these."""

    temperature: float | None = None
    """Temperature for this teacher; ``loss.temperature`` when not given."""

    weight: float = 1.0
    """Weight of this teacher's mean among the teachers'."""

    sources: tuple[str, ...] = ()
    """Entries of ``data.train`` or ``data.rollouts.prompts`` whose rows this teacher teaches; all
    when not given."""

    projection: str | None = None
    """Projection file for this teacher; built once into ``run_dir`` when not given."""

    cache: str | None = None
    """Folder that ``megatron-ext cache-teacher`` made of this teacher: its targets are read from
    there and its model is not built."""

    library: Literal["megatron", "huggingface"] = "megatron"
    """Library that runs the model: megatron-core, in the layout of its ranks, or transformers,
    whole on each device, for any causal language model of a HuggingFace folder."""

    weight_precision: Literal["int8", "fp8", "int4"] | None = None
    """Precision to which torchao rounds the weights of linear layers, each row by a scale of its
    own, in int4 each 32 columns of it, where library is huggingface. Activations, embeddings and
    head keep the run's."""

    offload: bool = False
    """Keep the weights in the host's memory between one global batch and the next."""

    placement: Placement = "student_ranks"
    """Place of the model: the student's ranks, ranks of its own in the same launch, a process
    beside each replica of the student, a server that was started before, or an inference engine
    (``engine``), for which the checkpoint is a folder with ``config.json`` and tokenizer."""

    serving: ServingConfig = field(default_factory=ServingConfig, metadata={"prefix": "serving-"})

    engine: EngineConfig | None = field(default=None, metadata={"prefix": "engine-"})

    @property
    def is_remote(self) -> bool:
        """Whether the model runs in other processes than the student's."""
        return self.placement != STUDENT_RANKS

    def __post_init__(self) -> None:
        check_positive(self, "temperature")
        check_placement(
            self.placement,
            self.serving,
            library=self.library,
            has_engine=self.engine is not None,
        )
        if self.ema_decay is not None:
            _check_average(self.ema_decay, self.checkpoint)
        if self.weight_precision is not None and self.library != "huggingface":
            raise ConfigError(
                "torchao rounds the layers of transformers, not those of megatron-core",
                got=f"weight_precision {self.weight_precision} with library {self.library}",
                fix="set library to huggingface, or leave weight_precision out",
            )
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

    rollouts: RolloutConfig | None = field(default=None, metadata={"prefix": "rollouts-"})

    def __post_init__(self) -> None:
        if not self.train:
            raise ConfigError("no training data", expected="at least one file in data.train")
        check_not_negative(self, "num_workers")
        check_positive(self, "max_record_mib")


@dataclass(kw_only=True, frozen=True, slots=True)
class LossConfig:
    """The loss, ``kd_weight * KD / count + ce_weight * CE / tokens``, with global counts."""

    objective: str = "projected_kl"
    """Distillation objective: ``projected_kl``, ``partition_kl``, ``byte_prefix``, ``strict_topk``,
    ``hybrid_kl``, ``gold``, ``uld``, ``alm``, ``sampled_kl``, ``mined``, ``dskd``, ``hidden_mse``,
    ``hidden_cosine`` or ``vocab_kl``, see docs/losses.md; ``next_token`` to train without a
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

    linear: bool | None = None
    """Compute the loss from hidden states and heads, one tile of logits at a time, for objectives
    that are sums over chunks or labels. When not given, a run on a CPU does so if the logits of a
    microbatch take more than 64 MiB and no other setting forbids it, in tiles of at most 128
    MiB."""

    linear_tile_rows: int = 2048
    """Most rows of a tile of the linear form, of either model."""

    def __post_init__(self) -> None:
        check_positive(self, "temperature", "linear_tile_rows")
        check_not_negative(self, "kd_weight", "ce_weight")

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
class DistillConfig:
    """One run of ``megatron-ext distill``."""

    run_dir: str
    """Folder for checkpoints, metrics, plot and projection; a run in the folder is resumed."""

    # Both are those of the checkpoint's folder where they are not given.
    tokenizer: TokenizerConfig = field(
        metadata={"prefix": "tokenizer-", "from": "initial_checkpoint"}
    )

    student: ModelConfig = field(metadata={"prefix": "", "from": "initial_checkpoint"})

    data: DataConfig = field(metadata={"prefix": "data-"})

    training: TrainingConfig = field(metadata={"prefix": ""})

    teacher: TeacherConfig | None = field(default=None, metadata={"prefix": "teacher-"})

    teachers: Mapping[str, TeacherConfig] = field(default_factory=dict)
    """Several teachers in place of ``teacher``: sections with the keys of ``teacher``, by name, or
    as a list with a ``name`` in each."""

    loss: LossConfig = field(default_factory=LossConfig, metadata={"prefix": "loss-"})

    parallel: ParallelConfig = field(default_factory=ParallelConfig, metadata={"prefix": ""})

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig, metadata={"prefix": ""})

    lora: LoraConfig | None = field(default=None, metadata={"prefix": "lora-"})

    initial_checkpoint: str | None = None
    """Checkpoint, HuggingFace folder or name on the hub (``OWNER/NAME``, ``OWNER/NAME@REVISION``)
    to take the student's first weights from; random weights when not given."""

    allow_other_tokenizer: bool = False
    """Accept first weights that were trained with another tokenizer, or have too few or too many
    rows for this one; an error otherwise."""

    projection: str | None = None
    """Projection file (safetensors, or .pt of NeMo RL's tools); built once into ``run_dir`` when
    not given."""

    evaluation: EvaluationConfig = field(
        default_factory=EvaluationConfig, metadata={"prefix": "evaluation-"}
    )

    def __post_init__(self) -> None:
        if not self.run_dir:
            raise ConfigError("run_dir is empty", expected="a folder for the run")
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
            axes = "tensor_model_parallel_size", stages
            cp = self.parallel.context_parallel_size
            check_division(name, model, tp, pp * vp, axes, context_ranks=cp)
            if self.parallel.sequence_parallel:
                axis = "tensor_model_parallel_size, which sequence_parallel cuts sequences by"
                _check_layout(name, "seq_length", model.seq_length, tp, axis)
            _check_experts(name, model, self.parallel)
        has_experts = any(model.num_experts is not None for _, model in self._models())
        if self.parallel.expert_model_parallel_size > 1 and not has_experts:
            raise ConfigError(
                "expert_model_parallel_size needs a model with experts",
                where="parallel",
                got=f"{self.parallel.expert_model_parallel_size} and dense models",
                fix="remove it, or set num_experts",
            )
        for name, teacher in self.named_teachers.items():
            if teacher.ema_decay is not None:
                _check_averaged_model(self.section_of(name), teacher.model, self.student)
        self._check_served()
        self._check_completions()
        is_tied = not self.student.untie_embeddings_and_output_weights
        check_tied(self.training.trainable, is_tied=is_tied)
        check_experts(
            self.lora,
            self.training.trainable,
            has_experts=self.student.num_experts is not None,
            has_dense=self.student.has_dense_layers,
        )
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

    def _check_completions(self) -> None:
        rollouts, length = self.data.rollouts, self.student.seq_length
        longest = {} if rollouts is None else {"data.rollouts": rollouts.max_new_tokens}
        for name, task in self.evaluation.tasks.items():
            own_number = NEW_TOKENS.get(task.task or name, 0)
            longest[f"evaluation.tasks.{name}"] = task.max_new_tokens or own_number
        for section, new_tokens in longest.items():
            if new_tokens >= length:
                raise ConfigError(
                    "completions leave no room for a prompt",
                    where=f"{section}.max_new_tokens",
                    got=new_tokens,
                    expected=f"below student.seq_length, {length}",
                )

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
            check_division(side_of(name), teacher.model, *sizes, axes)
            tp, pp = sizes
            layout = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
            _check_experts(side_of(name), teacher.model, layout)


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


def _check_average(decay: float, checkpoint: str) -> None:
    if not 0 < decay < 1:
        raise ConfigError(
            "an average of the student cannot decay so",
            where="ema_decay",
            got=decay,
            expected="above 0 and below 1, such as 0.999",
        )
    if checkpoint:
        raise ConfigError(
            "an average of the student begins as the student does",
            where="checkpoint",
            got=f"{checkpoint} with ema_decay {decay}",
            expected="no checkpoint",
            fix="leave one of them out; initial_checkpoint has the first weights of both",
        )


def _check_averaged_model(section: str, model: ModelConfig, student: ModelConfig) -> None:
    """Check that an average has the shape of its student; sequences of its own are longer."""
    free = ["hf", *(["seq_length"] if model.position_embedding_type == "rope" else [])]
    for item in fields(model):
        own, its = getattr(model, item.name), getattr(student, item.name)
        if item.name not in free and own != its:
            raise ConfigError(
                "an average of the student has the student's model",
                where=f"{section}.model.{item.name}",
                got=own,
                expected=its,
                fix="leave the key out",
            )


def side_of(name: str) -> str:
    """What errors call a teacher."""
    return TEACHER if name == TEACHER else f"teacher {name}"


def check_division(
    name: str,
    model: ModelConfig,
    tp: int,
    stages: int,
    axes: tuple[str, str],
    *,
    context_ranks: int = 1,
) -> None:
    """Check that a model divides over tensor-parallel ranks and over stages.

    Args:
        name: What errors call the model.
        axes: What they call the two numbers.

    Raises:
        ConfigError: It does not.
    """
    _check_layout(name, "num_layers", model.num_layers, stages, axes[1])
    _check_layout(name, "attention heads", model.query_groups, tp, axes[0])
    if model.num_experts is None or model.moe_first_dense_layers:
        _check_layout(name, "ffn_hidden_size", model.ffn_width, tp, axes[0])
    if model.is_hybrid:
        heads, axis = model.linear_num_key_heads or 0, axes[0]
        if context_ranks > 1:
            axis += " x context_parallel_size"
        _check_layout(name, "linear_num_key_heads", heads, tp * context_ranks, axis)
    if model.is_latent:
        # megatron-core makes them cut before they are replaced by whole ones.
        narrow = (model.kv_lora_rank or 0) + model.rotary_width
        _check_layout(name, "kv_lora_rank and qk_pos_emb_head_dim", narrow, tp, axes[0])
        _check_layout(name, "q_lora_rank", model.q_lora_rank or 0, tp, axes[0])


def _check_experts(name: str, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Check that the experts of a model divide over the ranks that share them."""
    if model.num_experts is None:
        return
    ep, layout = parallel.expert_model_parallel_size, parallel.layout
    _check_layout(name, "num_experts", model.num_experts, ep, "expert_model_parallel_size")
    axis = "expert_tensor_parallel_size, or tensor_model_parallel_size without it"
    width = "moe_ffn_hidden_size"
    _check_layout(name, width, model.expert_width, layout.expert_tensor_ranks, axis)
    shared, tp = model.moe_shared_expert_intermediate_size, parallel.tensor_model_parallel_size
    what, axis = "moe_shared_expert_intermediate_size", "tensor_model_parallel_size"
    _check_layout(name, what, shared or 0, tp, axis)
    if name == "student" and tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            "megatron-core trains experts under tensor parallelism with sequence_parallel alone",
            where="parallel.sequence_parallel",
            got=f"false and tensor_model_parallel_size {tp}",
            fix="set it to true",
        )


def _check_layout(model: str, what: str, count: int, size: int, axis: str) -> None:
    if count % size:
        raise ConfigError(
            f"the {model}'s {what} do not divide over {axis}",
            got=f"{count} over {size}",
            expected=f"a multiple of {size}",
            fix=f"change {model} {what} or {axis}",
        )
