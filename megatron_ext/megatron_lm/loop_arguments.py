"""Settings that a configuration and Megatron-LM's arguments share, as flags and as checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from megatron_ext.errors import ConfigError
from megatron_ext.training.configuration.config import DistillConfig

_SPELLED: Final = {
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
}
"""Arguments whose flags have other names."""


def loop_flags(config: DistillConfig, *, vocab_size: int) -> list[str]:
    """Megatron-LM's flags for a run: those that ``check_arguments`` compares, and proposals.

    The optimizer's settings, the iterations and the seed are proposals, which later flags of a
    command line override.

    Args:
        vocab_size: The student's.
    """
    flags = []
    values = {**_proposed(config), **_shared(config), **_vocabulary(config, vocab_size)}
    for name, value in values.items():
        if value is True:
            flags.append(_flag(name))
        elif value is not None and value is not False:
            flags += [_flag(name), str(value)]
    if config.student.num_query_groups is not None:
        flags.append("--group-query-attention")
    return [*flags, "--disable-bias-linear"]


def check_arguments(args: Any, config: DistillConfig) -> None:
    """Check that Megatron-LM's arguments agree with the configuration.

    The model is included: checkpoints contain the arguments, and programs that load one build the
    model that they describe.

    Args:
        args: Megatron-LM's namespace.

    Raises:
        ConfigError: An argument differs, or asks for something that distillation does not support.
    """
    for name, expected in _shared(config).items():
        given = getattr(args, name, expected)
        if name == "num_query_groups" and not getattr(args, "group_query_attention", True):
            given = None
        if given != expected:
            raise ConfigError(
                "Megatron-LM's arguments and the configuration disagree",
                where=_flag(name),
                got=given,
                expected=expected,
                fix="change the flag, or the configuration",
            )
    for name, without in _ABSENT.items():
        given = getattr(args, name, without)
        if given != without and given is not None:
            raise ConfigError(
                "distillation does not work with this flag of Megatron-LM's",
                where=_flag(name),
                got=given,
                expected=without,
                fix="leave it out",
            )
    eval_iters = getattr(args, "eval_iters", None)
    if eval_iters and not config.data.validation:
        raise ConfigError(
            "there is no held-out text for Megatron-LM to evaluate on",
            where="--eval-iters",
            got=eval_iters,
            fix="set it to 0, or name files in data.validation",
        )


def check_padded_vocab_size(args: Any, expected: int) -> None:
    """Check the rows of the student's head, which follow from its tokenizer.

    Raises:
        ConfigError: Megatron-LM's arguments have another number.
    """
    given = getattr(args, "padded_vocab_size", expected)
    if given != expected:
        raise ConfigError(
            "Megatron-LM's arguments are of another vocabulary",
            where="--padded-vocab-size",
            got=given,
            expected=expected,
            fix="set it to that, or leave out the flags of a tokenizer",
        )


_ABSENT: Final[Mapping[str, Any]] = {
    "fp16": False,
    "rampup_batch_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "num_experts": None,
    "iterations_to_skip": [],
    "use_torch_fsdp2": False,
    "use_megatron_fsdp": False,
    "init_model_with_meta_device": False,
    "sft": False,
}
"""Arguments of features that our runs do not support, with the value that turns each off."""


def _shared(config: DistillConfig) -> dict[str, Any]:
    """Settings that must be equal, by the names of Megatron-LM's arguments."""
    parallel, training, student = config.parallel, config.training, config.student
    # Megatron-LM accepts integers only; ``exclusions`` refuses other numbers.
    stretch = student.rotary_seq_len_interpolation_factor
    chunks = parallel.virtual_pipeline_model_parallel_size
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": None if chunks == 1 else chunks,
        "context_parallel_size": parallel.context_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
        "use_distributed_optimizer": parallel.use_distributed_optimizer,
        "overlap_grad_reduce": parallel.overlap_grad_reduce,
        "overlap_param_gather": parallel.overlap_param_gather,
        "micro_batch_size": training.micro_batch_size,
        "global_batch_size": training.global_batch_size,
        "bf16": training.precision == "bf16",
        "dataloader_type": "external",
        "seq_length": student.seq_length,
        "num_layers": student.num_layers,
        "hidden_size": student.hidden_size,
        "num_attention_heads": student.num_attention_heads,
        "num_query_groups": student.num_query_groups,
        "kv_channels": student.head_width,
        "add_qkv_bias": student.add_qkv_bias,
        "qk_layernorm": student.qk_layernorm,
        "ffn_hidden_size": student.ffn_width,
        "position_embedding_type": student.position_embedding_type,
        "rotary_base": student.rotary_base,
        "rotary_percent": student.rotary_percent,
        "rotary_seq_len_interpolation_factor": None if stretch is None else int(stretch),
        "use_rope_scaling": student.use_rope_scaling,
        "normalization": student.normalization,
        "layernorm_epsilon": student.layernorm_epsilon,
        "layernorm_zero_centered_gamma": student.layernorm_zero_centered_gamma,
        "swiglu": student.swiglu,
        "untie_embeddings_and_output_weights": student.untie_embeddings_and_output_weights,
    }


def _proposed(config: DistillConfig) -> dict[str, Any]:
    """Settings that are proposed, by the names of Megatron-LM's arguments."""
    optimizer, training, student = config.optimizer, config.training, config.student
    return {
        "max_position_embeddings": student.seq_length,
        "make_vocab_size_divisible_by": student.make_vocab_size_divisible_by,
        "rope_scaling_factor": student.rope_scaling_factor,
        "train_iters": training.train_iters,
        "lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "lr_warmup_iters": optimizer.lr_warmup_iters,
        "lr_decay_style": optimizer.lr_decay_style,
        "lr_decay_iters": training.train_iters,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2,
        "adam_eps": optimizer.adam_eps,
        "clip_grad": optimizer.clip_grad,
        "seed": training.seed,
        "save_interval": training.save_interval,
        "eval_interval": training.eval_interval,
        "eval_iters": 1 if config.data.validation else 0,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _vocabulary(config: DistillConfig, vocab_size: int) -> dict[str, Any]:
    """Flags of a tokenizer, which Megatron-LM builds and nothing reads, and the head's size."""
    return {
        "tokenizer_type": "NullTokenizer",
        "vocab_size": vocab_size,
        "padded_vocab_size": config.student.head_rows(
            vocab_size, tensor_ranks=config.parallel.tensor_model_parallel_size
        ),
    }


def _flag(name: str) -> str:
    return f"--{_SPELLED.get(name, name).replace('_', '-')}"
