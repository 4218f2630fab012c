"""Projections from dicts of shares, and back."""

import numpy as np
from hypothesis import strategies as st

from megatron_ext.projection import SparseProjection


def projection_of(rows, columns=6, **fields):
    """The projection of dicts of shares."""
    entries = [entry for row in rows for entry in sorted(row.items())]
    arrays = {
        "indptr": np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64),
        "indices": np.array([column for column, _ in entries], np.int32),
        "values": np.array([share for _, share in entries], np.float32),
        "shape": (len(rows), columns),
    }
    return SparseProjection(**{**arrays, **fields})


def rows_of(matrix):
    """Dicts of the values of each row of a projection or of compressed rows."""
    bounds = zip(matrix.indptr[:-1].tolist(), matrix.indptr[1:].tolist(), strict=True)
    pairs = list(zip(matrix.indices.tolist(), matrix.values.tolist(), strict=True))
    return [dict(pairs[start:stop]) for start, stop in bounds]


def dense(matrix):
    """The [Vs, Vt] array of a small projection or of compressed rows."""
    array = np.zeros(matrix.shape, np.float32)
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    array[rows, matrix.indices] = matrix.values
    return array


@st.composite
def random_projections(draw, columns=6, max_rows=6):
    """Projections with empty rows, of ``columns`` columns."""
    rows = []
    for size in draw(st.lists(st.integers(0, columns - 1), max_size=max_rows)):
        chosen = draw(st.sets(st.integers(0, columns - 1), min_size=size, max_size=size))
        weights = [draw(st.floats(1e-3, 1.0)) for _ in chosen]
        rows.append({c: w / sum(weights) for c, w in zip(chosen, weights, strict=True)})
    return projection_of(rows, columns)
