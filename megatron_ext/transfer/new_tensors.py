"""Tensors of a model with another vocabulary, one file at a time.

The embedding, and a head of its own, get the rows of ``shares`` or of a hypernetwork; everything
else is copied. A tied head is the embedding, so the rule of the input holds for both, unless the
model is untied.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.huggingface.checkpoint_files import CheckpointFiles
from megatron_ext.huggingface.model_settings import family_of
from megatron_ext.huggingface.stored_tensors import StoredTensor
from megatron_ext.huggingface.tensor_files import TensorPlan, TensorReader
from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig, build_tokenizer
from megatron_ext.transfer.hypernetwork import Hypernetwork, rows_fingerprint
from megatron_ext.transfer.matching_pursuit import grown_rows, pursued_shares
from megatron_ext.transfer.options import TransferOptions
from megatron_ext.transfer.row_sources import RowSources
from megatron_ext.transfer.shares import Shares, VocabularyPart, new_rows, piece_shares

DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class NewTensors:
    """Tensors of the new checkpoint; those of the vocabulary are made anew."""

    def __init__(
        self,
        files: CheckpointFiles,
        reader: TensorReader,
        *,
        sources: RowSources,
        stated: Shares | None,
        options: TransferOptions,
    ) -> None:
        self._stored, self._reader = files.tensors, reader
        self._sources, self._stated, self._options = sources, stated, options
        family = family_of(files)
        self._input, self._head = family.embedding, family.head
        self._of_vocabulary = {self._input, self._head} & self._stored.keys()
        is_stated = files.config.get("tie_word_embeddings")
        self.is_tied = self._head not in self._stored or bool(is_stated)
        self.adds_head = options.unties and self.is_tied
        if self.adds_head:
            self._of_vocabulary |= {self._head}
        self.old_rows = self._source_of(self._input).shape[0]
        count = len(sources.copied)
        multiple = options.pad_to_multiple_of
        self.height = self.old_rows if sources.is_identity else -(-count // multiple) * multiple
        self._grown: set[int] = set()
        self._donor = None if options.donor is None else _Donor(options.donor)
        self._network = None if options.hypernet is None else Hypernetwork.load(options.hypernet)
        self._predicted: torch.Tensor | None = None

    def check(self, old_size: int, new: MegatronTokenizerText) -> None:
        """Check everything that can be wrong before a file is written.

        Raises:
            CheckpointError: A matrix has too few rows, or a tensor a dtype that is not read.
            ConfigError: The donor has another vocabulary, or there are too few anchors.
        """
        self._old_size = old_size
        for name in sorted(self._of_vocabulary & self._stored.keys()):
            stored = self._stored[name]
            if stored.shape[0] < old_size:
                raise CheckpointError(
                    f"{name} has fewer rows than the model's tokenizer has ids",
                    where=stored.file,
                    got=stored.shape[0],
                    expected=f"{old_size} or more",
                )
        for name, stored in self._stored.items():
            if stored.dtype not in DTYPES:
                raise CheckpointError(
                    f"{name} is of a dtype that is not read",
                    where=stored.file,
                    got=stored.dtype,
                    expected=f"one of {', '.join(DTYPES)}",
                    fix="write the folder in bf16, with import-hf and export-hf",
                )
        if self._network is not None:
            found = rows_fingerprint(self._old_matrices(), old_size)
            if self._network.config.model != found:
                raise ConfigError(
                    "the hypernetwork was trained for another model",
                    where="--hypernet",
                    got=self._options.hypernet,
                    fix="train one with megatron-ext transfer train-hypernet",
                )
        if self._donor is not None:
            self._donor.check(new, anchors=len(self._sources.anchors[0]), k=self._options.k)

    def mean_ids(self) -> Any:
        """New ids that are the mean of all."""
        if self._options.method == "mean":
            return (self._sources.copied < 0).nonzero()[0]
        return self._sources.unmatched

    def unusual_ids(self) -> Any:
        """New ids whose rows grew far more than others from the donor's."""
        return torch.tensor(sorted(self._grown), dtype=torch.int64).numpy()

    def plans(self) -> list[TensorPlan]:
        """All tensors, in the order of the files."""
        names = [*self._stored, *sorted(self._of_vocabulary - self._stored.keys())]
        plans = []
        for name in names:
            stored = self._source_of(name)
            is_new = name in self._of_vocabulary
            shape = (self.height, *stored.shape[1:]) if is_new else stored.shape
            plans.append(TensorPlan(name=name, shape=shape, dtype=DTYPES[stored.dtype]))
        return plans

    def read(
        self, plans: list[TensorPlan], wrap: Callable[[list[str]], Any]
    ) -> dict[str, torch.Tensor]:
        """The tensors of one file."""
        return {
            name: self._matrix(name) if name in self._of_vocabulary else self._reader.whole(name)
            for name in wrap([plan.name for plan in plans])
        }

    def _matrix(self, name: str) -> torch.Tensor:
        old = self._reader.whole(name if name in self._stored else self._input)
        if self._sources.is_identity:
            return old
        part: VocabularyPart = "input"
        if name == self._head and (self.adds_head or not self.is_tied):
            part = "head"
        shares = self._shares(part)
        rows = new_rows(
            shares, old, vocab_size=self._old_size, calibrates=self._options.calibrates_norms
        )
        if self._network is not None:
            rows[torch.from_numpy(self._sources.spelled)] = self._predictions(part).to(rows.dtype)
        if self._donor is not None:
            spelled = self._sources.spelled
            self._grown.update(grown_rows(self._donor.rows(part), rows, spelled))
        if self.height == len(rows):
            return rows
        padded = rows.new_zeros(self.height, rows.shape[1])
        padded[: len(rows)] = rows
        return padded

    def _predictions(self, part: VocabularyPart) -> torch.Tensor:
        """[spelled tokens, D] of a hypernetwork, in fp32 on the host."""
        assert self._network is not None
        width = self._network.config.width
        if self._predicted is None:
            matrices = [matrix[: self._old_size].float() for matrix in self._old_matrices()]
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            pieces = [self._sources.pieces[i] for i in self._sources.spelled]
            network, rows = self._network.to(device), torch.cat(matrices, dim=1).to(device)
            self._predicted = network.predict(rows, pieces).cpu()
        # Where embedding and head are one matrix, both are the same columns.
        return self._predicted[:, :width] if part == "input" else self._predicted[:, -width:]

    def _shares(self, part: VocabularyPart) -> Shares:
        if self._stated is not None:
            return self._stated
        if self._donor is None:
            return piece_shares(self._sources, self._options.method, part)
        return pursued_shares(self._sources, self._donor.rows(part), k=self._options.k, part=part)

    def _old_matrices(self) -> list[torch.Tensor]:
        """[rows, D] of the embedding, and of a head of its own."""
        names = [self._input] if self.is_tied else [self._input, self._head]
        return [self._reader.whole(name) for name in names]

    def _source_of(self, name: str) -> StoredTensor:
        return self._stored[name if name in self._stored else self._input]


