"""Reading and writing of the ``.pt`` files of NeMo RL's x-token tools. Vs rows, K slots a row.

No code in a file is run. torch is imported only where such a file is read or written.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ProjectionError
from megatron_ext.projection.compressed_rows import write_projection
from megatron_ext.projection.nemo.legacy_schema import (
    LEGACY_CONTENT,
    NO_COLUMN,
    import_torch,
    legacy_entries,
)
from megatron_ext.projection.nemo.loose_entries import LooseEntries
from megatron_ext.projection.projection_matrix import ProjectionMatrix

LegacyDtype = Literal["float32", "bfloat16"]


def read_legacy_file(path: Path) -> LooseEntries:
    """Read the entries of a ``.pt`` file.

    Raises:
        ProjectionError: Missing, truncated or foreign file, one that holds objects or code, or
            entries that are not ids and weights.
        MissingDependencyError: torch is not installed.
    """
    content = _load(path)
    try:
        return legacy_entries(content)
    except ProjectionError as error:
        raise ProjectionError(str(error), where=path) from error


def write_legacy_file(
    projection: ProjectionMatrix,
    path: Path,
    *,
    slot_count: int | None = None,
    dtype: LegacyDtype = "float32",
) -> None:
    """Replace ``path`` by the table of ``projection`` in one step.

    Rows are in order of falling share, empty slots hold -1 and 0. The metadata entries
    ``student_model_id`` and ``teacher_model_id`` become keys of their own; the rest, and the mask
    of exact rows, are in keys that the original readers ignore.

    Args:
        projection: Projection to write.
        path: File name in an existing folder.
        slot_count: K; by default that of the longest row, at least 2, because readers take a row
            for exact where its second slot is empty.
        dtype: Dtype of the likelihoods.

    Raises:
        ProjectionError: A row is longer than ``slot_count``, or the file cannot be written.
        MissingDependencyError: torch is not installed.
    """
    torch = import_torch()
    indices, likelihoods = _table(projection, slot_count)
    metadata = dict(projection.metadata)
    content = {
        "indices": torch.from_numpy(indices),
        "likelihoods": torch.from_numpy(likelihoods).to(getattr(torch, dtype)),
        "student_model_id": metadata.pop("student_model_id", ""),
        "teacher_model_id": metadata.pop("teacher_model_id", ""),
        # No row has a filler here, so the last slot is like the others.
        "enable_scale_trick": False,
        "shape": list(projection.shape),
        "vocab_sizes": list(projection.vocab_sizes),
        "is_exact_row": torch.from_numpy(projection.is_exact_row.copy()),
        "metadata": metadata,
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_projection(path, buffer.getvalue())


def _load(path: Path) -> Any:
    torch = import_torch()
    import pickle

    try:
        _check_sums(path)
        # Given a path, torch would choose the format by its suffix.
        with path.open("rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ProjectionError("there is no projection file", where=path) from None
    except pickle.UnpicklingError as error:
        raise ProjectionError(
            "the file is damaged, or holds more than tensors, numbers and names",
            where=path,
            got=_refused(error),
            expected=LEGACY_CONTENT,
            fix="copy it again, or make it again where you trust it: a projection needs no code",
        ) from error
    except Exception as error:
        # torch raises any error of its archive reader, its unpickler or its storages.
        raise ProjectionError(
            "the file is not a complete torch file",
            where=path,
            got=_first_line(error),
            expected=LEGACY_CONTENT,
            fix="copy it again, or build it again from the two tokenizers",
        ) from error


def _check_sums(path: Path) -> None:
    """Check the checksum of each record of a zip archive, which torch ignores.

    Raises:
        OSError, zipfile.BadZipFile: The file cannot be read, or a record is damaged.
    """
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            if file.read(2) == b"PK":
                raise zipfile.BadZipFile("an archive that is cut off")
        return
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"{damaged} is not as it was written, by its checksum")


def _refused(error: Exception) -> str:
    """The name that torch's unpickler refuses, without its advice."""
    _, found, rest = str(error).partition("GLOBAL ")
    return rest.split()[0] if found else "a pickle that torch cannot read"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return next((line.strip() for line in lines if line.strip()), type(error).__name__)


def _table(
    projection: ProjectionMatrix, slot_count: int | None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Indices and likelihoods [Vs, K], the largest share of a row first."""
    entries = LooseEntries.of(projection).merged()
    longest = int(entries.row_sizes.max(initial=0))
    slot_count = max(longest, 2) if slot_count is None else slot_count
    if longest > slot_count:
        raise ProjectionError(
            "a row has more entries than the table has slots",
            got=f"{longest} entries in row {int(np.argmax(entries.row_sizes))}",
            expected=f"at most {slot_count}",
        )
    indices = np.full((entries.height, slot_count), NO_COLUMN, dtype=np.int64)
    likelihoods = np.zeros((entries.height, slot_count), dtype=np.float32)
    indices[entries.rows, entries.slots] = entries.columns
    likelihoods[entries.rows, entries.slots] = entries.weights
    return indices, likelihoods
