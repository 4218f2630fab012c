"""Nothing of the size of Vs x Vt is ever allocated."""

import tracemalloc

import numpy as np
import pytest

from megatron_ext.projection import SparseProjection, fill_empty_rows

SIZE = 200_000
"""Rows and columns: a dense matrix would be 149 GiB."""


@pytest.fixture(scope="module")
def projection():
    generator = np.random.default_rng(0)
    rows = np.repeat(np.arange(SIZE), 3)
    columns = generator.integers(0, SIZE, 3 * SIZE)
    return SparseProjection.from_entries(rows, columns, generator.random(3 * SIZE), (SIZE, SIZE))


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda p: p.top_k(2), id="top_k"),
        pytest.param(lambda p: p.transpose(), id="transpose"),
        pytest.param(lambda p: p.column_block(0, SIZE // 2), id="column block"),
        pytest.param(lambda p: p.row_block(0, SIZE), id="row block"),
        pytest.param(lambda p: p.partition(0.5), id="partition"),
        pytest.param(lambda p: p.padded(SIZE + 7, SIZE + 9), id="padding"),
        pytest.param(lambda p: p @ p, id="composition"),
        pytest.param(lambda p: fill_empty_rows(p, p), id="filling"),
    ],
)
def test_memory_grows_with_the_entries(projection, operation):
    tracemalloc.start()
    operation(projection)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 600,000 entries, or 1,800,000 products of two, of up to some 200 bytes each.
    assert peak < 400 * 2**20
