"""Schema of the ``.pt`` files of NeMo RL's x-token tools. Vs rows, K slots a row.

A file holds one of these:

- a table: ``{"indices": [Vs, K] int64, "likelihoods": [Vs, K], "student_model_id",
  "teacher_model_id", "enable_scale_trick"}``, in which an index of -1 is an empty slot. Models may
  be called ``model_A_id`` and ``model_B_id``.
- a mapping of pairs: ``{(student id, teacher id): weight}``.
- a matrix [Vs, Vt], sparse or dense, by itself or as the only one in a dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ProjectionError
from megatron_ext.imports import needed_packages
from megatron_ext.projection.nemo.loose_entries import FLOAT32_ROUNDING, LooseEntries

NO_COLUMN: Final = -1
"""Index of an empty slot."""

_ROUNDING: Final = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
_OLD_NAMES: Final = {"model_A_id": "student_model_id", "model_B_id": "teacher_model_id"}
LEGACY_CONTENT: Final = (
    "a dict with indices and likelihoods, a dict of (student id, teacher id) to weight, or a matrix"
)


def legacy_entries(content: Any) -> LooseEntries:
    """Parse the content of a file.

    Raises:
        ProjectionError: It is none of the three, or its entries are not ids and weights.
    """
    torch = import_torch()
    if isinstance(content, torch.Tensor):
        return _of_matrix(content, {})
    if not isinstance(content, dict):
        raise ProjectionError(
            "the file holds no projection", got=type(content).__name__, expected=LEGACY_CONTENT
        )
    if "indices" in content and "likelihoods" in content:
        return _of_table(content)
    matrices = [
        value for value in content.values() if isinstance(value, torch.Tensor) and value.ndim == 2
    ]
    if len(matrices) == 1:
        return _of_matrix(matrices[0], _metadata(content))
    if content and all(_is_pair(key) for key in content):
        return _of_pairs(content)
    raise ProjectionError(
        "the file holds no projection",
        got=f"a dict with {', '.join(repr(key) for key in list(content)[:6]) or 'nothing in it'}",
        expected=LEGACY_CONTENT,
    )


def _is_pair(key: object) -> bool:
    return isinstance(key, tuple) and len(key) == 2 and all(isinstance(i, int) for i in key)


def _of_table(content: Mapping[str, Any]) -> LooseEntries:
    indices, likelihoods = (_tensor(content, name) for name in ("indices", "likelihoods"))
    if indices.ndim != 2 or indices.shape != likelihoods.shape or 0 in indices.shape:
        raise ProjectionError(
            "the indices and likelihoods are not one table",
            got=f"shapes {list(indices.shape)} and {list(likelihoods.shape)}",
            expected="[student ids, slots] both",
        )
    if indices.is_floating_point() or indices.is_complex():
        raise ProjectionError(
            "the indices are not whole numbers", got=indices.dtype, expected="torch.int64"
        )
    if not likelihoods.is_floating_point():
        raise ProjectionError(
            "the likelihoods are not real numbers", got=likelihoods.dtype, expected="torch.float32"
        )
    columns = indices.numpy().astype(np.int64)
    weights = _float64(likelihoods)
    if columns.min() < NO_COLUMN:
        row = int(np.argmax((columns < NO_COLUMN).any(axis=1)))
        raise ProjectionError(
            f"row {row} of the projection has a column that is not an id",
            got=int(columns[row].min()),
            expected="an id, or -1 for an empty slot",
        )
    rows, slots = np.nonzero((columns != NO_COLUMN) & (weights != 0))
    shape = _sizes(content, "shape", len(columns))
    return LooseEntries(
        rows=rows,
        columns=columns[rows, slots],
        weights=weights[rows, slots],
        slots=slots,
        height=columns.shape[0],
        width=None if shape is None else shape[1],
        vocab_sizes=_vocab_sizes(content, len(columns), shape),
        slot_count=columns.shape[1],
        rounding=_rounding(likelihoods),
        strict_rows=_strict_rows(columns, weights),
        is_exact_row=_exact_rows(content, columns.shape[0]),
        metadata=_metadata(content),
    )


def _strict_rows(columns: NDArray[np.int64], weights: NDArray[np.float64]) -> NDArray[np.bool_]:
    if columns.shape[1] < 2:
        return np.zeros(len(columns), dtype=np.bool_)
    strict: NDArray[np.bool_] = (weights[:, 0] == 1) & (columns[:, 1] == NO_COLUMN)
    return strict


def _tensor(content: Mapping[str, Any], name: str) -> Any:
    value = content[name]
    torch = import_torch()
    if not isinstance(value, torch.Tensor) or not _is_dense(value):
        raise ProjectionError(
            f"the {name} are not a dense tensor", got=type(value).__name__, expected=LEGACY_CONTENT
        )
    return value.detach()


def _is_dense(tensor: Any) -> bool:
    """Whether a tensor has a number for each element; one on ``meta`` has only a shape."""
    return bool(tensor.layout == import_torch().strided and not tensor.is_meta)


def _float64(tensor: Any) -> NDArray[np.float64]:
    array: NDArray[np.float64] = tensor.detach().double().numpy()
    return array


def _rounding(tensor: Any) -> float:
    return _ROUNDING.get(str(tensor.dtype).removeprefix("torch."), FLOAT32_ROUNDING)


def _sizes(content: Mapping[str, Any], name: str, height: int) -> tuple[int, int] | None:
    """Sizes that our writer adds; None where they are absent or do not fit the table."""
    sizes = content.get(name)
    if not isinstance(sizes, list) or len(sizes) != 2:
        return None
    if not all(type(size) is int and size >= 0 for size in sizes) or sizes[0] > height:
        return None
    return sizes[0], sizes[1]


def _vocab_sizes(
    content: Mapping[str, Any], height: int, shape: tuple[int, int] | None
) -> tuple[int, int] | None:
    sizes = _sizes(content, "vocab_sizes", height)
    if sizes is None or shape is None or sizes[1] > shape[1]:
        return None
    return sizes


def _exact_rows(content: Mapping[str, Any], height: int) -> NDArray[np.bool_] | None:
    torch = import_torch()
    flags = content.get("is_exact_row")
    if not isinstance(flags, torch.Tensor) or flags.dtype != torch.bool or not _is_dense(flags):
        return None
    if flags.shape != (height,):
        return None
    array: NDArray[np.bool_] = flags.numpy()
    return array


def _metadata(content: Mapping[Any, Any]) -> dict[str, str]:
    """Every plain value of the file as text, beginning with our writer's metadata."""
    added = content.get("metadata")
    metadata = {str(k): str(v) for k, v in added.items()} if isinstance(added, dict) else {}
    for key, value in content.items():
        if isinstance(key, str) and isinstance(value, str | int | float) and value != "":
            metadata[_OLD_NAMES.get(key, key)] = str(value)
    return metadata


