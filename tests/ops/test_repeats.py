import math

import pytest
import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.divergence import DivergenceOptions
from megatron_ext.ops.repeats import (
    Repeats,
    evaluate_repeats,
    repeat_divergence,
    repeats_reference,
)

OPTIONS = [
    DivergenceOptions(),
    DivergenceOptions(temperature=1.7),
    DivergenceOptions(direction="reverse", temperature=0.8),
    DivergenceOptions(direction="jensen_shannon", mixture=0.3),
]

REPEATS = Repeats(
    student_row=torch.tensor([4, 0, 2]),
    # One to three copies; two, four and five; one and two.
    member=torch.tensor([[5, 6, 7], [8, 11, 12], [5, 6, -1]]),
    reached=torch.tensor([[0, 1, 2], [1, 3, -1], [0, 1, -1]]),
    teacher_row=torch.tensor([1, 2, 4, 5, 6, 0]),
    teacher_token=torch.tensor([3, 3, 9, 9, 9, 3]),
    step=torch.tensor([[0, 1, -1], [2, 3, 4], [5, -1, -1]]),
)


def logits(rows, vocab, padding, dtype, seed):
    drawn = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).double()
    return torch.nn.functional.pad(drawn, (0, padding), value=99.0).to(dtype)


def pair(dtype=torch.float64, paddings=(3, 1)):
    student = logits(6, 17, paddings[0], dtype, 1).requires_grad_()
    teacher = logits(8, 13, paddings[1], dtype, 2)
    shards = tuple(
        VocabShard(start=0, stop=side.shape[1], vocab_size=vocab)
        for side, vocab in ((student, 17), (teacher, 13))
    )
    return student, teacher, shards


def evaluated(student, teacher, shards, options, repeats=REPEATS):
    values = evaluate_repeats(student, teacher, repeats, shards, options)
    return repeat_divergence(student, values, repeats, shards[0])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "slack"), [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 8e-3)]
)
def test_values_and_gradient_equal_the_reference(options, dtype, slack):
    student, teacher, shards = pair(dtype)
    leaf = student.detach()[:, :17].double().requires_grad_()
    truth = repeats_reference(leaf, teacher[:, :13].double(), REPEATS, options)
    weights = torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64)
    (true_grad,) = torch.autograd.grad((truth * weights).sum(), leaf)
    value = evaluated(student, teacher, shards, options)
    (grad,) = torch.autograd.grad((value * weights).sum(), student)
    accurate = min(slack, 3e-6)
    torch.testing.assert_close(value.double(), truth.detach(), rtol=accurate, atol=accurate)
    torch.testing.assert_close(grad[:, :17].double(), true_grad, rtol=slack, atol=slack)
    assert not grad[:, 17:].any()


def test_a_student_that_expects_what_its_teacher_does_has_no_loss_and_no_gradient():
    student, teacher, shards = pair()
    p = torch.softmax(teacher[:, :13], dim=1)[REPEATS.teacher_row, REPEATS.teacher_token]
    with torch.no_grad():
        # Whatever else the student predicts, its shares are those of equation (2).
        student[4, 5:8] = torch.stack([1 - p[0], p[0] * (1 - p[1]), p[0] * p[1]]).log() - 7
        on = p[2:5].cumprod(0)
        student[0, 8] = (1 - on[2] / on[0]).log()
        student[0, 11:13] = (on[2] / on[0] * torch.tensor([0.3, 0.7])).log()
        student[2, 5:7] = torch.stack([1 - p[5], p[5]]).log() + 4
    value = evaluated(student, teacher, shards, DivergenceOptions(temperature=1.3))
    (grad,) = torch.autograd.grad(value.sum(), student)
    assert value.abs().max() < 1e-14
    assert grad.abs().max() < 1e-10


@pytest.mark.parametrize("certain", [40.0, -40.0, math.inf, -math.inf])
def test_a_teacher_that_is_sure_keeps_value_and_gradient_finite(certain):
    student, teacher, shards = pair(torch.float32)
    teacher[REPEATS.teacher_row, REPEATS.teacher_token] = min(certain, 200.0)
    value = evaluated(student, teacher, shards, DivergenceOptions())
    (grad,) = torch.autograd.grad(value.sum(), student)
    assert value.isfinite().all()
    assert grad.isfinite().all()
    if certain < -200:
        # The second row's members begin with two copies, of which there are none.
        assert value[1] == 0
    # A run that surely ends has one copy, one that surely goes on has as many as are reached.
    expected = -torch.log_softmax(student.detach()[4, 5:8], 0)[2 if certain > 0 else 0]
    assert value[0].item() == pytest.approx(expected.item(), rel=1e-5)


def test_masked_members_have_no_gradient_and_a_row_of_them_alone_no_loss():
    student, teacher, shards = pair(torch.float32)
    with torch.no_grad():
        student[4, 6] = -torch.inf
        student[2, 5:7] = -torch.inf
    value = evaluated(student, teacher, shards, DivergenceOptions())
    (grad,) = torch.autograd.grad(value.sum(), student)
    assert value.isfinite().all()
    assert value[2] == 0
    assert grad.isfinite().all()
    assert grad[4, 6] == 0
    assert not grad[2].any()
    assert grad[4, 5] != 0
