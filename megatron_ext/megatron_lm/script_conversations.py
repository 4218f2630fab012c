"""The data set of ``pretrain_gpt.py --sft``: ours in the place of Megatron-LM's."""

from __future__ import annotations

import copy
from typing import Any, Final

import megatron.core
import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import Split
from numpy.typing import NDArray

from megatron_ext.data.sft_dataset import SFTDataset
from megatron_ext.data.sft_records import SFTConfig, SFTRecords
from megatron_ext.errors import ConfigError
from megatron_ext.megatron_lm.arguments import sft_config
from megatron_ext.tokenizers import MegatronTokenizerText

_SEGMENTS: Final = ("cu_seqlens", "max_seqlen")


class ScriptConversations(SFTDataset):
    """An ``SFTDataset`` with the settings of a script's ``--sft-`` flags.

    A conversation alone in its sample is a row like any other, under causal attention, since the
    padding comes last; its sample has no ``cu_seqlens`` and ``max_seqlen``, which any attention
    then takes. With ``--sft-packing`` a sample has both, as the
    attention of Transformer Engine reads them, or with ``--transformer-impl local`` the mask that
    keeps conversations apart.

    Raises:
        ConfigError: The tokenizer is of ``--legacy-tokenizer``, the attention of the flags would
            not keep packed conversations apart, or the release cannot send such a microbatch.
    """

    def __init__(
        self,
        dataset: SFTRecords,
        dataset_path: str | None,
        indices: NDArray[np.integer[Any]],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        arguments = _script_arguments()
        self._is_packed = _settings().packing != "none"
        if self._is_packed:
            _check_attention(arguments)
            _check_bounds(arguments)
        if not self._is_packed or arguments.transformer_impl == "local":
            _check_microbatch(arguments)
        super().__init__(
            dataset, dataset_path, indices, num_samples, index_split, _with_settings(config)
        )

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> SFTRecords:
        """The records of a file, a folder or a pattern."""
        if not isinstance(config.tokenizer, MegatronTokenizerText):
            raise ConfigError(
                "the tokenizers of --legacy-tokenizer do not tell which tokens are trained",
                got=type(config.tokenizer).__name__,
                fix="leave --legacy-tokenizer out",
                where="--sft",
            )
        return SFTDataset.build_low_level_dataset(dataset_path, _with_settings(config))

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """One sample; see ``SFTDataset``."""
        sample = super().__getitem__(idx)
        arguments = _script_arguments()
        if not self._is_packed or arguments.transformer_impl == "local":
            left_out = _SEGMENTS[:1] if _longest_is_awaited(arguments) else _SEGMENTS
            return {name: value for name, value in sample.items() if name not in left_out}
        if arguments.micro_batch_size > 1:
            return sample
        # One sample needs no equal lengths, and attention reads a segment for every two bounds.
        return {**sample, "cu_seqlens": torch.unique_consecutive(sample["cu_seqlens"])}


def _script_arguments() -> Any:
    """Megatron-LM's parsed arguments."""
    from megatron.training import get_args

    return get_args()


def _settings() -> SFTConfig:
    return sft_config(_script_arguments())


def _with_settings(config: Any) -> Any:
    """A copy of a script's configuration with the field ``sft`` of an ``SFTDatasetConfig``."""
    changed = copy.copy(config)
    changed.sft = _settings()
    return changed


def _release() -> tuple[int, int]:
    """The installed or checked-out release of Megatron-LM, as of 0.16."""
    major, minor, *_ = megatron.core.__version__.split(".")
    return int(major), int(minor)


def _longest_is_awaited(arguments: Any) -> bool:
    """Whether ranks of a tensor-parallel group await the first one's ``max_seqlen``.

    From 0.17 on they do under ``--sft``, also of a sample without bounds; in 0.16 they do not.
    """
    return arguments.tensor_model_parallel_size > 1 and _release() >= (0, 17)


def _check_microbatch(arguments: Any) -> None:
    """Check that tensor-parallel ranks await as many lengths as are sent to them."""
    is_longer = arguments.micro_batch_size > 1 and _longest_is_awaited(arguments)
    if is_longer and _release() < (0, 19):
        raise ConfigError(
            "tensor-parallel ranks of this release await one sample of conversations at a time",
            got=arguments.micro_batch_size,
            expected="1",
            where="--micro-batch-size",
        )


def _check_bounds(arguments: Any) -> None:
    """Check that tensor-parallel ranks await the longest length that is sent with bounds.

    In 0.16 the first rank sends it and the others do not await it, so that they would take the next
    broadcast for it.
    """
    is_sent = arguments.transformer_impl != "local" and arguments.tensor_model_parallel_size > 1
    if is_sent and _release() < (0, 17):
        raise ConfigError(
            "tensor-parallel ranks of Megatron-LM 0.16 do not await the bounds of conversations",
            got=f"--sft-packing with {arguments.tensor_model_parallel_size}",
            expected="1, Megatron-LM 0.17 or later, or --transformer-impl local",
            where="--tensor-model-parallel-size",
        )


def _check_attention(arguments: Any) -> None:
    """Check that the attention keeps the conversations of a sample apart."""
    has_mask = arguments.create_attention_mask_in_dataloader
    refused = None
    if arguments.transformer_impl != "local":
        if has_mask:
            refused = (
                "the attention of Transformer Engine reads bounds, not a mask",
                "--no-create-attention-mask-in-dataloader",
            )
    elif not has_mask or arguments.masked_softmax_fusion:
        refused = (
            "the local attention keeps conversations apart by their mask alone",
            "--no-masked-softmax-fusion, without --no-create-attention-mask-in-dataloader",
        )
    if refused is not None:
        raise ConfigError(refused[0], fix=f"pass {refused[1]}", where="--sft-packing")
