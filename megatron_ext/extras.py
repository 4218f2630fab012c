"""Optional packages, and the extras of the installation that bring them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from megatron_ext.errors import MissingDependencyError

EXTRA_OF: Final = {
    "awkward": "fast",
    "gigatoken": "fast",
    "lm_eval": "lm-eval",
    "matplotlib": "train",
    "megatron": "train",
    "numba": "train",
    "orjson": "data",
    "psutil": "train",
    "pyarrow": "data",
    "regex": "audit",
    "safetensors": "train",
    "sentencepiece": "sentencepiece",
    "tensorboard": "watch",
    "tiktoken": "tiktoken",
    "tokenizers": "huggingface",
    "torch": "train",
    "tqdm": "data",
    "transformers": "transformers",
    "triton": "gpu",
    "wandb": "watch",
}
"""Import name of a package -> the smallest extra that brings it."""

_PACKAGE_OF: Final = {"megatron": "megatron-core"}
"""Import name of a package -> its distribution, where the names differ."""


def missing_package(name: str, *, feature: str) -> MissingDependencyError:
    """Error about the missing package with the import name ``name``, with its extra."""
    return MissingDependencyError(
        _PACKAGE_OF.get(name, name), extra=EXTRA_OF[name], feature=feature
    )


@contextmanager
def needed_packages(feature: str) -> Iterator[None]:
    """Report the extra to install where an import in the block finds no package.

    Raises:
        MissingDependencyError: A package of ``EXTRA_OF`` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_OF:
            raise
        raise missing_package(error.name, feature=feature) from None


@contextmanager
def large_imports() -> Iterator[None]:
    """Import torch and megatron-core in the block without looking for garbage.

    There is none among what they make, and a third of their time would go into the search.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
