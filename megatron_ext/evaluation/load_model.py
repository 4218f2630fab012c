"""From a checkpoint, of ours or of HuggingFace, to a model that tasks can ask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import torch

from megatron_ext.distributed import process_groups
from megatron_ext.distributed.layout import Layout
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.evaluation.generation import Generator
from megatron_ext.evaluation.megatron_language_model import MegatronLanguageModel
from megatron_ext.evaluation.token_scoring import TokenScorer
from megatron_ext.huggingface.checkpoint_files import CheckpointFiles, is_checkpoint_folder
from megatron_ext.huggingface.model_settings import model_settings
from megatron_ext.huggingface.side_files import kept_folder
from megatron_ext.tokenizers import (
    MegatronTokenizerText,
    TokenizerConfig,
    build_tokenizer,
    padded_vocab_size,
)
from megatron_ext.training import cpu_megatron
from megatron_ext.training.checkpoint_folder import find_checkpoint
from megatron_ext.training.checkpoint_model import checkpoint_model
from megatron_ext.training.checkpoint_tokenizer import tokenizer_doubts
from megatron_ext.training.config import ModelConfig, ParallelConfig, TrainingConfig
from megatron_ext.training.first_weights import load_first_weights
from megatron_ext.training.huggingface.kept_tokenizer import KeptTokenizer
from megatron_ext.training.models import build_gpt_model, freeze
from megatron_ext.training.run_folder import CHECKPOINTS
from megatron_ext.training.start_warnings import write_warnings

_LONGEST: Final = 4096
"""Tokens that a model of HuggingFace reads at once when nothing is said."""

_TIMEOUT: Final = timedelta(hours=2)
"""How long ranks wait for another, which may generate longer texts or run many programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How a model is run."""

    tokenizer: str | None = None
    """Tokenizer to read texts with; the one that comes with the checkpoint when not given."""

    allow_other_tokenizer: bool = False
    """Take one that the model was not trained with."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1

    precision: Literal["fp32", "bf16"] | None = None
    """bf16 on a GPU and fp32 on a CPU when not given."""

    seq_length: int | None = None
    """Tokens that are read at once; when not given, those of a run, or what a ``config.json`` says
    up to 4,096."""

    micro_batch_size: int = 8
    """Rows in one forward pass."""

    adds_bos: bool = True
    """Contexts begin with BOS, where the tokenizer has one."""

    applies_chat_template: bool = False
    """Contexts and prompts are messages of a user in the tokenizer's chat template."""


def load_language_model(checkpoint: Path, options: ModelOptions) -> MegatronLanguageModel:
    """Build and load a model on every rank that torchrun started, or on this process alone.

    What is left over from tensor and pipeline parallelism are replicas.

    Args:
        checkpoint: A run, its ``checkpoints``, one of these, or a HuggingFace folder.

    Collectives: those of ``process_groups.initialize`` and ``load_first_weights``.

    Raises:
        MegatronExtError: It cannot be read, or not be run so.
    """
    if (checkpoint / CHECKPOINTS).is_dir():
        checkpoint = checkpoint / CHECKPOINTS
    checkpoint = find_checkpoint(str(checkpoint), where="--checkpoint")
    if not torch.cuda.is_available():
        cpu_megatron.install()
    groups = process_groups.initialize(
        Layout(
            tensor_model_parallel_size=options.tensor_model_parallel_size,
            pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        ),
        timeout=_TIMEOUT,
    )
    model, tokenizer = _model(checkpoint, options), _tokenizer(checkpoint, options)
    if options.applies_chat_template and tokenizer.chat_template is None:
        raise ConfigError(
            "the tokenizer has no chat template",
            where="--apply-chat-template",
            got=tokenizer.path,
            fix="leave the flag out, or name a tokenizer that has one with --tokenizer",
        )
    doubts = tokenizer_doubts(
        checkpoint,
        tokenizer,
        allow_other=options.allow_other_tokenizer,
        switch="pass --allow-other-tokenizer",
    )
    write_warnings(f"{checkpoint}: {doubt}" for doubt in doubts)
    parallel = ParallelConfig(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
    )
    padded_size = padded_vocab_size(
        model.padded_ids(tokenizer.vocab_size),
        make_vocab_size_divisible_by=model.make_vocab_size_divisible_by,
        tensor_model_parallel_size=options.tensor_model_parallel_size,
    )
    precision = options.precision or ("bf16" if groups.device.type == "cuda" else "fp32")
    chunk = build_gpt_model(
        model,
        padded_vocab_size=padded_size,
        parallel=parallel,
        training=TrainingConfig(train_iters=1, precision=precision),
        groups=groups,
    )
    load_first_weights(checkpoint, [chunk], model)
    (chunk,) = freeze([chunk])
    shared: dict[str, Any] = {
        "chunk": chunk,
        "shard": groups.vocab_shard(vocab_size=tokenizer.vocab_size, padded_vocab_size=padded_size),
        "groups": groups,
        "micro_batch_size": options.micro_batch_size,
        "max_length": model.seq_length,
    }
    return MegatronLanguageModel(
        tokenizer=tokenizer,
        adds_bos=options.adds_bos,
        applies_chat_template=options.applies_chat_template,
        scorer=TokenScorer(**shared),
        generator=Generator(**shared),
        groups=groups,
    )


def _model(checkpoint: Path, options: ModelOptions) -> ModelConfig:
    """The model of a checkpoint, at the length that is asked for."""
    if not is_checkpoint_folder(checkpoint):
        model = checkpoint_model(checkpoint)
        length = options.seq_length or model.seq_length
        if model.position_embedding_type == "learned_absolute" and length != model.seq_length:
            raise ConfigError(
                "a model with learned positions has one length",
                where="--seq-length",
                got=length,
                expected=model.seq_length,
            )
        return replace(model, seq_length=length)
    files = CheckpointFiles(checkpoint)
    settings = model_settings(files)
    window = settings["window_size"] or _LONGEST
    known = min(_LONGEST, window, int(files.config.get("max_position_embeddings", _LONGEST)))
    return ModelConfig(**settings, seq_length=options.seq_length or known, hf=str(checkpoint))


def _tokenizer(checkpoint: Path, options: ModelOptions) -> MegatronTokenizerText:
    if options.tokenizer is not None:
        return build_tokenizer(TokenizerConfig(model=options.tokenizer))
    kept = None if is_checkpoint_folder(checkpoint) else KeptTokenizer(checkpoint).tokenizer
    if kept is not None:
        return kept
    folder = kept_folder(checkpoint)
    if folder is None:
        raise CheckpointError(
            "the checkpoint keeps no tokenizer", where=checkpoint, fix="name one with --tokenizer"
        )
    return build_tokenizer(TokenizerConfig(model=str(folder)))
