"""Files of projections: safetensors files that name their pair, and NeMo RL's ``.pt`` files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.constants import __version__
from megatron_ext.errors import ProjectionError
from megatron_ext.imports import needed_packages
from megatron_ext.projection.compressed_rows import check_built_for, write_projection
from megatron_ext.projection.nemo.inspection import load_legacy_matrix
from megatron_ext.projection.projection_matrix import ARRAYS, ProjectionMatrix

if TYPE_CHECKING:
    from megatron_ext.tokenizers.base import ByteTokenizer

FORMAT: Final = "megatron-ext-projection"
FORMAT_VERSION: Final = "2"
READ_VERSIONS: Final = ("1", "2")
"""Version 1 has neither ``vocab_sizes``, as its projections have no padding, nor ``sha256``."""
_TORCH_STARTS: Final = (b"PK", b"\x80")
"""First bytes of a zip archive, and of a pickle as old releases write it."""
_HEAD_BYTES: Final = 9
"""Bytes to tell a file by: a safetensors file begins with a length of eight bytes and JSON."""
FILE_ENTRIES: Final = (
    "format",
    "format_version",
    "shape",
    "vocab_sizes",
    "sha256",
    "written_by",
)
"""Metadata of the file, as opposed to that of the projection."""


def save_matrix(projection: ProjectionMatrix, path: Path) -> None:
    """Replace ``path`` by ``projection`` in one step.

    Raises:
        ProjectionError: The folder does not exist or cannot be written to.
        MissingDependencyError: safetensors is not installed.
    """
    save = _import_safetensors().numpy.save
    arrays = {name: np.ascontiguousarray(getattr(projection, name)) for name in ARRAYS}
    content = save(
        arrays,
        metadata={
            **projection.metadata,
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "shape": _product(projection.shape),
            "vocab_sizes": _product(projection.vocab_sizes),
            "sha256": _digest(arrays),
            "written_by": f"megatron-ext {__version__}",
        },
    )
    write_projection(path, content)


def load_matrix(
    path: Path,
    student: ByteTokenizer | None,
    teacher: ByteTokenizer | None,
    tell: Callable[[str], None],
) -> ProjectionMatrix:
    """Read the file at ``path``; see ``SparseProjection.load``."""
    if is_legacy_file(path):
        return load_legacy_matrix(path, student, teacher, tell)
    metadata, arrays = _read(path)
    _check_whole(path, metadata, arrays)
    for role, tokenizer in (("student", student), ("teacher", teacher)):
        if tokenizer is not None:
            check_built_for(path, metadata, role, tokenizer)
    shape = _sizes(path, metadata, "shape")
    vocab_sizes = shape
    if metadata["format_version"] != "1":
        vocab_sizes = _sizes(path, metadata, "vocab_sizes")
    of_projection = {name: text for name, text in metadata.items() if name not in FILE_ENTRIES}
    try:
        return ProjectionMatrix(
            shape=shape,
            metadata=of_projection,
            vocab_sizes=vocab_sizes,
            **{name: arrays[name] for name in ARRAYS},
        )
    except ProjectionError as error:
        raise ProjectionError(str(error), where=path) from error


def is_legacy_file(path: Path) -> bool:
    """Whether a file is one of torch's, by its first bytes."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return head.startswith(_TORCH_STARTS) and head[8:] != b"{"


def _check_whole(path: Path, metadata: dict[str, str], arrays: dict[str, NDArray[Any]]) -> None:
    """Refuse a file of another format or version, and arrays that differ from those written."""
    if metadata.get("format") != FORMAT or metadata.get("format_version") not in READ_VERSIONS:
        version = f"{metadata.get('format')} version {metadata.get('format_version')}"
        raise ProjectionError(
            "the file is not a projection that this version reads",
            where=path,
            got=version if "format" in metadata else "a safetensors file without a format entry",
            expected=f"{FORMAT} version {' or '.join(READ_VERSIONS)}",
            fix="build the projection again from the two tokenizers",
        )
    missing = [name for name in ARRAYS if name not in arrays]
    if missing:
        raise ProjectionError(
            "the projection is incomplete",
            where=path,
            got=f"no {', '.join(missing)}",
            expected=", ".join(ARRAYS),
            fix="build the projection again from the two tokenizers",
        )
    if metadata["format_version"] != "1" and metadata.get("sha256") != _digest(arrays):
        raise ProjectionError(
            "the projection is not as it was written",
            where=path,
            got=f"arrays of SHA-256 {_digest(arrays)[:12]}",
            expected=f"{str(metadata.get('sha256'))[:12]}",
            fix="copy the file again, or build it again from the two tokenizers",
        )


def _digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 (hex) of the arrays, in the order of ``ARRAYS``."""
    digest = hashlib.sha256()
    for name in ARRAYS:
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


def _product(sizes: tuple[int, int]) -> str:
    return f"{sizes[0]}x{sizes[1]}"


def _sizes(path: Path, metadata: dict[str, str], entry: str) -> tuple[int, int]:
    """The two numbers of a metadata entry that ``_product`` wrote."""
    rows, _, columns = metadata.get(entry, "").partition("x")
    if not (rows.isdecimal() and columns.isdecimal()):
        raise ProjectionError(
            f"the projection does not say its {entry.replace('_', ' ')}",
            where=path,
            got=repr(metadata.get(entry)),
            expected="student ids x teacher ids, as in 131072x32768",
            fix="build the projection again from the two tokenizers",
        )
    return int(rows), int(columns)


def _read(path: Path) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    safetensors = _import_safetensors()
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            present = set(file.keys())
            arrays = {name: file.get_tensor(name) for name in ARRAYS if name in present}
            return dict(file.metadata() or {}), arrays
    except FileNotFoundError:
        raise ProjectionError(
            "there is no projection file",
            where=path,
            fix="build it with SparseProjection.from_tokenizers(student, teacher).save(path)",
        ) from None
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ProjectionError(
            "the file is not a complete safetensors file",
            where=path,
            got=error,
            expected="a file that SparseProjection.save wrote, or a .pt file of NeMo RL's tools",
            fix="copy it again, or build it again from the two tokenizers",
        ) from error


def _import_safetensors() -> Any:
    with needed_packages("a projection file"):
        import safetensors
        import safetensors.numpy
    return safetensors
