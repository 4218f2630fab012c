"""A HuggingFace checkpoint, written file by file and published whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from megatron_ext.errors import CheckpointError
from megatron_ext.files import flush, new_folder
from megatron_ext.huggingface.checkpoint_files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE

_SHARD: Final = "model-{number:05d}-of-{count:05d}.safetensors"
_METADATA: Final = {"format": "pt"}
"""What transformers looks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """A tensor that is going to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """In the file."""
        return prod(self.shape) * self.dtype.itemsize


def shards(plans: Iterable[TensorPlan], *, max_shard_bytes: int) -> list[list[TensorPlan]]:
    """The tensors cut into files, in order; only a tensor that is larger alone makes one larger."""
    files: list[list[TensorPlan]] = []
    size = 0
    for plan in plans:
        if not files or size + plan.bytes > max_shard_bytes:
            files.append([])
            size = 0
        files[-1].append(plan)
        size += plan.bytes
    return files


def write_checkpoint(
    folder: Path,
    *,
    config: Mapping[str, Any],
    files: list[list[TensorPlan]],
    read: Callable[[list[TensorPlan]], dict[str, torch.Tensor]],
    write_others: Callable[[Path], None],
) -> None:
    """Write a folder that transformers loads, under another name first.

    Args:
        folder: New, or empty.
        config: ``config.json``.
        files: What goes into which file.
        read: The tensors of one file; they are let go of when it is written.
        write_others: Adds the files of tokenizer and generation to a folder.

    Raises:
        CheckpointError: Something is there already, or the disk refuses.
    """
    final = Path(os.path.realpath(folder))
    check_target(final)
    try:
        with new_folder(final) as part:
            _write_weights(part, files, read)
            _write_json(part / CONFIG_FILE, config)
            write_others(part)
            flush(*part.iterdir(), part)
            # Takes the place of an empty folder, and fails on any other.
            part.rename(final)
            flush(final.parent)
    except OSError as error:
        raise CheckpointError(
            "cannot write the folder", where=final, got=error.strerror or error
        ) from error


def check_target(folder: Path) -> None:
    """Check that nothing is lost where a checkpoint is to be written.

    Raises:
        CheckpointError: Something is there.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            "something is there already",
            where=folder,
            got="a folder with files" if folder.is_dir() else "a file",
            fix="name another folder, or remove it",
        )


def _write_weights(
    part: Path,
    files: list[list[TensorPlan]],
    read: Callable[[list[TensorPlan]], dict[str, torch.Tensor]],
) -> None:
    weight_map: dict[str, str] = {}
    for number, plans in enumerate(files, 1):
        name = WEIGHTS_FILE
        if len(files) > 1:
            name = _SHARD.format(number=number, count=len(files))
        _save(read(plans), part / name)
        weight_map |= {plan.name: name for plan in plans}
    if len(files) > 1:
        total = sum(plan.bytes for plans in files for plan in plans)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(part / INDEX_FILE, index)


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write tensors into a file with the permissions that any new file in its folder gets."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata=_METADATA)
    # safetensors may have written another file, for its owner alone, and put it in this place.
    file.chmod(mode)


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values, indent=2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
