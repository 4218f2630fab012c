"""What the tests of operations share."""

from pathlib import Path

import pytest
import torch

from tests.ops.access_order import AccessOrder
from tests.ops.kernel_case import DEVICE, EVERY_COMBINATION, INTERPRETED

HERE = Path(__file__).parent


@pytest.fixture
def nan_filled():
    """New memory holds NaN, and the largest integer, until something is written to it."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=EVERY_COMBINATION)
def in_any_order(request, monkeypatch):
    """Interpreted kernels depend neither on the order of programs nor on that of threads.

    Tests ask for it; where every combination is run, all have it.
    """
    order = AccessOrder()
    given = getattr(request.node, "callspec", None)
    by = "triton" if given is None else given.params.get("implementation", "triton")
    if INTERPRETED and (EVERY_COMBINATION or by == "triton"):
        order.watch(monkeypatch)
    yield
    assert not order.conflicts


def pytest_collection_modifyitems(config, items):
    """Interpret kernels in one direction of a divergence of those that a test has.

    Loops and torch compute all of them; so do kernels where every combination is run.
    """
    if EVERY_COMBINATION:
        return
    kept, other, met = [], [], set()
    for item in items:
        params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        if HERE in item.path.parents and "triton" in params.values() and "direction" in params:
            del params["direction"]
            case = item.path, item.originalname, tuple(map(str, params.values()))
            (other if case in met else kept).append(item)
            met.add(case)
        else:
            kept.append(item)
    config.hook.pytest_deselected(items=other)
    items[:] = kept


COMPILED_LONG = (
    "test_projected_kl_kernels.py",
    "test_projected_kl_with_ce.py",
    "test_matched_divergence.py",
    "test_partition_kl_kernels.py",
    "test_vocab_kl_kernels.py",
    "test_single_rows.py",
)
"""Files whose loops are compiled for fp32 alone unless everything is run."""


@pytest.fixture(autouse=True)
def _only_what_loops_read(request):
    """Skip the compiled loops of a CPU for tensors on a GPU, and for fp16."""
    given = getattr(request.node, "callspec", None)
    values = [] if given is None else list(given.params.values())
    if "cpu" in values and DEVICE.type != "cpu":
        pytest.skip("the compiled loops read tensors on a CPU; this machine's tests are on its GPU")
    if "cpu" in values and torch.float16 in values:
        pytest.skip("the compiled loops do not read fp16")
    is_long = not EVERY_COMBINATION and request.path.name in COMPILED_LONG
    if "cpu" in values and torch.bfloat16 in values and is_long:
        pytest.skip("compiled for another dtype, which takes up to a quarter of a minute")


@pytest.fixture(params=["triton", "cpu"])
def by(request):
    """An implementation besides torch."""
    pytest.importorskip("numba" if request.param == "cpu" else "triton")
    return request.param
