"""Arrays that one process computes and all others of the machine read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import DataError
from megatron_ext.files import begin_lock, new_folder

_NOTES: Final = "notes.json"

Arrays = Mapping[str, NDArray[Any]]
Notes = Mapping[str, Any]


@dataclass(frozen=True)
class CachedArrays:
    """A folder of arrays, mapped into memory when they are read; pickles as its path."""

    folder: Path

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[name]

    @cached_property
    def notes(self) -> dict[str, Any]:
        """Plain values that were kept with the arrays."""
        notes: dict[str, Any] = json.loads((self.folder / _NOTES).read_text(encoding="utf-8"))
        return notes

    @cached_property
    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {file.stem: np.load(file, mmap_mode="r") for file in self.folder.glob("*.npy")}

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.folder,)


def cached_arrays(
    folder: Path, key: Mapping[str, Any], build: Callable[[], tuple[Arrays, Notes]]
) -> CachedArrays:
    """What ``build`` returns, computed once for each ``key``.

    Processes that ask at the same time wait for the first. No collective is called, so each rank
    may ask or not. A folder appears whole or not at all.

    Args:
        folder: Where the folders of all keys are; made if it is missing.
        key: Plain values on which the arrays depend.
        build: Computes the arrays, and plain values to keep with them.

    Raises:
        DataError: The folder cannot be written.
    """
    place = folder / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    if not (place / _NOTES).exists():
        try:
            with begin_lock(folder / f"{place.name}.lock"):
                if not (place / _NOTES).exists():
                    _write(place, *build())
        except OSError as error:
            raise DataError(
                "the cache of the data set cannot be written",
                got=error.strerror,
                fix="name a folder that can: path_to_cache, or cache_dir of a data set of texts",
                where=folder,
            ) from error
    return CachedArrays(place)


def _write(place: Path, arrays: Arrays, notes: Notes) -> None:
    with new_folder(place) as part:
        for name, array in arrays.items():
            np.save(part / f"{name}.npy", array)
        (part / _NOTES).write_text(json.dumps(notes, indent=1) + "\n", encoding="utf-8")
        # Where there are no locks, another process may have been faster.
        with suppress(OSError):
            part.rename(place)
