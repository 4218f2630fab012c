"""The models of a run on one rank: built, cut, and for teachers loaded and frozen."""

from __future__ import annotations

from megatron.core.models.gpt import GPTModel

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses.checks import check_shards_agree
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.build import padded_vocab_size
from megatron_ext.training.checkpoint_folder import find_checkpoint
from megatron_ext.training.config import TEACHER, DistillConfig, ModelConfig, ParallelConfig
from megatron_ext.training.first_weights import load_first_weights
from megatron_ext.training.models import build_model_chunks, freeze


def frozen_teacher(
    config: DistillConfig,
    name: str,
    tokenizer: MegatronTokenizerText,
    groups: ProcessGroups,
    *,
    parallel: ParallelConfig | None = None,
) -> tuple[list[GPTModel], VocabShard]:
    """A loaded teacher, frozen, and this rank's columns of its vocabulary.

    Args:
        tokenizer: The teacher's.
        parallel: The layout of ``groups``; that of the run when not given.
    """
    teacher = config.named_teachers[name]
    chunks, shard = model_part(
        _side(name), teacher.model, tokenizer, config, groups, parallel=parallel
    )
    where = f"{config.section_of(name)}.checkpoint"
    checkpoint = find_checkpoint(teacher.checkpoint, where=where)
    load_first_weights(checkpoint, chunks, teacher.model)
    return freeze(chunks), shard


def teacher_vocab_shard(
    config: DistillConfig,
    name: str,
    tokenizer: MegatronTokenizerText,
    groups: ProcessGroups,
    *,
    parallel: ParallelConfig | None = None,
) -> VocabShard:
    """This rank's columns of a teacher's vocabulary, without its model."""
    model = config.named_teachers[name].model
    return model_shard(_side(name), model, tokenizer, config, groups, parallel=parallel)


def model_part(
    side: str,
    model: ModelConfig,
    tokenizer: MegatronTokenizerText,
    config: DistillConfig,
    groups: ProcessGroups,
    *,
    parallel: ParallelConfig | None = None,
) -> tuple[list[GPTModel], VocabShard]:
    """This rank's part with its first weights, and its columns of the vocabulary."""
    parallel = parallel or config.parallel
    shard = model_shard(side, model, tokenizer, config, groups, parallel=parallel)
    chunks = build_model_chunks(
        model,
        padded_vocab_size=shard.width * parallel.tensor_model_parallel_size,
        parallel=parallel,
        training=config.training,
        groups=groups,
    )
    return chunks, shard


def model_shard(
    side: str,
    model: ModelConfig,
    tokenizer: MegatronTokenizerText,
    config: DistillConfig,
    groups: ProcessGroups,
    *,
    parallel: ParallelConfig | None = None,
) -> VocabShard:
    """This rank's columns of a model's vocabulary.

    Collectives: those of ``check_shards_agree``.
    """
    parallel = parallel or config.parallel
    padded_size = padded_vocab_size(
        model.padded_ids(tokenizer.vocab_size),
        make_vocab_size_divisible_by=model.make_vocab_size_divisible_by,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
    )
    shard = groups.vocab_shard(vocab_size=tokenizer.vocab_size, padded_vocab_size=padded_size)
    check_shards_agree(shard, side=side, device=groups.device)
    return shard


def _side(name: str) -> str:
    return name if name == TEACHER else f"teacher {name}"
