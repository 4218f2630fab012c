"""A projection on disk: one safetensors file that says which pair it is for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.atomic_file import write_bytes
from megatron_ext.errors import MissingDependencyError, ProjectionError
from megatron_ext.projection.sparse_projection import SparseProjection

if TYPE_CHECKING:
    from megatron_ext.tokenizers.byte_tokenizer import ByteTokenizer

FORMAT: Final = "megatron-ext-projection"
FORMAT_VERSION: Final = "1"
ARRAYS: Final = ("indptr", "indices", "values", "is_exact_row")
FILE_ENTRIES: Final = ("format", "format_version", "shape")
"""Metadata of the file, as opposed to that of the projection."""


def save_projection(projection: SparseProjection, path: Path) -> None:
    """Replace ``path`` by ``projection`` in one step.

    Raises:
        ProjectionError: The folder does not exist or cannot be written to.
        MissingDependencyError: safetensors is not installed.
    """
    save = _import_safetensors().numpy.save
    content = save(
        {name: np.ascontiguousarray(getattr(projection, name)) for name in ARRAYS},
        metadata={
            **projection.metadata,
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "shape": f"{projection.shape[0]}x{projection.shape[1]}",
        },
    )
    try:
        # A missing folder is more often a slip in the path than one to make.
        path.parent.stat()
        write_bytes(path, content)
    except OSError as error:
        raise ProjectionError(
            "the projection cannot be written",
            where=path,
            got=error.strerror,
            expected="a file name in an existing folder with room and write permission",
            fix="create the folder first",
        ) from error


def load_projection(
    path: Path,
    student: ByteTokenizer | None,
    teacher: ByteTokenizer | None,
) -> SparseProjection:
    """Read the file at ``path``; see ``SparseProjection.load``."""
    metadata, arrays = _read(path)
    if metadata.get("format") != FORMAT or metadata.get("format_version") != FORMAT_VERSION:
        found = f"{metadata.get('format')} version {metadata.get('format_version')}"
        raise ProjectionError(
            "the file is no projection that this version reads",
            where=path,
            got=found if "format" in metadata else "a safetensors file without a format entry",
            expected=f"{FORMAT} version {FORMAT_VERSION}",
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
    for role, tokenizer in (("student", student), ("teacher", teacher)):
        if tokenizer is not None:
            _check_built_for(path, metadata, role, tokenizer)
    shape = _shape(path, metadata)
    own = {name: text for name, text in metadata.items() if name not in FILE_ENTRIES}
    try:
        return SparseProjection(shape=shape, metadata=own, **{n: arrays[n] for n in ARRAYS})
    except ProjectionError as error:
        raise ProjectionError(str(error), where=path) from error


def _shape(path: Path, metadata: dict[str, str]) -> tuple[int, int]:
    rows, _, columns = metadata.get("shape", "").partition("x")
    if not (rows.isdecimal() and columns.isdecimal()):
        raise ProjectionError(
            "the projection does not say its shape",
            where=path,
            got=repr(metadata.get("shape")),
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
            "the file is not a whole safetensors file",
            where=path,
            got=error,
            expected="a file that SparseProjection.save wrote",
            fix="copy it again, or build it again from the two tokenizers",
        ) from error


def _check_built_for(
    path: Path, metadata: dict[str, str], role: str, tokenizer: ByteTokenizer
) -> None:
    built_for, given = metadata.get(f"{role}_fingerprint"), tokenizer.fingerprint()
    if built_for != given:
        raise ProjectionError(
            f"this projection was built for another {role}",
            where=path,
            got=_vocabulary(metadata.get(f"{role}_vocab_size"), built_for),
            expected=f"{_vocabulary(tokenizer.vocab_size, given)}, the {role} given",
            fix="build it for this pair: SparseProjection.from_tokenizers(student, teacher)",
        )


def _vocabulary(size: object, fingerprint: str | None) -> str:
    if fingerprint is None:
        return "a vocabulary without a fingerprint"
    return f"a vocabulary of {size} ids with fingerprint {fingerprint[:12]}"


def _import_safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError:
        raise MissingDependencyError(
            "safetensors", extra="train", feature="a projection file"
        ) from None
    return safetensors
