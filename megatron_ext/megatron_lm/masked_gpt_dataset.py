"""megatron-core's GPT dataset with a loss mask per token, from files. S sequence length."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.object_storage_utils import ObjectStorageConfig, is_object_storage_path
from megatron.core.datasets.utils import Split
from numpy.typing import NDArray

from megatron_ext.documents.id_tokenizers import loss_mask_prefix
from megatron_ext.errors import DataError
from megatron_ext.training.megatron_models.megatron_parts import needed


class MaskedGPTDataset(GPTDataset):  # type: ignore[misc]
    """A ``GPTDataset`` over the files of ``megatron-ext tokenize --tokenizer-mode sft``.

    Beside the tokens under ``PREFIX_document`` lies a dataset of the same shape under
    ``PREFIX_loss_mask`` that holds 1 for each trained token. It is read through the same document,
    sample and shuffle indices. A sample's ``loss_mask`` [S] is the one of ``GPTDataset`` (padding
    and, if asked for, EOD) times whether the token that each position predicts is trained: position
    ``t`` predicts token ``t + 1``. The first token of a document is never trained, so no position
    predicts from one document into the next.

    It takes the place of ``GPTDataset`` in a ``BlendedMegatronDatasetBuilder``.

    Raises:
        DataError: There is no loss mask beside the tokens, or it has another shape.
    """

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | None,
        indexed_indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        mask = _mask_of(indexed_dataset, dataset_path, config)
        super().__init__(
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config
        )
        # The same dataset and indices, with masks in place of tokens, and padding of 0.
        self._trained = copy.copy(self)
        self._trained.dataset = mask
        self._trained._pad_token_id = 0

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """One sample: ``tokens``, ``labels``, ``loss_mask``, ``position_ids``, all [S].

        Args:
            idx: Index of the sample; None for one that trains nothing, to fill a batch.
        """
        sample: dict[str, torch.Tensor] = super().__getitem__(idx)
        # From 0.19 on the lengths of documents, too.
        trained, *_ = needed("sample_tokens").value(self._trained, 0 if idx is None else idx)
        if not self.config.add_extra_token_to_sequence:
            # The token that the last position predicts is not in the sample.
            trained = np.append(trained, 0)
        predicted = torch.from_numpy(trained[1:]).to(sample["loss_mask"].dtype)
        return {**sample, "loss_mask": sample["loss_mask"] * predicted}


def _mask_of(
    tokens: IndexedDataset, dataset_path: str | None, config: GPTDatasetConfig
) -> IndexedDataset:
    """The loss mask that belongs to ``tokens``."""
    if dataset_path is None:
        raise DataError(
            "a mock dataset has no loss mask", fix="use GPTDataset, or data that was tokenized"
        )
    prefix = loss_mask_prefix(dataset_path)
    storage: dict[str, Any] = {"mmap": config.mmap_bin_files}
    if is_object_storage_path(prefix):
        storage["object_storage_config"] = ObjectStorageConfig(
            path_to_idx_cache=config.object_storage_cache_path
        )
    elif not IndexedDataset.exists(prefix):
        raise DataError(
            "the dataset has no loss mask",
            where=f"{prefix}.idx",
            fix="make both with megatron-ext tokenize --tokenizer-mode sft",
        )
    mask = IndexedDataset(prefix, **storage)
    for name, fits in (
        ("type", mask.index.dtype == np.uint8),
        ("shape", np.array_equal(mask.sequence_lengths, tokens.sequence_lengths)),
    ):
        if not fits:
            raise DataError(
                f"the loss mask is of another {name} than the tokens call for",
                where=prefix,
                fix="make both again with megatron-ext tokenize --tokenizer-mode sft",
            )
    return mask