class _Donor:
    """A model with the new vocabulary, whose rows say how tokens relate."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, CheckpointFiles(folder)
        family = family_of(self._files)
        self._names = {"input": family.embedding, "head": family.head}
        if family.head not in self._files.tensors or self._files.config.get("tie_word_embeddings"):
            self._names["head"] = self._names["input"]
        self._read: tuple[str, torch.Tensor] | None = None

    def check(self, new: MegatronTokenizerText, *, anchors: int, k: int) -> None:
        """Check the donor's vocabulary and the number of anchors.

        Raises:
            ConfigError: It is not the new one, or there are fewer anchors than ``k``.
            CheckpointError: It has fewer rows than ids.
        """
        found = build_tokenizer(TokenizerConfig(model=str(self._folder)))
        if found.fingerprint() != new.fingerprint():
            raise ConfigError(
                "the donor has another vocabulary than the new tokenizer",
                where="--donor",
                got=f"{self._folder.name}, {found.vocab_size} ids",
                expected=f"a model with the {new.vocab_size} ids of the new tokenizer",
            )
        if not 1 <= k <= anchors:
            raise ConfigError(
                "there are too few common tokens for so many atoms",
                where="--k",
                got=k,
                expected=f"1 to {anchors}, the ordinary tokens that both vocabularies have",
            )
        for name in set(self._names.values()):
            stored = self._files.tensors[name]
            if stored.shape[0] < new.vocab_size:
                raise CheckpointError(
                    f"the donor's {name} has fewer rows than its tokenizer has ids",
                    where=stored.file,
                    got=stored.shape[0],
                    expected=f"{new.vocab_size} or more",
                )

    def rows(self, part: VocabularyPart) -> torch.Tensor:
        """Rows [rows, D] of a matrix, on the GPU where there is one."""
        name = self._names[part]
        if self._read is None or self._read[0] != name:
            self._read = None
            with TensorReader(self._files) as reader:
                whole = reader.whole(name)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self._read = (name, whole.to(device))
        return self._read[1]
