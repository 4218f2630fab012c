"""A model elsewhere, in any layout, teaches what the same model on the student's ranks does."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.process_group import run_ranks
from tests.teachers.served_models import Run, learn, serve

RUNS = [
    Run("hidden", "tp2", "dp2"),
    Run("topk", "tp2", "cp2"),
    Run("label", "pp2", "tp2"),
    Run("hidden", "pp2", "cp2"),
    Run("topk", "dp2", "tp2"),
    Run("hidden", "dp2", "tp2"),
    Run("label", "tp2", "cp2"),
    Run("hidden", "tp2", "pp2"),
]
MICROBATCHES = 6

# fp32 sums in another order, a few ulps of the largest number. Logits of a top-k are differences of
# two that are larger.
TOLERANCE = 1e-6
TOP_K_TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    with ThreadPoolExecutor() as pool:
        sides = [
            pool.submit(run_ranks, 2, side, folder, RUNS, timeout_s=240) for side in (serve, learn)
        ]
        return sides[1].result() if sides[0].result() else []


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_targets_are_those_of_the_model_on_the_ranks_of_the_student(learnt, run):
    for rank, of_rank in enumerate(learnt):
        worst = dict(of_rank[run.name])
        is_last = run.student != "pp2" or rank == 1
        assert worst.pop("count") == (MICROBATCHES if is_last else 0)
        assert set(worst) == (set(run.form.parts) if is_last else set())
        assert worst.pop("topk_ids", 0) == 0
        assert worst.pop("topk_logits", 0) <= TOP_K_TOLERANCE
        assert all(difference <= TOLERANCE for difference in worst.values()), worst
