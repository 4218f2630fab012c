"""Softmax, sums and argmax of one shard; ``test_sharding.py`` compares with several."""

from collections.abc import Callable

import pytest
import torch

from megatron_ext.distributed import vocab_parallel
from megatron_ext.distributed.shard_collectives import (
    copy_to_shards,
    sum_columns,
    sum_over_shards,
)
from megatron_ext.distributed.vocab_parallel import VocabShard, log_softmax, vocab_argmax

PADDED = VocabShard(start=0, stop=12, vocab_size=9)


@pytest.mark.parametrize(
    ("start", "valid_width"), [(0, 4), (4, 4), (8, 1), (12, 0)], ids=lambda value: str(value)
)
def test_a_shard_knows_how_many_of_its_columns_are_real(start: int, valid_width: int) -> None:
    shard = VocabShard(start=start, stop=start + 4, vocab_size=9)
    assert shard.width == 4
    assert shard.valid_width == valid_width
    excluded = shard.excluded_columns(torch.device("cpu"))
    if valid_width == 4:
        assert excluded is None
    else:
        assert excluded.tolist() == [column >= valid_width for column in range(4)]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("masked", [False, True], ids=["every column", "some columns"])
def test_log_softmax_is_torchs_over_the_counted_columns(masked: bool, temperature: float) -> None:
    valid = torch.arange(12) % 4 != 1 if masked else None
    counted = torch.arange(12) < 9 if valid is None else valid & (torch.arange(12) < 9)
    logits = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        logits[..., 9:] = 70.0
    weights = torch.rand(2, 5, 12, dtype=torch.float64)

    value = log_softmax(logits, PADDED, temperature=temperature, valid=valid)
    truth = torch.log_softmax(logits[..., counted] / temperature, dim=-1)
    torch.testing.assert_close(value[..., counted], truth)
    assert (value[..., ~counted] == -torch.inf).all()

    (grad,) = torch.autograd.grad((value.exp() * weights).sum(), logits)
    (true_grad,) = torch.autograd.grad((truth.exp() * weights[..., counted]).sum(), logits)
    torch.testing.assert_close(grad, true_grad)


def test_a_nan_gradient_of_an_excluded_column_is_dropped() -> None:
    logits = torch.randn(3, 12, requires_grad=True)
    value = log_softmax(logits, PADDED)
    weights = torch.zeros(3, 12)
    weights[:, 2] = 1.0
    # 0 * -inf in the padding: the value is NaN, as documented, and so is the padding's gradient.
    gradient = torch.where(torch.arange(12) < 9, weights, torch.nan)
    (grad,) = torch.autograd.grad(value, logits, gradient)
    assert grad.isfinite().all()
    assert not grad[:, 9:].any()


def test_log_softmax_of_extreme_logits_stays_exact() -> None:
    logits = torch.tensor([[1e4, 1e4, -1e4, -torch.inf] + [0.0] * 8])
    value = log_softmax(logits, PADDED)
    assert value[0, :2].tolist() == pytest.approx([-0.6931472] * 2)
    assert value[0, 2].item() == pytest.approx(-20000.6931, rel=1e-6)
    assert value[0, 3].item() == -torch.inf
    assert value.exp().sum().item() == pytest.approx(1.0)


def test_log_softmax_keeps_its_output_alone_for_backward() -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    logits = torch.randn(3, 12, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = log_softmax(logits, PADDED)
    assert value.dtype == torch.float32
    assert [tensor.dtype for tensor in kept] == [torch.float32]
    assert torch.equal(kept[0], value)


def test_argmax_takes_the_first_of_equals_and_never_padding() -> None:
    values = torch.tensor([[0.0, 3.0, 3.0, 1.0, 9.0], [5.0, 3.0, 5.0, 6.0, 9.0]])
    shard = VocabShard(start=0, stop=5, vocab_size=4)
    assert vocab_argmax(values, shard).tolist() == [1, 3]


@pytest.mark.parametrize("function", [sum_over_shards, copy_to_shards])
def test_one_rank_alone_sums_and_copies_without_scaling(
    function: Callable[[torch.Tensor, None], torch.Tensor],
) -> None:
    x = torch.tensor([2.0, -3.0], requires_grad=True)
    out = function(x, None)
    assert torch.equal(out, x)
    (grad,) = torch.autograd.grad(out, x, torch.tensor([5.0, 7.0]))
    assert grad.tolist() == [5.0, 7.0]


def test_a_sum_of_columns_on_one_rank_fills_missing_ones_with_zeros() -> None:
    out = sum_columns(torch.ones(2, 3), 5, None)
    assert out.tolist() == [[1.0, 1.0, 1.0, 0.0, 0.0]] * 2


@pytest.mark.parametrize(("rows", "columns"), [(0, 7), (10, 3), (3, 1000), (5, 0)])
def test_row_slices_cover_every_row_once(
    rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, "cpu", 10)
    slices = list(vocab_parallel.row_slices(rows, columns, device=torch.device("cpu")))
    covered = [row for part in slices for row in range(rows)[part]]
    assert covered == list(range(rows))
    assert all((part.stop - part.start) * columns <= max(10, columns) for part in slices)
