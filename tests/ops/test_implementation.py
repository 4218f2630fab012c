"""Which code runs, and which logits no kernel may get."""

from __future__ import annotations

import sys

import pytest
import torch

from megatron_ext.errors import LossError, MissingDependencyError
from megatron_ext.ops.launch import uses_triton

pytest.importorskip("triton")


def test_columns_that_are_apart_are_refused_by_kernels_alone() -> None:
    logits = torch.zeros(8, 6)
    turned = torch.zeros(6, 8).t()
    assert uses_triton("triton", logits)
    assert uses_triton("triton", logits[:, 1:4])
    assert uses_triton("triton", logits[::2])
    assert not uses_triton("torch", turned)
    with pytest.raises(LossError, match="next to one another"):
        uses_triton("triton", logits, turned)


def test_a_single_column_has_no_neighbours() -> None:
    assert uses_triton("triton", torch.zeros(5, 9)[:, 3:4])


def test_kernels_that_are_asked_for_name_the_extra_with_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not uses_triton("auto", torch.zeros(2, 4))
    with pytest.raises(MissingDependencyError, match=r"megatron-ext\[gpu\]"):
        uses_triton("triton", torch.zeros(2, 4))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_logits_of_another_device_than_the_current_are_refused() -> None:
    with pytest.raises(LossError, match="current device"):
        uses_triton("auto", torch.zeros(2, 4, device="cuda:1"))
