"""The matched divergence, by kernel and by torch, against its reference in fp64."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.distributed import vocab_parallel
from megatron_ext.ops.matched_divergence import (
    MatchedOptions,
    Matching,
    matched_divergence,
    matched_divergence_reference,
)
from megatron_ext.ops.sorted_l1 import sorted_l1_reference
from tests.ops.chunk_pair import MANY, ChunkPair
from tests.ops.kernel_case import (
    ALL_THREE,
    DEVICE,
    DIRECTIONS,
    DTYPES,
    assert_as_exact,
    combinations,
    kept_for_backward,
    rounding,
    sampled,
)

pytest.importorskip("triton")


def matched_options(*values):
    """In the order of the fields."""
    names = (field.name for field in fields(MatchedOptions))
    return MatchedOptions(**dict(zip(names, values, strict=False)))


MATCHES = {
    "some are common": (211, 157, 83),
    "every student token is common": (40, 121, 40),
    "every teacher token is common": (121, 40, 40),
    "one vocabulary": (64, 64, 64),
    "nothing is common": (36, 25, 0),
}
"""Vs, Vt, common tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Two models whose vocabularies meet in some tokens."""

    pair: ChunkPair
    common_student: torch.Tensor
    common_teacher: torch.Tensor

    @classmethod
    def random(cls, student, teacher, common, *, seed=0, **more):
        generator = torch.Generator().manual_seed(seed)
        return cls(
            pair=ChunkPair.random((student, teacher), **more),
            common_student=torch.randperm(student, generator=generator)[:common].to(DEVICE),
            common_teacher=torch.randperm(teacher, generator=generator)[:common].to(DEVICE),
        )

    def matching(self):
        widths = [side.shape[1] for side in self.pair.logits]
        column = torch.full((widths[1],), -1, device=DEVICE)
        column[self.common_teacher] = self.common_student
        is_common = torch.zeros(widths[0], dtype=torch.bool, device=DEVICE)
        is_common[self.common_student] = True
        return Matching(column, is_common, len(self.common_student) < min(self.pair.vocabs))

    def run(self, options, implementation="torch", **more):
        return self.pair.run(
            matched_divergence,
            matching=self.matching(),
            options=options,
            implementation=implementation,
            **more,
        )

    def loss(self, q, p, options):
        common = matched_divergence_reference(
            q,
            p,
            common_student=self.common_student,
            common_teacher=self.common_teacher,
            direction=options.direction,
            mixture=options.mixture,
        )
        q, p = _without(q, self.common_student), _without(p, self.common_teacher)
        uncommon = sorted_l1_reference(q, p, largest=options.top_u)
        return common + options.uncommon_weight * uncommon


def _without(probs, columns):
    kept = torch.ones(probs.shape[1], dtype=torch.bool, device=probs.device)
    kept[columns] = False
    return probs[:, kept]


def check(case, options, implementation, **more):
    """Values and gradient of a case are those of the definition."""

    def loss(q, p):
        return case.loss(q, p, options)

    value, grad = case.pair.truth(loss, temperature=options.temperature)
    plain = case.pair.truth(loss, temperature=options.temperature, dtype=torch.float32)
    out, got = case.run(options, implementation, **more)
    # Logarithms of 16 nats hold 1e-6 in fp32.
    assert_as_exact(out.chunk_loss.detach(), plain[0], value, slack=2e-6)
    # Written as if each chunk got 1, then scaled: half precision is rounded twice.
    assert_as_exact(got, plain[1], grad, slack=2e-6 + 2 * rounding(got.dtype))
    assert (got[case.pair.chunk_ids[0] < 0] == 0).all()
    assert (got[:, case.pair.vocabs[0] :] == 0).all()
    assert (got[case.pair.chunk_ids[0] == case.pair.chunk_count - 1] == 0).all()


@pytest.mark.usefixtures("nan_filled", "in_any_order")
@ALL_THREE
@pytest.mark.parametrize(("direction", "dtype"), combinations(DIRECTIONS, DTYPES), ids=str)
def test_value_and_gradient_are_those_of_the_definition(implementation, direction, dtype):
    case = Case.random(2311, 1207, 800, dtype=dtype)
    in_place = direction == "reverse"
    check(case, matched_options(1.3, direction, 0.3, 0.7, 64), implementation, in_place=in_place)


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
@pytest.mark.parametrize("name", MATCHES)
def test_matches_of_every_size(implementation, name):
    case = Case.random(*MATCHES[name])
    check(case, matched_options(1.0, "forward", 0.5, 0.7, 9), implementation)


@pytest.mark.usefixtures("nan_filled", "in_any_order")
@pytest.mark.parametrize(("direction", "dtype"), combinations(DIRECTIONS, DTYPES), ids=str)
@pytest.mark.parametrize("apart", [0, 700], ids=["all aligned", "some aligned"])
def test_pairs_side_by_side(direction, dtype, apart):
    case = Case.random(4500, 4400, 4300, dtype=dtype, padding=5)
    places = torch.arange(4300, device=DEVICE)
    side_by_side = torch.cat([places[: 4300 - apart], places[4300 - apart :].flip(0)])
    case = replace(case, common_student=places, common_teacher=side_by_side)
    in_place = direction == "forward"
    check(case, matched_options(1.3, direction, 0.3, 0.7, 64), "triton", in_place=in_place)


@pytest.mark.usefixtures("nan_filled")
@ALL_THREE
def test_chunks_of_every_size_have_a_scale(implementation):
    case = Case.random(160, 90, 90, sizes=MANY)
    grad_scale = case.pair.weights.clone()
    check(case, matched_options(1.3, "reverse", 0.5, 0.7, 9), implementation, grad_scale=grad_scale)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", MATCHES)
def test_exact_tails_in_torch(name, direction):
    case = Case.random(*MATCHES[name], sizes=MANY)
    check(case, matched_options(1.3, direction, 0.3, 0.7, None), "torch")


def test_a_chunk_of_more_rows_than_a_program_holds():
    case = Case.random(70, 50, 30, sizes=((19, 2), (1, 1)))
    check(case, matched_options(1.0, "reverse", 0.5, 0.7, 9), "triton")


@ALL_THREE
def test_no_chunk_at_all(implementation):
    out, grad = Case.random(30, 20, 9, sizes=()).run(MatchedOptions(top_u=4), implementation)
    *by_chunk, student_log_sum, teacher_log_sum, _, _ = out
    assert all(part.shape == (0,) for part in by_chunk)
    # Rows of no chunk, which hold NaN here.
    assert student_log_sum.isnan().all()
    assert teacher_log_sum.isnan().all()
    assert not grad.any()


@ALL_THREE
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_chunk_of_no_rows_on_a_side_stays_finite(implementation, direction):
    sizes = ((0, 2), (2, 0), (0, 0), (1, 1))
    case = Case.random(60, 40, 25, sizes=sizes)
    out, grad = case.run(matched_options(1.0, direction, 0.5, 1.0, 9), implementation)
    assert out.chunk_loss.isfinite().all()
    assert grad.isfinite().all()
    assert out.chunk_loss[2] == 0


@ALL_THREE
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("common", sampled([50, 70]), ids=sampled(["with a rest", "without"]))
def test_mass_that_the_other_side_rules_out_stays_finite(implementation, direction, common):
    case = Case.random(120, 70, common, sizes=((1, 1), (2, 1)), scale=1e4)
    case.pair.logits[0][:, case.common_student[:20]] = -torch.inf
    case.pair.logits[1][:, case.common_teacher[10:30]] = -torch.inf
    out, grad = case.run(matched_options(1.0, direction, 0.5, 1.0, 9), implementation)
    assert out.chunk_loss.isfinite().all()
    assert (out.chunk_loss < 90).all()
    assert grad.isfinite().all()


@ALL_THREE
def test_vocabularies_of_one_token_always_agree(implementation):
    out, grad = Case.random(1, 1, 1).run(MatchedOptions(top_u=9), implementation)
    assert out.chunk_loss.abs().max().item() < 1e-6
    assert grad.abs().max().item() < 1e-6


@ALL_THREE
def test_a_nan_shows_in_its_chunk_alone(implementation):
    case = Case.random(60, 40, 25)
    case.pair.logits[0][case.pair.chunk_ids[0] == 1, 7] = torch.nan
    out, _ = case.run(MatchedOptions(top_u=9), implementation)
    assert out.chunk_loss.isnan().tolist() == [False, True, False]


def _certain(masses):
    return torch.tensor([masses], dtype=torch.float64).log().to(DEVICE)


def worked_by_hand(direction):
    """Common: (1/2, 1/4) of the student, (1/4, 1/4) of the teacher; the rest is 1/4 and 1/2."""
    nothing = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    student, teacher = _certain([0.5, 0.25, 0.25]), _certain([0.4, 0.25, 0.1, 0.25])
    pair = ChunkPair((student, teacher), (nothing, nothing), (3, 4), 1)
    case = Case(
        pair=pair,
        common_student=torch.tensor([0, 1], device=DEVICE),
        common_teacher=torch.tensor([3, 1], device=DEVICE),
    )
    return case.run(MatchedOptions(direction=direction))[0]


def test_a_case_worked_by_hand():
    p, q = (0.25, 0.25, 0.5), (0.5, 0.25, 0.25)
    forward = sum(a * log(a / b) for a, b in zip(p, q, strict=True))
    out = worked_by_hand("forward")
    assert out.common.item() == pytest.approx(forward, rel=1e-12)
    assert (out.student_rest.item(), out.teacher_rest.item()) == pytest.approx((0.25, 0.5))
    assert out.agreement.item() == 1.0
    # Sorted: 1/4 against 4/10 and 1/10.
    assert out.uncommon.item() == pytest.approx(0.15 + 0.1)
    halves = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    shannon = sum(
        side * log(side / half) / 2
        for pair in (p, q)
        for side, half in zip(pair, halves, strict=True)
    )
    assert worked_by_hand("jensen_shannon").common.item() == pytest.approx(shannon, rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), common=st.integers(0, 15), direction=st.sampled_from(DIRECTIONS))
def test_it_is_zero_without_a_slope_where_both_agree_and_never_negative(seed, common, direction):
    case = Case.random(15, 15, common, seed=seed, padding=0, sizes=((1, 1), (2, 2)))
    out, _ = case.run(MatchedOptions(direction=direction))
    assert (out.common >= -1e-6).all()
    pair = case.pair
    same = Case(
        pair=pair._replace(
            logits=(pair.logits[0], pair.logits[0]), chunk_ids=(pair.chunk_ids[0],) * 2
        ),
        common_student=case.common_student,
        common_teacher=case.common_student,
    )
    out, grad = same.run(MatchedOptions(direction=direction, uncommon_weight=1.0))
    assert out.chunk_loss.abs().max().item() < 1e-6
    assert grad.abs().max().item() < 1e-6
    assert (out.agreement == 1).all()


def test_the_value_does_not_depend_on_how_chunks_are_sliced(monkeypatch):
    case, options = (
        Case.random(20, 30, 11, sizes=MANY),
        matched_options(1.0, "forward", 0.5, 0.7, 4),
    )
    whole, whole_grad = case.run(options)
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, DEVICE.type, 60)
    sliced, sliced_grad = case.run(options)
    # A GPU sums slices of another shape in another order.
    slack = {"rtol": 0, "atol": 0} if DEVICE.type == "cpu" else {}
    for one, other in zip(whole, sliced, strict=True):
        # Rows of no chunk hold NaN, and so do the logarithms of their sums.
        torch.testing.assert_close(one, other, equal_nan=True, **slack)
    torch.testing.assert_close(whole_grad, sliced_grad)


def test_pairs_that_do_not_cross_need_no_exchange():
    case, options = Case.random(60, 40, 25), matched_options(1.0, "reverse", 0.5, 0.7, 9)
    out, grad = case.run(options)
    direct = replace(case.matching(), pairs_cross=False)
    again, again_grad = case.pair.run(
        matched_divergence, matching=direct, options=options, implementation="torch"
    )
    assert torch.equal(out.chunk_loss, again.chunk_loss)
    assert torch.equal(grad, again_grad)


def test_the_gradient_is_all_that_is_kept():
    case = Case.random(200, 300, 90, dtype=torch.bfloat16, padding=0)
    kept = kept_for_backward(lambda: case.run(MatchedOptions(top_u=9)))
    large = [tensor for tensor in kept if tensor.numel() > 200]
    assert [(tensor.dtype, tensor.shape[1]) for tensor in large] == [(torch.bfloat16, 200)]
