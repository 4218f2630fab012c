"""Ids of any vocabulary come back from their bytes, which are as many as the formula says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_ext.teachers.target_form import (
    pack_ids,
    packed_width,
    unpack_ids,
)


@pytest.mark.parametrize(
    ("vocab_size", "count"),
    [
        (1, 1),
        (7, 7),
        (100, 99),
        (32_000, 1),
        (131_073, 32),
        (151_936, 64),
        (262_144, 64),
        (262_144, 1024),
        (1_000_003, 50),
    ],
)
def test_ids_come_back_whatever_the_vocabulary(vocab_size: int, count: int) -> None:
    rng = np.random.default_rng(vocab_size + count)
    rows = [np.sort(rng.choice(vocab_size, count, replace=False)) for _ in range(20)]
    rows += [np.arange(count), np.arange(vocab_size - count, vocab_size)]
    ids = np.stack(rows).astype(np.int64)
    packed = pack_ids(ids, vocab_size)
    assert packed.shape == (len(ids), packed_width(count, vocab_size))
    assert np.array_equal(unpack_ids(packed, count, vocab_size), ids)


def test_an_id_of_64_in_262144_takes_14_bits() -> None:
    assert packed_width(64, 262_144) * 8 == 64 * 14
    for count in (1, 16, 64, 300):
        bound = math.ceil(count * (2 + math.log2(262_144 / count)) / 8) + 2
        assert packed_width(count, 262_144) <= bound
