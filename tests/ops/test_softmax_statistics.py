"""Peaks, sums and largest columns against their definition, by kernel and by torch."""

import importlib
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.ops.softmax_statistics import row_statistics, row_statistics_reference
from tests.ops.kernel_case import ALL_THREE, DEVICE, DTYPES, combinations

pytest.importorskip("triton")
row_loops = pytest.importorskip("megatron_ext.ops.row_loops")


def _shard(width, vocab):
    return VocabShard(start=0, stop=width, vocab_size=vocab)


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
@pytest.mark.parametrize(
    ("dtype", "temperature", "rows", "width", "vocab"),
    [
        *((*case, 5, 4099, 4099) for case in combinations(DTYPES, (1.0, 2.5))),
        (torch.float32, 2.5, 1, 17, 13),
        (torch.float32, 1.0, 0, 9, 9),
    ],
    ids=str,
)
def test_statistics_are_those_of_the_definition(
    implementation, dtype, rows, width, vocab, temperature
):
    torch.manual_seed(0)
    logits = (3 * torch.randn(rows, width, device=DEVICE)).to(dtype)
    logits[:, vocab:] = 1e4
    members = torch.rand(width, device=DEVICE) < 0.3
    out = row_statistics(
        logits,
        _shard(width, vocab),
        temperature=temperature,
        members=members,
        implementation=implementation,
    )
    whole, inside, column = row_statistics_reference(
        logits[:, :vocab].double(), temperature=temperature, members=members[:vocab]
    )
    lse = out.peak + out.total.log()
    torch.testing.assert_close(lse.double(), torch.stack([whole, inside]), rtol=2e-6, atol=2e-6)
    assert torch.equal(out.column, column)


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
def test_extreme_rows(implementation):
    logits = torch.zeros(4, 40, device=DEVICE)
    logits[0] = -torch.inf
    logits[1] = 1e4
    logits[2, 1:] = -torch.inf
    logits[3, 7] = torch.nan
    members = torch.arange(40, device=DEVICE) > 0
    out = row_statistics(logits, _shard(40, 40), members=members, implementation=implementation)
    assert out.total[:, :3].tolist() == [[0.0, 40.0, 1.0], [0.0, 39.0, 0.0]]
    assert out.peak[:, :3].tolist() == [[0.0, 1e4, 0.0], [0.0, 1e4, 0.0]]
    assert out.total[:, 3].isnan().all()


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
def test_members_far_below_the_others_keep_their_digits(implementation):
    torch.manual_seed(0)
    logits = torch.randn(2, 9000, device=DEVICE)
    members = torch.rand(9000, device=DEVICE) < 0.3
    logits[0, ~members] += 200
    logits[1] += 3000
    out = row_statistics(logits, _shard(9000, 9000), members=members, implementation=implementation)
    whole, inside, _ = row_statistics_reference(logits.double(), members=members)
    shares = torch.stack([whole, inside]) - out.peak.double()
    torch.testing.assert_close(out.total.double().log(), shares, rtol=0, atol=2e-6)


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
def test_of_equal_columns_the_first_is_named(implementation):
    logits = torch.zeros(4, 9000, device=DEVICE)
    for row, columns in enumerate([(8191, 4100), (15, 8), (8999, 8200), (4096, 7)]):
        logits[row, list(columns)] = 5.0
    out = row_statistics(logits, _shard(9000, 9000), implementation=implementation)
    assert out.column.tolist() == [4100, 8, 8200, 7]


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
def test_rows_that_are_not_read_have_nothing(implementation):
    logits = torch.randn(3, 40, device=DEVICE)
    alone = row_statistics(logits, _shard(40, 40), implementation=implementation)
    logits[1] = torch.nan
    read = torch.tensor([True, False, True], device=DEVICE)
    out = row_statistics(logits, _shard(40, 40), read=read, implementation=implementation)
    for got, whole in zip(out, alone, strict=True):
        assert torch.equal(got, torch.where(read, whole, torch.zeros_like(whole)))


def test_without_members_the_second_sum_is_the_first():
    logits = torch.randn(3, 20, device=DEVICE)
    out = row_statistics(logits, _shard(20, 20), implementation="triton")
    assert torch.equal(out.peak[0], out.peak[1])
    assert torch.equal(out.total[0], out.total[1])


def test_a_shard_of_padding_has_nothing():
    shard = VocabShard(start=40, stop=60, vocab_size=33)
    out = row_statistics(torch.randn(3, 20, device=DEVICE), shard, implementation="triton")
    assert out.total.tolist() == [[0.0] * 3] * 2
    assert out.peak.tolist() == [[0.0] * 3] * 2


def test_kernels_are_refused_where_they_cannot_run():
    logits = torch.zeros(1, 4, dtype=torch.float64, device=DEVICE)
    with pytest.raises(LossError, match="do not read these logits"):
        row_statistics(logits, _shard(4, 4), implementation="triton")


def test_loops_in_threads_and_in_strided_rows_say_the_same():
    wide = torch.randn(7, 90)
    alone = row_statistics(wide[:, :80].contiguous(), _shard(80, 77), implementation="cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        out = row_statistics(wide[:, :80], _shard(80, 77), implementation="cpu")
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(got, expected) for got, expected in zip(out, alone, strict=True))


def test_machine_code_is_stale_when_any_file_of_loops_has_changed(tmp_path, monkeypatch, capsys):
    """numba alone would look at the file of the entry point only. What compiles says so, once."""
    (tmp_path / "doubled.py").write_text("def doubled(values):\n    values[0] *= 2\n")
    monkeypatch.syspath_prepend(tmp_path)

    row_loops._tell_of_compiling.cache_clear()

    def hits():
        compiled = row_loops.entry_point(importlib.import_module("doubled").doubled)
        values = np.ones(1)
        compiled(values)
        assert values[0] == 2
        return sum(compiled.stats.cache_hits.values())

    assert [hits(), hits()] == [0, 1]
    assert capsys.readouterr().err.count("compiles loops") == 1
    monkeypatch.setattr(row_loops, "_digest", lambda: "another")
    assert [hits(), hits()] == [0, 1]
    assert "compiles loops" not in capsys.readouterr().err
    row_loops._tell_of_compiling.cache_clear()
    assert hits() == 1
    assert "compiles loops" not in capsys.readouterr().err
    monkeypatch.setattr(row_loops, "_CacheOfFolder", Mock(side_effect=RuntimeError))
    assert [hits(), hits()] == [0, 0]
    assert capsys.readouterr().err.count("in every process") == 1
