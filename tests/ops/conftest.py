"""What the tests of operations share."""

import pytest
import torch


@pytest.fixture
def nan_filled():
    """New memory holds NaN, and the largest integer, until something is written to it."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)
