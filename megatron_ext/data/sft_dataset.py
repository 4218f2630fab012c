"""``SFTDataset``: conversations as a megatron-core dataset, and its batches in the packed form.

S sequence length, B samples of an epoch or a batch, N segments with tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray

from megatron_ext.conversation.rendering.template_limits import stopped_at
from megatron_ext.data.sft_plan import SFTPlan, SFTReport
from megatron_ext.data.sft_records import SFTConfig, SFTRecords
from megatron_ext.data.sft_samples import SFTReader, SFTSample, laid_out
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.tokenizers import MegatronTokenizerText

_PER_SAMPLE = ("tokens", "labels", "loss_mask", "position_ids")


def packed_batch(
    batch: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], PackedSeqParams]:
    """Convert a collated batch to the packed form (``thd``) of Transformer Engine's attention.

    Args:
        batch: Samples of an ``SFTDataset``, collated: ``tokens``, ``labels``, ``loss_mask`` and
            ``position_ids`` [B, S], ``cu_seqlens`` [B, S + 1], ``max_seqlen`` [B].

    Returns:
        The first four as one long sample [1, B * S], and the bounds of its segments:
        ``cu_seqlens_q`` and ``cu_seqlens_kv`` [N + 1] int32. The padding of a segment belongs to it
        and comes last, so that no token attends to it.
    """
    bounds, length = batch["cu_seqlens"], batch["tokens"].shape[1]
    starts = torch.arange(len(bounds), dtype=bounds.dtype, device=bounds.device)[:, None] * length
    # A sample's first bound, and the repeats of its last, equal the bound before: drop duplicates.
    ends = (bounds[:, 1:] + starts)[bounds[:, 1:] > bounds[:, :-1]]
    cu_seqlens = torch.cat([ends.new_zeros(1), ends])
    longest = int(batch["max_seqlen"].max())
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return {name: batch[name].reshape(1, -1) for name in _PER_SAMPLE}, params


def attention_mask(cu_seqlens: torch.Tensor, sequence_length: int) -> torch.Tensor:
    """Mask of later positions and of positions in other segments.

    Args:
        cu_seqlens: [B, S + 1]
        sequence_length: S.

    Returns:
        [B, 1, S, S] bool, True where attention is masked, for megatron-core's unfused attention. It
        has S * S elements a sample: for long sequences use ``packed_batch``.
    """
    positions = torch.arange(sequence_length, device=cu_seqlens.device)
    segments = torch.searchsorted(
        cu_seqlens.contiguous(),
        positions.to(cu_seqlens.dtype).expand(len(cu_seqlens), -1).contiguous(),
        right=True,
    )
    is_other = segments[:, None, :, None] != segments[:, None, None, :]
    return is_other | (positions[:, None] < positions[None, :])


@dataclass
class SFTDatasetConfig(GPTDatasetConfig):  # type: ignore[misc]
    """megatron-core's ``GPTDatasetConfig`` with the settings of ``SFTDataset``."""

    sft: SFTConfig = field(default_factory=SFTConfig)
    """Treatment of the records."""


