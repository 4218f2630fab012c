"""A global batch gives one loss, whatever replicas, shards and microbatches it is spread over."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.combined_cases import Result, on_four_ranks, run
from tests.process_group import run_ranks


@pytest.fixture(scope="module")
def whole() -> Result:
    return run([slice(0, 4)])


@pytest.fixture(scope="module")
def ranks() -> list[Result]:
    return run_ranks(4, on_four_ranks)


def test_replicas_with_different_chunks_add_up_to_the_whole(
    whole: Result, ranks: list[Result]
) -> None:
    assert whole.counts == {"kd/a": 16, "kd/b": 4, "ce": 24}
    assert all(result.counts == whole.counts for result in ranks)
    for shard in range(2):
        loss = ranks[shard].loss + ranks[2 + shard].loss
        torch.testing.assert_close(loss, whole.loss, rtol=1e-6, atol=0)
    grads = [ranks[shard].grad + ranks[2 + shard].grad for shard in range(2)]
    scale = whole.grad.abs().max().item()
    torch.testing.assert_close(torch.cat(grads), whole.grad, rtol=0, atol=1e-6 * scale)


def test_dynamic_weights_and_norms_are_the_same_on_every_rank_and_of_the_whole(
    whole: Result, ranks: list[Result]
) -> None:
    for result in ranks:
        assert result.norms == pytest.approx(whole.norms, rel=1e-6)
        assert result.weights == ranks[0].weights
        for measure, weights in whole.weights.items():
            assert result.weights[measure] == pytest.approx(weights, rel=1e-6)
    assert len({tuple(weights) for weights in whole.weights.values()}) == 3
