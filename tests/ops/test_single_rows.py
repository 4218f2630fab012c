"""Chunks of one student row, in both orders of the heads, against the definition in fp64."""

import pytest
import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.projected_kl import (
    ProjectedKLOptions,
    kernel_numbers,
)
from tests.ops.kernel_case import ALL_THREE, DEVICE, assert_as_exact, combinations, sampled
from tests.ops.projected_kl_case import (
    Case,
    WithLabels,
    aligned_projection,
    column_plan,
    paired_projection,
)

pytest.importorskip("triton")

STUDENT, TEACHER = 47, 41
PROJECTIONS = {"aligned": aligned_projection, "any order": paired_projection}

STUDENT_CHUNK = torch.tensor([2, 0, -1, 1, 3, 4, 4, 5], device=DEVICE)
TEACHER_CHUNK = torch.tensor([1, 0, 1, 2, 4, -1, 3, 3, 3, 5], device=DEVICE)
"""One row a chunk but for the student's in chunk 4, and the teacher's in 1 and 3."""

TERMS = WithLabels(
    labels=torch.tensor([3, 30, 0, 18, 46, 20, -100, 7], device=DEVICE),
    weights=torch.tensor([1.0, 0.5, 2.0, 1.0, 0.3, 1.0, 1.0, 0.0], device=DEVICE),
    grad_scale=torch.tensor([1.0, 0.5, 2.5, 1.0, 2.0, 0.0], device=DEVICE),
)


def case_of(order, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((len(STUDENT_CHUNK), STUDENT), (len(TEACHER_CHUNK), TEACHER))
    student, teacher = (
        (3 * torch.randn(shape, generator=generator)).to(DEVICE, dtype) for shape in shapes
    )
    return Case(
        student_logits=student,
        teacher_logits=teacher,
        student_chunk_id=STUDENT_CHUNK,
        teacher_chunk_id=TEACHER_CHUNK,
        chunk_count=6,
        projection=PROJECTIONS[order](STUDENT, TEACHER).to(DEVICE),
    )


@pytest.mark.usefixtures("nan_filled", "in_any_order")
@ALL_THREE
@pytest.mark.parametrize("order", PROJECTIONS)
@pytest.mark.parametrize(
    ("temperature", "dtype", "in_place"),
    [
        (1.0, torch.float32, False),
        (1.0, torch.bfloat16, True),
        (2.0, torch.float32, True),
    ],
)
def test_values_and_gradients_are_the_references(
    implementation, order, temperature, dtype, in_place
):
    case = case_of(order, 0, dtype)
    truth, true_grad = TERMS.truth(case, torch.float64, temperature=temperature)
    plain, plain_grad = TERMS.truth(case, torch.float32, temperature=temperature)
    leaf = torch.nn.functional.pad(case.student_logits, (0, 5), value=1e4).requires_grad_()
    total, _ = TERMS.fused(
        case,
        leaf * 1.0,
        ProjectedKLOptions(temperature=temperature),
        in_place=in_place,
        implementation=implementation,
    )
    (grad,) = torch.autograd.grad(total, leaf)
    assert_as_exact(total.detach(), plain, truth, slack=2e-6)
    assert not grad[:, STUDENT:].any()
    slack = 2e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert_as_exact(grad[:, :STUDENT], plain_grad, true_grad, slack=slack)


@pytest.mark.parametrize(
    ("order", "raised"),
    combinations(tuple(PROJECTIONS), sampled(["direct", "residual", "nothing", "unmapped"], 2)),
)
def test_diagnostics_are_those_of_torch_wherever_the_largest_column_is(order, raised):
    agreed = []
    for seed in range(2):
        case = case_of(order, seed, torch.float32)
        counts = (case.projection > 0).sum(dim=1)
        rows = {"direct": counts == 1, "residual": counts > 1, "unmapped": counts == 0}
        if raised != "nothing":
            column = int(rows[raised].nonzero()[seed])
            case.student_logits[:, column] += 6.0
            if raised != "unmapped":
                case.teacher_logits[:, int(case.projection[column].argmax())] += 6.0
        logits = case.student_logits.requires_grad_()
        values = [
            TERMS.fused(case, logits, ProjectedKLOptions(), implementation=by)[1]
            for by in ("triton", "torch")
        ]
        torch.testing.assert_close(values[0].teacher_entropy, values[1].teacher_entropy)
        assert torch.equal(values[0].top1_agreement, values[1].top1_agreement)
        agreed += values[0].top1_agreement.tolist()
    assert raised != "direct" or any(agreed)


@pytest.mark.usefixtures("in_any_order")
@pytest.mark.parametrize("raised", sampled(["residual", "direct", None]))
def test_chunks_that_several_programs_share_are_those_of_one(monkeypatch, raised):
    case = case_of("aligned", 3, torch.float32)
    if raised is not None:
        # Each part looks for its own largest pair where the row's is none.
        case.student_logits[:, 20 if raised == "residual" else 3] += 9.0
    chosen = ProjectedKLOptions(temperature=1.5)
    found = []
    for parts in (1, 4):
        monkeypatch.setattr(kernel_numbers, "pair_parts", lambda *_, parts=parts: parts)
        leaf = case.student_logits.clone().requires_grad_()
        total, values = TERMS.fused(
            case, leaf * 1.0, chosen, in_place=True, implementation="triton"
        )
        found.append((torch.autograd.grad(total, leaf)[0], *values[:1], *values[1:4], *values[6:]))
    for one, several in zip(*found, strict=True):
        torch.testing.assert_close(one, several)


def test_plans_of_both_orders_are_what_they_are_named_for():
    shards = [VocabShard(start=0, stop=size, vocab_size=size) for size in (STUDENT, TEACHER)]
    assert column_plan(paired_projection(STUDENT, TEACHER), *shards).aligned is None
    plan = column_plan(aligned_projection(STUDENT, TEACHER), *shards)
    assert (plan.aligned, plan.direct_pairs, plan.residual_rows) == (16, 16, 32)
