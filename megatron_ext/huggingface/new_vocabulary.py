"""HuggingFace checkpoints with the vocabulary of another tokenizer.

A new token starts as the mean of the old tokens that stand for it. With ``P`` [V', V] the
projection from the new vocabulary to the old one, whose rows sum to 1, and ``E`` [V, D] an
embedding or a head,

    E' = P E

A token of both vocabularies is a row with one entry and keeps its values bit for bit. An empty row
of ``P``, of a control token without a counterpart, becomes the mean of ``E`` over the old tokens.
All other weights are unchanged. Sums are in fp32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from megatron_ext.errors import CheckpointError, MegatronExtError
from megatron_ext.huggingface.checkpoint_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    TOKENIZER_FILES,
    CheckpointFiles,
    read_json,
)
from megatron_ext.huggingface.families import FAMILIES
from megatron_ext.huggingface.model_settings import family_of
from megatron_ext.huggingface.tensor_files import (
    TensorPlan,
    TensorReader,
    check_target,
    shards,
    write_checkpoint,
)
from megatron_ext.projection.sparse_projection import SparseProjection
from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig, build_tokenizer
from megatron_ext.tokenizers.assets import PROMPT_FILE
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.tokenizers.metadata import METADATA_FILE

_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_ROWS: Final = 8192
"""New rows computed at a time."""


def write_with_vocabulary(
    model: Path,
    output: Path,
    *,
    projection: SparseProjection,
    tokenizer: MegatronTokenizerText,
    tokenizer_folder: Path,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write ``model`` with the vocabulary of another tokenizer to a new folder.

    Peak memory: the tensors of one file, and one matrix of the old vocabulary.

    Args:
        model: Folder of a model of a supported family.
        output: New or empty folder; renamed into place when complete.
        projection: From the new vocabulary to the model's.
        tokenizer: The new tokenizer.
        tokenizer_folder: Folder of its files, which are copied with other tokenizer files there.

    Raises:
        CheckpointError: The model cannot be read, has fewer rows than tokens, or the output cannot
            be written; or the copied files do not give the same tokenizer.
    """
    check_target(output)
    files = CheckpointFiles(model)
    family, ids = family_of(files), _control_ids(tokenizer)
    copied = _tokenizer_files(tokenizer, tokenizer_folder)
    config = {**files.config, "vocab_size": projection.shape[0], **ids}
    _check_copies(tokenizer, tokenizer_folder, copied, config)
    with TensorReader(files) as reader:
        tensors = _NewTensors(files, reader, _vocabulary_names(family.architecture), projection)
        write_checkpoint(
            output,
            config=config,
            files=shards(tensors.plans(), max_shard_bytes=max_shard_bytes),
            read=tensors.read,
            write_others=lambda folder: _write_side_files(model, copied, folder, ids),
        )


class _NewTensors:
    """Tensors of the new checkpoint; those of the vocabulary are projected."""

    def __init__(
        self,
        files: CheckpointFiles,
        reader: TensorReader,
        of_vocabulary: frozenset[str],
        projection: SparseProjection,
    ) -> None:
        self._stored, self._reader = files.tensors, reader
        self._of_vocabulary, self._projection = of_vocabulary, projection
        for name in sorted(of_vocabulary & self._stored.keys()):
            stored = self._stored[name]
            if stored.shape[0] < projection.vocab_sizes[1]:
                raise CheckpointError(
                    f"{name} has fewer rows than the model's tokenizer has ids",
                    where=stored.file,
                    got=stored.shape[0],
                    expected=f"{projection.vocab_sizes[1]} or more",
                )
        for name, stored in self._stored.items():
            if stored.dtype not in _DTYPES:
                raise CheckpointError(
                    f"{name} is of a dtype that is not read",
                    where=stored.file,
                    got=stored.dtype,
                    expected=f"one of {', '.join(_DTYPES)}",
                )

    def plans(self) -> list[TensorPlan]:
        """All tensors, in the order of the files."""
        height = self._projection.shape[0]
        return [
            TensorPlan(
                name=name,
                shape=(height, *stored.shape[1:]) if name in self._of_vocabulary else stored.shape,
                dtype=_DTYPES[stored.dtype],
            )
            for name, stored in self._stored.items()
        ]

    def read(self, plans: list[TensorPlan]) -> dict[str, torch.Tensor]:
        """The tensors of one file."""
        found = {}
        for plan in plans:
            whole = self._reader.rows(plan.name, slice(None), None)
            is_new = plan.name in self._of_vocabulary
            found[plan.name] = projected_rows(self._projection, whole) if is_new else whole
        return found


