from __future__ import annotations

import dataclasses
import itertools

from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.training.sampler import BatchSampler

SAMPLERS = st.builds(
    lambda sample_count, micro, dp_size, microbatches, seed: BatchSampler(
        sample_count=sample_count,
        global_batch_size=micro * dp_size * microbatches,
        micro_batch_size=micro,
        dp_rank=0,
        dp_size=dp_size,
        seed=seed,
    ),
    st.integers(1, 50),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 2**32),
)


def global_batch(sampler: BatchSampler, iteration: int) -> list[int]:
    """All ranks' windows at an iteration, in the order of microbatches and ranks."""
    ranks = [
        dataclasses.replace(sampler, dp_rank=rank).microbatches(iteration)
        for rank in range(sampler.dp_size)
    ]
    return [window for rows in zip(*ranks, strict=True) for row in rows for window in row]


@given(SAMPLERS, st.integers(1, 3))
def test_every_epoch_reads_every_window_once(sampler: BatchSampler, epochs: int) -> None:
    count = sampler.sample_count
    iterations = -(-count * epochs // sampler.global_batch_size)
    read = [w for iteration in range(iterations) for w in global_batch(sampler, iteration)]
    for epoch in range(epochs):
        assert sorted(read[epoch * count : (epoch + 1) * count]) == list(range(count))


@given(SAMPLERS, st.integers(0, 10**6))
def test_the_global_batch_does_not_depend_on_the_layout(
    sampler: BatchSampler, iteration: int
) -> None:
    alone = dataclasses.replace(sampler, dp_size=1, micro_batch_size=sampler.global_batch_size)
    assert alone.microbatches(iteration) == [global_batch(sampler, iteration)]


@given(SAMPLERS, st.integers(0, 1000))
def test_every_rank_has_its_microbatches_whole(sampler: BatchSampler, iteration: int) -> None:
    rows = sampler.microbatches(iteration)
    assert len(rows) == sampler.microbatch_count
    assert {len(row) for row in rows} == {sampler.micro_batch_size}


def test_epochs_and_seeds_differ_in_their_order() -> None:
    orders = [
        BatchSampler(
            sample_count=64,
            global_batch_size=64,
            micro_batch_size=64,
            dp_rank=0,
            dp_size=1,
            seed=seed,
        ).microbatches(epoch)[0]
        for seed, epoch in itertools.product((1, 2), (0, 1))
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert list(range(64)) not in orders


def test_an_iteration_is_the_same_whatever_was_read_before() -> None:
    sampler = BatchSampler(
        sample_count=7, global_batch_size=4, micro_batch_size=2, dp_rank=1, dp_size=2, seed=5
    )
    in_order = [sampler.microbatches(iteration) for iteration in range(9)]
    assert [sampler.microbatches(i) for i in reversed(range(9))] == in_order[::-1]
