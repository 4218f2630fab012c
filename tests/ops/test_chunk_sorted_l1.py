"""The sorted L1 of logits, by kernel and by torch, against its definition in fp64."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed import vocab_parallel
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.model_rows import pair_of_models
from megatron_ext.ops.sort_keys import largest_columns
from megatron_ext.ops.sorted_l1 import chunk_sorted_l1, evaluate_sorted_l1, sorted_l1_reference
from megatron_ext.ops.sorted_l1.comparison import Largest, compare_sorted
from megatron_ext.ops.sorted_l1.kernel_steps import capacity_of, select_by_kernel
from tests.ops.chunk_pair import FEW, MANY, ChunkPair
from tests.ops.kernel_case import ALL_THREE, DEVICE, DTYPES, assert_as_exact, rounding

pytest.importorskip("triton")


def check(case, top_u, implementation, **more):
    """Values and gradient of a case are those of the definition."""
    loss = partial(sorted_l1_reference, largest=top_u)
    value, grad = case.truth(loss, temperature=1.3)
    same_value, same_grad = case.truth(loss, temperature=1.3, dtype=torch.float32)
    out, got = case.run(
        chunk_sorted_l1, temperature=1.3, top_u=top_u, implementation=implementation, **more
    )
    assert_as_exact(out.chunk_loss.detach(), same_value, value, slack=1e-6)
    # Written as if each chunk got 1, then scaled: half precision is rounded twice.
    slack = 1e-6 + 2 * rounding(got.dtype)
    assert_as_exact(got, same_grad, grad, slack=slack)
    exact = sorted_l1_reference(*case.means(temperature=1.3), largest=None)
    assert (exact - out.chunk_loss <= out.discarded_mass + 1e-6).all()
    unused = case.chunk_ids[0] < 0
    assert (got[unused] == 0).all()
    assert (got[:, case.vocabs[0] :] == 0).all()
    assert (got[case.chunk_ids[0] == case.chunk_count - 1] == 0).all()


@pytest.mark.usefixtures("nan_filled", "in_any_order")
@ALL_THREE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
def test_value_and_gradient_are_those_of_the_definition(implementation, dtype, in_place):
    check(ChunkPair.random(dtype=dtype), 64, implementation, in_place=in_place)


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
def test_chunks_of_every_size_have_a_scale(implementation):
    case = ChunkPair.random((300, 170), sizes=MANY)
    check(case, 20, implementation, grad_scale=case.weights.clone())


@pytest.mark.parametrize("top_u", [1, 400, None])
def test_places_from_one_to_all(top_u):
    for implementation in ("triton", "torch"):
        check(ChunkPair.random((90, 51), padding=0), top_u, implementation)


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
def test_no_chunk_at_all(implementation):
    out, grad = ChunkPair.random((30, 20), sizes=()).run(
        chunk_sorted_l1, top_u=4, implementation=implementation
    )
    assert out.chunk_loss.shape == out.discarded_mass.shape == (0,)
    assert not grad.any()


@ALL_THREE
def test_extreme_rows_stay_finite_and_a_nan_shows_in_its_chunk_alone(implementation):
    case = ChunkPair.random((120, 70), sizes=((1, 1), (2, 1), (1, 1)), scale=1e4)
    case.logits[0][:, 5:60] = -torch.inf
    out, grad = case.run(chunk_sorted_l1, top_u=8, implementation=implementation)
    assert out.chunk_loss.isfinite().all()
    assert grad.isfinite().all()
    case.logits[0][case.chunk_ids[0] == 1, 7] = torch.nan
    case.logits[0][case.chunk_ids[0] == 2] = torch.nan
    out, grad = case.run(
        chunk_sorted_l1, top_u=8, implementation=implementation, grad_scale=case.weights.clone()
    )
    assert out.chunk_loss.isnan().tolist() == [False, True, True]
    assert (grad[case.chunk_ids[0] == 2] == 0).all(), "a chunk that gets nothing"


@pytest.mark.usefixtures("in_any_order")
@pytest.mark.parametrize(
    ("counts", "places"),
    [
        ((1500, 1200), 600),
        ((40, 1300), 1),
        ((40, 1300), 700),
        ((700, 1), 6000),
        ((5000, 8300), 600),
    ],
)
def test_places_are_compared_by_the_kernel_as_by_torch(counts, places):
    torch.manual_seed(0)
    sides = []
    for count in counts:
        # Ties, and fewer candidates than there is room for in the second chunk.
        values = (torch.rand(3, count, device=DEVICE) * 50).floor() / 64
        values[1, count // 2 :] = -1.0
        columns = torch.arange(count, device=DEVICE).expand(3, count)
        sides.append(Largest(values, columns, torch.rand(3, 1, device=DEVICE)))
    expected, found = (
        compare_sorted(*sides, places, None, by_kernel=by_kernel) for by_kernel in (False, True)
    )
    assert torch.equal(found.signs, expected.signs)
    torch.testing.assert_close(found.value, expected.value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.left_out, expected.left_out, rtol=1e-5, atol=1e-6)
    sides[1].values[2, 0] = torch.nan
    found = compare_sorted(*sides, places, None, by_kernel=True)
    assert found.value.isnan().tolist() == [False, False, True]


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_of_one_rank_is_as_none(group_of_one):
    torch.manual_seed(5)
    sides = [
        Largest(torch.rand(3, 20, device=DEVICE), torch.zeros(3, 20), torch.rand(3, 1).to(DEVICE))
        for _ in "st"
    ]
    expected, found = (
        compare_sorted(*sides, 12, group, by_kernel=True) for group in (None, group_of_one)
    )
    assert all(map(torch.equal, found, expected))


def _selected(logits, places, excluded):
    count = len(logits)
    shard = VocabShard(start=0, stop=logits.shape[1], vocab_size=logits.shape[1])
    side = ChunkedLogits.of(logits, torch.arange(count, device=DEVICE), count, shard)
    model, _ = pair_of_models(side, side, temperature=1.0, implementation="torch")
    everything = torch.arange(count, device=DEVICE)
    probs = model.probabilities(everything)
    return select_by_kernel(model, slice(0, count), places, excluded), probs


ROWS = {
    "random": lambda: 3 * torch.randn(2, 2500),
    "bf16, with many ties": lambda: (3 * torch.randn(2, 2500)).bfloat16().float(),
    "all equal": lambda: torch.zeros(1, 900),
    "one token": lambda: torch.full((1, 700), -200.0).index_fill_(1, torch.tensor([3]), 0.0),
    "two levels": lambda: torch.where(torch.arange(800) % 3 == 0, 1.0, 0.0)[None],
    "wide": lambda: 3 * torch.randn(2, 9000),
    "wide, with many ties": lambda: torch.randn(2, 9000).round(),
    "wide, all equal": lambda: torch.zeros(1, 9000),
    "wide, all but one tiny": lambda: torch.randn(1, 9000).sub_(70).index_fill_(1, LAST, 0.0),
    "wide, the largest at the end": lambda: torch.arange(9000)[None] // 4096 * 2.0,
}
LAST = torch.tensor([8999])


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("name", ROWS)
def test_the_candidates_hold_the_largest_with_ties_in_the_order_of_columns(name):
    torch.manual_seed(0)
    logits = ROWS[name]().to(DEVICE)
    excluded = torch.arange(logits.shape[1], device=DEVICE) % 7 == 2
    places = 40
    found, probs = _selected(logits, places, excluded)
    assert found.values.shape[1] == capacity_of(places, logits.shape[1])
    ordered, order = found.values.sort(dim=-1, descending=True, stable=True)
    columns = found.columns.gather(-1, order)
    truth, true_columns = largest_columns(probs, places, excluded)
    # Of exp(-70), the exponent is rounded by 4e-6, here and there.
    torch.testing.assert_close(ordered[:, :places], truth, rtol=2e-5, atol=0)
    assert torch.equal(columns[:, :places].long(), true_columns)
    chosen = torch.where(found.values < 0, 0.0, found.values).sum(dim=-1)
    everything = probs.masked_fill(excluded, 0.0).sum(dim=-1)
    torch.testing.assert_close(chosen + found.rest[:, 0], everything)


def test_excluded_columns_may_begin_anywhere_in_memory():
    logits = torch.randn(1, 9000, device=DEVICE)
    memory = torch.arange(9003, device=DEVICE) % 5 == 0
    found, probs = _selected(logits, 40, memory[3:])
    truth, _ = largest_columns(probs, 40, memory[3:])
    ordered = found.values.sort(dim=-1, descending=True).values[:, :40]
    torch.testing.assert_close(ordered, truth, rtol=1e-6, atol=0)


def test_fewer_columns_than_places_are_all_chosen():
    excluded = torch.arange(50, device=DEVICE) >= 9
    found, probs = _selected(torch.randn(1, 50, device=DEVICE), 20, excluded)
    assert (found.values >= 0).sum().item() == 9
    assert found.rest.item() == 0
    torch.testing.assert_close(found.values.clamp(min=0).sum(), probs[0, :9].sum())


def test_without_a_gradient_none_is_computed(monkeypatch):
    case = ChunkPair.random((60, 40), sizes=FEW)
    with torch.no_grad():
        out = _evaluate(case, None)
    gradient = torch.full_like(case.logits[0], torch.nan)
    with_gradient = _evaluate(case, gradient)
    assert torch.equal(out.chunk_loss, with_gradient.chunk_loss)
    assert gradient.isfinite().all()
    # A slice of one chunk at a time: another order of everything, the same numbers.
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, DEVICE.type, 60)
    sliced = torch.full_like(gradient, torch.nan)
    out = _evaluate(case, sliced)
    assert torch.equal(out.chunk_loss, with_gradient.chunk_loss)
    torch.testing.assert_close(sliced, gradient)


def _evaluate(case, gradient):
    return evaluate_sorted_l1(*case.sides(), top_u=12, gradient=gradient, implementation="torch")


def test_a_stale_reader_of_logits_written_in_place_is_an_error():
    case = ChunkPair.random((60, 40))
    base = torch.zeros_like(case.logits[0], requires_grad=True)
    student = base + 0.0
    # Its backward reads what it was called with.
    squares = (student * student).sum()
    chunk_sorted_l1(*case.sides(student), top_u=5, in_place=True, implementation="torch")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