def projected_rows(projection: SparseProjection, old: torch.Tensor) -> torch.Tensor:
    """``P E`` [V', D] of an embedding or head ``old`` [V, D], in its dtype.

    Equivalent: ``torch.from_numpy(projection.toarray()) @ old``, with the mean of ``old`` over the
    vocabulary in empty rows.
    """
    new = torch.empty(projection.shape[0], old.shape[1], dtype=old.dtype)
    mean = old[: projection.vocab_sizes[1]].mean(dim=0, dtype=torch.float32)
    bounds = torch.from_numpy(projection.indptr.astype("int64"))
    columns = torch.from_numpy(projection.indices.astype("int64"))
    shares = torch.from_numpy(projection.values.astype("float32"))
    for start in range(0, projection.shape[0], _ROWS):
        counts = bounds[start : start + _ROWS + 1].diff()
        entries = slice(int(bounds[start]), int(bounds[start + len(counts)]))
        owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
        block = torch.zeros(len(counts), old.shape[1])
        block.index_add_(0, owner, old[columns[entries]].float() * shares[entries, None])
        block[counts == 0] = mean
        new[start : start + len(counts)] = block.to(old.dtype)
    return new


def _vocabulary_names(architecture: str) -> frozenset[str]:
    """Names of the tensors with a row for each token."""
    return frozenset(
        part.name
        for rule in FAMILIES[architecture].rules
        for part in rule.parts
        if part.shape[0] == "vocabulary"
    )


def _control_ids(tokenizer: ByteTokenizer) -> dict[str, int | None]:
    """Control-token ids by their keys in ``config.json`` and the generation config."""
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }


def _tokenizer_files(tokenizer: MegatronTokenizerText, folder: Path) -> dict[str, Path]:
    """Files of the tokenizer and other tokenizer files of its folder, by name."""
    names = (*TOKENIZER_FILES, METADATA_FILE, PROMPT_FILE)
    beside = {name: folder / name for name in names if (folder / name).is_file()}
    return beside | {file.name: file for file in tokenizer.files().values()}


def _check_copies(
    tokenizer: MegatronTokenizerText,
    folder: Path,
    files: Mapping[str, Path],
    config: Mapping[str, Any],
) -> None:
    """Check that copies of the files beside a model's configuration give the same tokenizer.

    Raises:
        CheckpointError: They give another tokenizer, or none.
    """
    with TemporaryDirectory() as copy:
        for name, file in files.items():
            shutil.copyfile(file, Path(copy) / name)
        (Path(copy) / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
        try:
            found = build_tokenizer(TokenizerConfig(model=copy)).fingerprint()
        except MegatronExtError as error:
            found = str(error).replace(copy, "the copy")
    if found != tokenizer.fingerprint():
        raise CheckpointError(
            "a copy of the new tokenizer's files is not the tokenizer",
            where=folder,
            got=found,
            expected=f"the vocabulary {tokenizer.fingerprint()[:12]}",
            fix="write it to a folder of its own first: tokenizer.save_pretrained(folder)",
        )


def _write_side_files(
    model: Path, tokenizer_files: Mapping[str, Path], target: Path, ids: Mapping[str, Any]
) -> None:
    """Write the tokenizer's files, and the old generation config with the new ids."""
    for name, file in tokenizer_files.items():
        shutil.copyfile(file, target / name)
    generation = model / GENERATION_FILE
    if generation.is_file():
        values = {**read_json(generation), **ids}
        text = json.dumps(values, indent=2, ensure_ascii=False)
        (target / GENERATION_FILE).write_text(text + "\n", encoding="utf-8")
