"""The configuration of a training loop: its steps, its optimizer and its parallelism."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from megatron_ext.distributed.layout import Layout
from megatron_ext.errors import ConfigError
from megatron_ext.training.configuration.lora import check_parts
from megatron_ext.training.configuration.number_checks import (
    check_divides,
    check_not_negative,
    check_positive,
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
    """Parameter and activation dtype; gradients are accumulated in fp32. On a GPU, commands that
    train or serve take bf16 when it is not given; a dry run assumes fp32."""

    vocabulary_layout: Literal["auto", "original", "co_sharded"] = "auto"
    """Order of the heads' rows during training: that of the token ids, or one in which tokens that
    both models have are side by side. Losses and checkpoints are the same, see docs/projection.md.
    ``co_sharded`` needs an objective with a projection; ``auto`` takes it on a GPU and under tensor
    parallelism where the run can have it."""

    variable_seq_lengths: bool = False
    """Make the rows of a microbatch only as long as its longest, instead of ``seq_length``. Losses
    are the same."""

    seq_length_multiple: int = 64
    """Multiple to which rows of variable length are padded, at most to ``seq_length``."""

    trainable: tuple[str, ...] | None = None
    """Parts of the student that learn: ``embeddings``, ``layers``, ``norms`` (those of layers and
    the last), ``experts`` (without shared ones), ``routers``, ``head``. All when not given; beside
    adapters (``lora``) none."""

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
    """Project of Weights & Biases that the run is logged to, by the name of its folder; of the
    environment, ``WANDB_ENTITY`` and ``WANDB_TAGS`` are read, and ``WANDB_MODE=offline`` keeps the
    run on this machine."""

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
        check_positive(
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
        check_divides(self, "global_batch_size", "micro_batch_size")
        _check_recompute(self)
        check_parts(self.trainable)
        if not 0 <= self.seed < 2**32:
            raise ConfigError("seed is out of range", got=self.seed, expected="0 to 2**32 - 1")


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
        check_positive(self, "lr", "adam_eps")
        check_not_negative(self, "min_lr", "lr_warmup_iters", "weight_decay", "clip_grad")
        if self.min_lr > self.lr:
            raise ConfigError(
                "min_lr is above lr", got=self.min_lr, expected=f"at most lr, {self.lr}"
            )
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is not a decay", got=getattr(self, name), expected="0 <= decay < 1"
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

    expert_model_parallel_size: int = 1
    """Processes that share the experts of each layer, of the student and of the teachers; they are
    taken from the tensor-, context- and data-parallel ones of a stage."""

    expert_tensor_parallel_size: int | None = None
    """Processes that share each expert; ``tensor_model_parallel_size`` when not given."""

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
        return Layout(**{size.name: getattr(self, size.name) for size in fields(Layout)})

    def __post_init__(self) -> None:
        check_positive(
            self,
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
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
