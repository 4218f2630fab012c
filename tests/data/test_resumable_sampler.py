from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from megatron_ext.data.packed_batches import ResumableSampler
from megatron_ext.errors import ConfigError


@given(size=st.integers(1, 30), world_size=st.integers(1, 5), epochs=st.integers(1, 4))
def test_ranks_deal_out_epochs_without_loss_and_end_together(
    size: int, world_size: int, epochs: int
) -> None:
    ranks = [
        list(ResumableSampler(size, rank=rank, world_size=world_size, epochs=epochs))
        for rank in range(world_size)
    ]
    whole = list(ResumableSampler(size, epochs=epochs))
    endless = iter(ResumableSampler(size))
    more = list(islice(endless, len(whole) + -len(whole) % world_size))

    assert more[: len(whole)] == whole
    assert [more[rank::world_size] for rank in range(world_size)] == ranks
    assert {len(items) for items in ranks} == {len(more) // world_size}
    for epoch in range(epochs):
        assert sorted(whole[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(used=st.integers(0, 70), world_size=st.integers(1, 4))
def test_a_state_goes_on_exactly(used: int, world_size: int) -> None:
    options = {"seed": 3, "rank": world_size - 1, "world_size": world_size}
    expected = list(islice(ResumableSampler(23, **options), used + 40))
    stopped, resumed = ResumableSampler(23, **options), ResumableSampler(23, **options)
    stopped.advance(used)
    resumed.load_state_dict(stopped.state_dict())

    assert list(islice(resumed, 40)) == expected[used:]


def test_a_state_goes_on_with_other_ranks() -> None:
    whole = list(ResumableSampler(10, epochs=3))
    stopped = ResumableSampler(10, world_size=2)
    stopped.advance(6)
    rest = []
    for rank in range(3):
        sampler = ResumableSampler(10, rank=rank, world_size=3, epochs=3)
        sampler.load_state_dict(stopped.state_dict())
        assert len(sampler) == len(list(sampler))
        rest += list(sampler)

    assert sorted(rest) == sorted(whole[12:])
    stopped.advance(1)
    with pytest.raises(ConfigError, match="do not divide among the ranks; got 14 items"):
        ResumableSampler(10, world_size=3).load_state_dict(stopped.state_dict())


def test_a_loader_that_reads_ahead_is_resumed_by_what_was_used() -> None:
    data = list(range(40))
    sampler = ResumableSampler(40, epochs=1)
    expected = list(sampler)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2)  # type: ignore[arg-type]
    used = []
    for batch in islice(loader, 3):
        used += batch.tolist()
        sampler.advance(len(batch))

    assert used == expected[:12]
    assert list(sampler) == expected[12:]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="size is too small; got 0"):
        ResumableSampler(0)
    with pytest.raises(ConfigError, match="no such rank; got 1; expected 0 to 0"):
        ResumableSampler(1, rank=1)
    with pytest.raises(ConfigError, match="another seed; got 1234; expected 5"):
        ResumableSampler(4, seed=5).load_state_dict(ResumableSampler(4).state_dict())
    with pytest.raises(TypeError, match="no length"):
        len(ResumableSampler(4))
