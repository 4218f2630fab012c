"""The embeddings of a model's vocabulary, in a file or among the weights of a local model."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from megatron_ext.errors import ProjectionError
from megatron_ext.extras import needed_packages
from megatron_ext.projection.building.embedding_matrix import EmbeddingMatrix

EMBEDDING_NAMES: Final = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
"""How tensors of input embeddings end, in the models of transformers and in Llama's own files."""


def embeddings_of(
    model: str, file: Path | None, tensor: str | None, *, role: str
) -> EmbeddingMatrix:
    """The embeddings in ``file``, or of the model in the folder ``model``.

    Raises:
        ProjectionError: There are none, or they are no matrix of numbers.
    """
    if file is None:
        file, tensor = _of_model(Path(model), role)
    if file.suffix != ".npy":
        return EmbeddingMatrix(file, tensor)
    try:
        return EmbeddingMatrix(np.load(file, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError) as error:
        raise ProjectionError(
            f"the {role}'s embeddings cannot be read",
            where=file,
            got=error,
            expected="an array of numbers that numpy.save wrote",
        ) from error


def _of_model(folder: Path, role: str) -> tuple[Path, str]:
    """The weights file with the input embeddings, and their name."""
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        for name in _names_in(path):
            if name.endswith(EMBEDDING_NAMES):
                return path, name
    raise ProjectionError(
        f"there are no embeddings of the {role}",
        where=folder,
        expected="a folder with the model's weights in .safetensors files",
        fix=f"name a file: --{role}-embeddings",
    )


def _names_in(path: Path) -> list[str]:
    with needed_packages("a model's weights"):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, framework="numpy") as file:
            return sorted(file.keys())
    except (OSError, SafetensorError) as error:
        raise ProjectionError("the weights cannot be read", where=path, got=error) from error