def _of_matrix(matrix: Any, metadata: dict[str, str]) -> LooseEntries:
    torch = import_torch()
    is_dense = matrix.layout == torch.strided
    is_matrix = matrix.ndim == 2 and matrix.is_floating_point() and not matrix.is_meta
    # A sparse tensor with dense rows has no column indices.
    if not is_matrix or (matrix.layout == torch.sparse_coo and matrix.sparse_dim() != 2):
        raise ProjectionError(
            "the tensor is not a projection",
            got=f"shape {list(matrix.shape)} of {matrix.dtype}",
            expected="real numbers of shape [student ids, teacher ids]",
        )
    if is_dense:
        positions = matrix.detach().nonzero().T
        rows, columns = positions.numpy()
        weights = _float64(matrix.detach()[tuple(positions)])
    else:
        pairs = matrix.detach().to_sparse_coo()
        # Left uncoalesced, so that repeated pairs stay visible.
        rows, columns = pairs._indices().numpy()
        weights = _float64(pairs._values())
    return _of_list(
        rows,
        columns,
        weights,
        height=matrix.shape[0],
        width=matrix.shape[1],
        rounding=_rounding(matrix),
        metadata=metadata,
    )


def _of_pairs(pairs: Mapping[tuple[int, int], Any]) -> LooseEntries:
    try:
        rows, columns = np.array(list(pairs), dtype=np.int64).T
        weights = np.array([float(weight) for weight in pairs.values()])
    except (TypeError, ValueError, OverflowError) as error:
        raise ProjectionError(
            "the pairs of the file are not ids and weights", got=error, expected=LEGACY_CONTENT
        ) from None
    return _of_list(rows, columns, weights, height=int(rows.max()) + 1)


def _of_list(
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    weights: NDArray[np.float64],
    *,
    height: int,
    width: int | None = None,
    rounding: float = FLOAT32_ROUNDING,
    metadata: Mapping[str, str] | None = None,
) -> LooseEntries:
    is_entry = (columns != NO_COLUMN) & (weights != 0)
    order = np.argsort(rows[is_entry], kind="stable")
    rows = rows[is_entry][order]
    return LooseEntries(
        rows=rows,
        columns=columns[is_entry][order],
        weights=weights[is_entry][order],
        slots=np.arange(len(rows)) - np.searchsorted(rows, rows),
        height=height,
        width=width,
        rounding=rounding,
        metadata=metadata or {},
    )


def import_torch() -> Any:
    """torch, which nothing else of the package needs."""
    with needed_packages("a .pt projection"):
        import torch
    return torch