class SFTDataset(MegatronDataset):  # type: ignore[misc]
    """Dataset of conversations in JSON lines, tokenized as they are read.

    It replaces Megatron-LM's class of this name in a ``BlendedMegatronDatasetBuilder``, whose paths
    are files, folders or patterns; ``SFTDataset.from_path`` needs none. A sample is a function
    of its index, independent of ranks and workers, so there is no state to save. The first use of a
    data set reads all of it once to plan samples; the plan is kept in ``path_to_cache``, or in
    a hidden folder beside the data. Epochs follow one another up to ``num_samples``.

    The settings are the ``sft`` field of the configuration (defaults with a ``GPTDatasetConfig``).
    With ``context_parallel_size`` above 1 each conversation is padded to a multiple of twice that.
    With ``create_attention_mask`` a sample has the mask that separates conversations. Position ids
    start from 0 in each conversation whatever ``reset_position_ids`` says.

    Args:
        dataset: Result of ``build_low_level_dataset``.
        dataset_path: Path of its files.
        indices: Records of this split.
        num_samples: Length; None for one epoch.
        index_split: The split.
        config: The configuration.

    Attributes:
        report: Counts of the records read and left out.

    Raises:
        ConfigError: A setting cannot be used.
        DataError: A record is refused (with file and line), or none is left.
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
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        _check_config(config)
        if num_samples is not None and num_samples < 0:
            raise ConfigError(
                "the value is too small", got=num_samples, expected=">= 0", where="num_samples"
            )
        tokenizer: MegatronTokenizerText = config.tokenizer
        self._reader = SFTReader(
            records=dataset,
            tokenizer=tokenizer,
            config=_sft_config(config),
            sequence_length=config.sequence_length,
            multiple=_multiple(config),
        )
        # Padding is recognised by position, so any valid id will do.
        self._pad = next((i for i in (tokenizer.pad_id, tokenizer.eod) if i is not None), 0)
        self._plan = SFTPlan.of(self._reader, indices, seed=config.random_seed)
        self._order = None
        if self._reader.config.shuffle:
            epochs = max(-(-len(self) // len(self._plan)), 1)
            self._order = self._plan.order(seed=config.random_seed, epochs=epochs)
        self.unique_identifiers["plan"] = self._plan.identity

    @classmethod
    def from_path(
        cls,
        path: str,
        tokenizer: MegatronTokenizerText,
        *,
        sequence_length: int,
        num_samples: int | None = None,
        seed: int = 1234,
        sft: SFTConfig | None = None,
        context_parallel_size: int = 1,
        create_attention_mask: bool = False,
        path_to_cache: str | None = None,
    ) -> SFTDataset:
        """A dataset of all records of a file, a folder or a pattern, without a builder."""
        config = SFTDatasetConfig(
            random_seed=seed,
            sequence_length=sequence_length,
            blend=([path], None),
            split="1,0,0",
            path_to_cache=path_to_cache,
            tokenizer=tokenizer,
            reset_position_ids=True,
            reset_attention_mask=True,
            eod_mask_loss=False,
            create_attention_mask=create_attention_mask,
            context_parallel_size=context_parallel_size,
            sft=SFTConfig() if sft is None else sft,
        )
        records = cls.build_low_level_dataset(path, config)
        return cls(records, path, np.arange(len(records)), num_samples, Split.train, config)

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> SFTRecords:
        """The records of a file, a folder or a pattern."""
        if dataset_path is None:
            raise DataError(
                "there is no data", expected="JSON lines of conversations", fix="pass a data path"
            )
        cache = config.path_to_cache
        return SFTRecords(
            dataset_path,
            cache_folder=None if cache is None else Path(cache),
            config=_sft_config(config),
        )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: SFTRecords) -> int:
        """Number of records, which the splits divide."""
        return len(low_level_dataset)

    @property
    def report(self) -> SFTReport:
        return self._plan.report

    def __len__(self) -> int:
        return len(self._plan) if self.num_samples is None else self.num_samples

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """One sample.

        Args:
            idx: Number of the sample; None for one that trains nothing, to fill a batch.

        Returns:
            The arrays of ``laid_out``: ``tokens`` [S] int64, ``labels`` [S] int64 (-100
            where nothing is trained), ``loss_mask`` [S] float32, ``position_ids`` [S] int64,
            ``cu_seqlens`` [S + 1] int32 (filled up with S) and ``max_seqlen`` [] int32; also
            ``attention_mask`` [1, S, S] bool where the configuration asks for it.

        Raises:
            IndexError: There is no such sample.
            DataError: A file has changed since the plan was made.
        """
        samples = [] if idx is None else self._samples(idx)
        length = self.config.sequence_length
        arrays = laid_out(samples, length, multiple=self._reader.multiple, pad=self._pad)
        sample = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
        if getattr(self.config, "create_attention_mask", False):
            sample["attention_mask"] = attention_mask(sample["cu_seqlens"][None], length)[0]
        return sample

    def _samples(self, idx: int) -> list[SFTSample]:
        if not 0 <= idx < len(self):
            raise IndexError(f"sample {idx} of {len(self)}")
        number = idx % len(self._plan) if self._order is None else int(self._order["order"][idx])
        with stopped_at(self._plan.moment):
            return [self._sample(*place) for place in self._plan.conversations(number)]

    def _sample(self, record: int, piece: int, length: int) -> SFTSample:
        sample = self._reader.sample(record, piece)
        if len(sample) != length:
            raise DataError(
                "the conversation has become another since the plan of the samples was made",
                got=f"{len(sample)} tokens",
                expected=str(length),
                fix="delete the cache",
                where=self._reader.records.place(record),
            )
        return sample


def _sft_config(config: BlendedMegatronDatasetConfig) -> SFTConfig:
    sft: SFTConfig | None = getattr(config, "sft", None)
    return SFTConfig() if sft is None else sft


def _multiple(config: BlendedMegatronDatasetConfig) -> int:
    """Multiple of a conversation's length: each context-parallel rank takes two pieces of it."""
    size: int | None = getattr(config, "context_parallel_size", None)
    return 1 if size is None or size == 1 else 2 * size


def _check_config(config: BlendedMegatronDatasetConfig) -> None:
    for name, fix in (
        ("eod_mask_loss", "what is trained follows the prompt format"),
        ("hybrid_context_parallel", "it cuts samples in another way"),
    ):
        if getattr(config, name, False):
            raise ConfigError(f"{name} means nothing for conversations: {fix}", fix=f"unset {name}")
    for name, least in (("context_parallel_size", 1), ("random_seed", 0), ("sequence_length", 1)):
        value = getattr(config, name, None)
        if value is not None and value < least:
            raise ConfigError(
                "the value is too small", got=value, expected=f">= {least}", where=name
            )
