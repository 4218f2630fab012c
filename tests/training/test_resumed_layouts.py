"""A run goes on from a checkpoint of another layout as the same run."""

from itertools import pairwise

import pytest

from tests.process_group import run_ranks
from tests.training.resumed_layouts import go_on
from tests.training.tiny_run import write_corpus, write_rank_list

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}


@pytest.fixture(scope="module")
def stretches(tmp_path_factory):
    """TP2, again TP2, PP2, DP2, then one process; by stretch what each rank saw."""
    folder = tmp_path_factory.mktemp("resumed")
    write_corpus(folder)
    write_rank_list(folder)
    layouts = [(1, TP2), (2, TP2), (3, PP2), (4, {})]
    by_rank = run_ranks(2, go_on, folder, layouts, timeout_s=240)
    alone = run_ranks(1, go_on, folder, [(5, {})], timeout_s=240)
    return [*map(list, zip(*by_rank, strict=True)), [alone[0][0]]]


def test_every_stretch_begins_with_the_model_that_the_one_before_left(stretches):
    for before, after in pairwise(stretches):
        assert after[0]["done"] == before[0]["done"] + 1
        # The last stage measures, which is another rank under PP2.
        trained = max(rank["trained"] or 0.0 for rank in before)
        loaded = max(rank["loaded"] or 0.0 for rank in after)
        assert loaded == pytest.approx(trained, rel=1e-5)
        assert max(rank["trained"] or 0.0 for rank in after) != pytest.approx(loaded, rel=1e-6)


def test_random_numbers_go_on_under_the_same_layout_and_are_seeded_under_another(stretches):
    first, second, third, fourth, _ = stretches
    for rank in range(2):
        # Held-out measuring draws none, so that the numbers behind a save are those behind a load.
        assert second[rank]["numbers"] == first[rank]["next_numbers"]
        assert third[rank]["numbers"] != second[rank]["next_numbers"]
    assert third[0]["numbers"] != third[1]["numbers"]
    assert fourth[0]["numbers"] != fourth[1]["numbers"]
