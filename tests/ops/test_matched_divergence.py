"""The matched divergence against its reference in fp64, and what a divergence must do."""

from __future__ import annotations

from math import log
from typing import NamedTuple, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.distributed import row_slices
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.divergence import Divergence
from megatron_ext.ops.matched_divergence import (
    MatchedDivergence,
    matched_divergence,
    matched_divergence_reference,
)

DIRECTIONS = get_args(Divergence)

MATCHES = {
    "some are common": (5, 23, 17, 9),
    "every student token is common": (4, 8, 21, 8),
    "every teacher token is common": (4, 21, 8, 8),
    "one vocabulary": (3, 12, 12, 12),
    "nothing is common": (3, 6, 5, 0),
    "no chunk": (0, 9, 7, 4),
    "vocabularies of one token": (2, 1, 1, 1),
}
"""Chunks, Vs, Vt, common tokens."""


class Case(NamedTuple):
    student: torch.Tensor
    teacher: torch.Tensor
    common_student: torch.Tensor
    common_teacher: torch.Tensor

    @classmethod
    def random(cls, chunks: int, student: int, teacher: int, common: int, *, seed: int = 0) -> Case:
        generator = torch.Generator().manual_seed(seed)
        probs = [
            torch.softmax(
                3 * torch.randn(chunks, width, generator=generator, dtype=torch.float64), dim=-1
            )
            for width in (student, teacher)
        ]
        return cls(
            probs[0],
            probs[1],
            torch.randperm(student, generator=generator)[:common].sort().values,
            torch.randperm(teacher, generator=generator)[:common],
        )

    def truth(self, direction: Divergence, mixture: float = 0.5) -> torch.Tensor:
        return matched_divergence_reference(
            self.student,
            self.teacher,
            common_student=self.common_student,
            common_teacher=self.common_teacher,
            direction=direction,
            mixture=mixture,
        )

    def run(
        self, direction: Divergence, *, dtype: torch.dtype = torch.float64, mixture: float = 0.5
    ) -> tuple[MatchedDivergence, torch.Tensor]:
        """The op and the gradient of the sum of its values."""
        probs = self.student.detach().to(dtype).requires_grad_()
        widths = (self.student.shape[1], self.teacher.shape[1])
        column = torch.full((widths[1],), -1)
        column[self.common_teacher] = self.common_student
        is_common = torch.zeros(widths[0], dtype=torch.bool)
        is_common[self.common_student] = True
        out = matched_divergence(
            probs,
            self.teacher.to(dtype),
            student_column=column,
            is_common=is_common,
            with_rest=len(self.common_student) < min(widths),
            student_shard=VocabShard(start=0, stop=widths[0], vocab_size=widths[0]),
            direction=direction,
            mixture=mixture,
        )
        (grad,) = torch.autograd.grad(out.value.sum(), probs)
        return out, grad


def tangent(grad: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """What of a gradient moves a distribution: constants over its columns do not."""
    return probs * (grad - (probs * grad).sum(dim=-1, keepdim=True))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", MATCHES)
def test_value_and_gradient_equal_the_references(name: str, direction: Divergence) -> None:
    case = Case.random(*MATCHES[name])
    case.student.requires_grad_()
    truth = case.truth(direction, 0.3)
    (true_grad,) = torch.autograd.grad(truth.sum(), case.student)
    for dtype, slack in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        out, grad = case.run(direction, dtype=dtype, mixture=0.3)
        torch.testing.assert_close(out.value.double(), truth, rtol=slack, atol=slack)
        torch.testing.assert_close(grad.double(), true_grad, rtol=slack, atol=slack)
        torch.testing.assert_close(
            tangent(grad.double(), case.student),
            tangent(true_grad, case.student),
            rtol=0,
            atol=slack,
        )


def test_a_case_worked_by_hand() -> None:
    # Common: (1/2, 1/4) of the student, (1/4, 1/4) of the teacher; the rest is 1/4 and 1/2.
    case = Case(
        torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64),
        torch.tensor([[0.4, 0.25, 0.1, 0.25]], dtype=torch.float64),
        torch.tensor([0, 1]),
        torch.tensor([3, 1]),
    )
    p, q = (0.25, 0.25, 0.5), (0.5, 0.25, 0.25)
    forward = sum(a * log(a / b) for a, b in zip(p, q, strict=True))
    out, _ = case.run("forward")
    assert out.value.item() == pytest.approx(forward, rel=1e-12)
    assert (out.student_rest.item(), out.teacher_rest.item()) == (0.25, 0.5)
    assert out.agreement.item() == 1.0
    halves = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    shannon = sum(
        side * log(side / half) / 2
        for pair in (p, q)
        for side, half in zip(pair, halves, strict=True)
    )
    assert case.run("jensen_shannon")[0].value.item() == pytest.approx(shannon, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    common=st.integers(0, 15),
    direction=st.sampled_from(DIRECTIONS),
)
def test_it_is_zero_without_a_slope_where_both_agree_and_never_negative(
    seed: int, common: int, direction: Divergence
) -> None:
    case = Case.random(4, 15, 15, common, seed=seed)
    out, _ = case.run(direction)
    assert (out.value >= -1e-12).all()
    same = case._replace(teacher=case.student, common_teacher=case.common_student)
    out, grad = same.run(direction, dtype=torch.float32)
    assert out.value.abs().max().item() < 1e-6
    assert tangent(grad.double(), case.student).abs().max().item() < 1e-6
    assert (out.agreement == 1).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_chunk_of_no_row_costs_nothing(direction: Divergence) -> None:
    case = Case.random(3, 9, 7, 4)
    alone, _ = case.run(direction)
    case.student[1], case.teacher[1] = 0.0, 0.0
    out, _ = case.run(direction)
    assert out.value[1] == 0
    assert torch.equal(out.value[[0, 2]], alone.value[[0, 2]])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("common", [6, 9], ids=["with a rest", "without"])
def test_mass_that_the_other_side_rules_out_stays_finite(
    direction: Divergence, common: int
) -> None:
    case = Case.random(2, 9, 12, common)
    case.student[0, case.common_student[:3]] = 0.0
    case.teacher[1, case.common_teacher[2:5]] = 0.0
    out, grad = case.run(direction, dtype=torch.float32)
    assert out.value.isfinite().all()
    assert (out.value < 90).all()
    assert tangent(grad, case.student.float()).isfinite().all()


def test_the_value_does_not_depend_on_how_chunks_are_sliced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case.random(7, 20, 30, 11)
    whole, whole_grad = case.run("forward")
    monkeypatch.setitem(row_slices.SLICE_ELEMENTS, "cpu", 45)
    sliced, sliced_grad = case.run("forward")
    assert all(torch.equal(one, other) for one, other in zip(whole, sliced, strict=True))
    assert torch.equal(whole_grad, sliced_grad)


def test_one_tensor_of_the_students_width_is_kept() -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        Case.random(6, 200, 300, 90).run("reverse", dtype=torch.float32)
    assert [tuple(tensor.shape) for tensor in kept if tensor.numel() > 200] == [(6, 200)]
