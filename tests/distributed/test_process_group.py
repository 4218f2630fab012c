import multiprocessing
import time

import pytest

from tests.distributed.rank_functions import fail_on_rank_one, sleep_on_rank_one, sum_of_ranks
from tests.process_group import RankError, run_ranks


def test_every_rank_returns_its_result_in_order() -> None:
    assert [int(total) for total in run_ranks(2, sum_of_ranks, 10)] == [21, 21]


def test_the_failing_ranks_traceback_reaches_the_caller_and_the_waiting_rank_is_ended() -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 failed:[\s\S]*the deliberate failure"):
        run_ranks(2, fail_on_rank_one)
    assert time.monotonic() - begin < 60
    assert not multiprocessing.active_children()


def test_a_rank_that_hangs_is_named_and_ended() -> None:
    with pytest.raises(RankError, match=r"ranks \[\d.*\] did not finish within 4 s"):
        run_ranks(2, sleep_on_rank_one, timeout_s=4)
    assert not multiprocessing.active_children()
