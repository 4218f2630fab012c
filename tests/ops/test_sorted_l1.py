"""The sorted L1 against its reference in fp64, ties, truncation and what it keeps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.distributed import vocab_parallel
from megatron_ext.ops.sort_keys import largest_columns
from megatron_ext.ops.sorted_l1 import sorted_l1, sorted_l1_reference
from megatron_ext.ops.sorted_l1.comparison import (
    Candidates,
    add_signs_,
    compare_sorted,
    select_largest,
)
from tests.ops.kernel_case import kept_for_backward

SIZES = {
    "a larger student": (5, 37, 23),
    "a larger teacher": (4, 11, 29),
    "one row of one column": (1, 1, 1),
    "no row": (0, 7, 5),
    "two columns against many": (3, 2, 64),
}


def distributions(rows, columns, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return torch.softmax(logits, dim=-1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("largest", [None, 1, 6, 1000])
@pytest.mark.parametrize("name", SIZES)
def test_value_and_gradient_equal_the_references(name, largest, dtype):
    rows, student_width, teacher_width = SIZES[name]
    student = distributions(rows, student_width, 0, dtype).requires_grad_()
    teacher = distributions(rows, teacher_width, 1, dtype)
    weights = torch.linspace(0.5, 2.0, rows, dtype=dtype)
    value = sorted_l1(student, teacher, largest=largest).value
    (grad,) = torch.autograd.grad((value * weights).sum(), student)
    truth = sorted_l1_reference(student.double(), teacher.double(), largest=largest)
    (true_grad,) = torch.autograd.grad((truth * weights.double()).sum(), student)
    slack = 1e-13 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(value.double(), truth, rtol=slack, atol=slack)
    torch.testing.assert_close(grad, true_grad.to(dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("largest", [7, None], ids=["fewer than there are", "all"])
def test_excluded_columns_are_as_if_they_were_not_there(largest):
    student = distributions(4, 13, 0, torch.float32).requires_grad_()
    teacher = distributions(4, 8, 1, torch.float32)
    # Without a limit the teacher has more places than the student: they meet excluded columns.
    student_excluded, teacher_excluded = torch.arange(13) % 4 > 0, torch.arange(8) > 5
    out = sorted_l1(
        student,
        teacher,
        student_excluded=student_excluded,
        teacher_excluded=teacher_excluded,
        largest=largest,
    )
    truth = sorted_l1(student[:, ~student_excluded], teacher[:, ~teacher_excluded], largest=largest)
    torch.testing.assert_close(out.value, truth.value)
    torch.testing.assert_close(out.left_out, truth.left_out)
    (grad,) = torch.autograd.grad(out.value.sum(), student)
    (true_grad,) = torch.autograd.grad(truth.value.sum(), student)
    assert torch.equal(grad, true_grad)
    assert not grad[:, student_excluded].any()


def test_everything_excluded_costs_nothing():
    student = distributions(2, 5, 0).requires_grad_()
    out = sorted_l1(
        student,
        distributions(2, 4, 1),
        student_excluded=torch.ones(5, dtype=torch.bool),
        teacher_excluded=torch.ones(4, dtype=torch.bool),
    )
    (grad,) = torch.autograd.grad(out.value.sum(), student)
    assert out.value.tolist() == out.left_out.tolist() == [0.0, 0.0]
    assert not grad.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("largest", [None, 3])
def test_equal_probabilities_are_taken_in_the_order_of_columns(dtype, largest):
    student = torch.full((1, 4), 0.25, dtype=dtype, requires_grad=True)
    teacher = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=dtype)
    out = sorted_l1(student, teacher, largest=largest)
    (grad,) = torch.autograd.grad(out.value.sum(), student)
    assert grad.tolist() == [[-1.0, -1.0, 1.0, 1.0 if largest is None else 0.0]]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(0, 4), width=st.integers(1, 70))
def test_the_selection_is_a_stable_sort_cut_off(seed, rows, width):
    generator = torch.Generator().manual_seed(seed)
    # Few levels, so that most values are tied, and zeros.
    values = torch.randint(0, 5, (rows, width), generator=generator) / 7
    excluded = torch.rand(width, generator=generator) < 0.3
    count = int(torch.randint(0, width + 1, (), generator=generator))
    chosen, columns = largest_columns(values, count, excluded)
    ordered = values.masked_fill(excluded, -1.0).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(chosen, ordered.values[:, :count])
    assert torch.equal(columns, ordered.indices[:, :count])


WIDE = 20_000


def _wide(kind, generator):
    values = torch.rand(3, WIDE, generator=generator)
    if kind == "tied":
        return (values * 5).floor() / 7
    if kind == "where samples are taken":
        # The loops guess by every ninth value.
        values[:, ::9] += 1.0
    return torch.softmax(20 * values, dim=-1) if kind == "probabilities" else values


@pytest.mark.parametrize("kind", ["probabilities", "tied", "where samples are taken"])
@pytest.mark.parametrize("is_cut", [False, True], ids=["", "some excluded"])
@pytest.mark.parametrize("count", [1, 700, 9_999, WIDE])
def test_loops_select_what_a_stable_sort_does(kind, is_cut, count):
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(count)
    values = _wide(kind, generator)
    excluded = torch.rand(WIDE, generator=generator) < 0.1 if is_cut else None
    found = select_largest(values, Candidates.of(count, values.shape[1], excluded, by_loops=True))
    expected = select_largest(values, Candidates.of(count, values.shape[1], excluded))
    # What is excluded has no place among the loops' candidates.
    kept = min(count, WIDE if excluded is None else int((~excluded).sum()))
    assert found.values.shape == (3, kept)
    assert torch.equal(found.values, expected.values[:, :kept])
    assert torch.equal(found.columns, expected.columns[:, :kept])
    assert (expected.values[:, kept:] == -1).all()
    torch.testing.assert_close(found.rest, expected.rest, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("counts", [(3_000, 4_097), (4_097, 3_000), (700, 700)])
def test_loops_compare_what_torch_does(counts):
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(counts[0])
    excluded = torch.rand(WIDE, generator=generator) < 0.5
    sides = [
        select_largest(
            torch.softmax(torch.randn(5, WIDE, generator=generator), dim=-1),
            Candidates.of(count, WIDE, excluded, by_loops=True),
        )
        for count in counts
    ]
    # Places that differ by rounding alone, and one that is no candidate.
    sides[1].values[2, : min(counts)] = sides[0].values[2, : min(counts)] * (1 + 1e-7)
    sides[0].values[3, -1] = -1.0
    found = compare_sorted(*sides, max(counts), None, by_loops=True)
    expected = compare_sorted(*sides, max(counts), None)
    torch.testing.assert_close(found.value, expected.value)
    torch.testing.assert_close(found.left_out, expected.left_out)
    assert torch.equal(found.signs, expected.signs)
    slopes = torch.zeros(2, 5, WIDE)
    for slope, by_loops in zip(slopes, (True, False), strict=True):
        add_signs_(slope, sides[0], found, 0.7, by_loops=by_loops)
    assert torch.equal(*slopes)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), largest=st.integers(1, 40))
def test_what_is_left_out_bounds_what_is_missing(seed, largest):
    student, teacher = distributions(3, 31, seed), distributions(3, 19, seed + 1)
    exact = sorted_l1(student, teacher).value
    cut = sorted_l1(student, teacher, largest=largest)
    assert (exact - cut.value >= -1e-15).all()
    assert (exact - cut.value <= cut.left_out + 1e-15).all()
    tails = sum(
        side.sort(dim=-1, descending=True).values[:, largest:].sum(dim=-1)
        for side in (student, teacher)
    )
    torch.testing.assert_close(cut.left_out, torch.as_tensor(tails))
    assert sorted_l1(student, teacher, largest=31).left_out.tolist() == [0.0] * 3


def test_a_difference_of_rounding_has_no_gradient():
    teacher = distributions(2, 40, 3, torch.float32)
    student = torch.nextafter(teacher, torch.ones_like(teacher)).roll(7, dims=-1)
    student = student.requires_grad_()
    out = sorted_l1(student, teacher)
    (grad,) = torch.autograd.grad(out.value.sum(), student)
    assert out.value.max().item() < 1e-6
    assert not grad.any()


def test_a_nan_shows_in_its_row_alone():
    student = distributions(3, 9, 0, torch.float32)
    student[1, 4] = torch.nan
    value = sorted_l1(student, distributions(3, 9, 1, torch.float32), largest=3).value
    assert value.isnan().tolist() == [False, True, False]


def test_the_value_does_not_depend_on_how_rows_are_sliced(monkeypatch):
    student, teacher = distributions(7, 30, 0), distributions(7, 20, 1)
    whole = sorted_l1(student, teacher, largest=8)
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, "cpu", 60)
    sliced = sorted_l1(student, teacher, largest=8)
    assert all(torch.equal(one, other) for one, other in zip(whole, sliced, strict=True))


def test_columns_and_signs_of_the_compared_places_are_all_that_is_kept():
    student, teacher = distributions(9, 300, 0).requires_grad_(), distributions(9, 200, 1)
    kept = kept_for_backward(lambda: sorted_l1(student, teacher, largest=12))
    found = [(tensor.dtype, tuple(tensor.shape)) for tensor in kept]
    assert found == [(torch.int32, (9, 12)), (torch.int8, (9, 12))]
