"""MinED against its definition; the rules of all objectives are tested elsewhere."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.distributed import vocab_parallel
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses import DistillationInputs, TeacherTargets
from megatron_ext.losses.objectives.mined import MinedLoss
from tests.losses.microbatch import projection_shard

MAPS_TO = [0, 1, 1, 3, -1, 1]
"""Teacher token of each of six student tokens. Nothing maps to 2, and student token 4 to none."""

# Chunks 0 and 3 are one to one.
STUDENT = [[0, 1, 1, 2, 3]]
TEACHER = [[0, 1, 2, 2, 3]]
ROWS = [(0, 0), (4, 4)]


def random_inputs() -> DistillationInputs:
    generator = torch.Generator().manual_seed(1)
    student = torch.randn(1, 5, 6, generator=generator, dtype=torch.float64)
    teacher = 2 * torch.randn(1, 5, 4, generator=generator, dtype=torch.float64)
    shards = [VocabShard(start=0, stop=size, vocab_size=size) for size in (6, 4)]
    dense = torch.zeros(6, 4)
    for row, column in enumerate(MAPS_TO):
        if column >= 0:
            dense[row, column] = 1.0
    return DistillationInputs(
        student_logits=student.requires_grad_(),
        student_shard=shards[0],
        labels=torch.zeros(1, 5, dtype=torch.int64),
        teacher=TeacherTargets(kind="logits", shard=shards[1], logits=teacher),
        alignment=AlignmentBatch.from_chunk_ids(torch.tensor(STUDENT), torch.tensor(TEACHER)),
        projection=projection_shard(dense, *shards),
    )


def definition(inputs: DistillationInputs, sharing: str, tau: float, reverse: bool) -> torch.Tensor:
    """Token by token, in fp64 by autograd."""
    total = torch.zeros((), dtype=torch.float64)
    mapped = [token for token, other in enumerate(MAPS_TO) if other >= 0]
    for own, other in ROWS:
        probs = torch.softmax(inputs.teacher.logits[0, other] / tau, dim=-1)
        carried = []
        for token in mapped:
            sharers = MAPS_TO.count(MAPS_TO[token]) if sharing == "split" else 1
            carried.append(probs[MAPS_TO[token]] / sharers)
        p = torch.stack(carried)
        p = p / p.sum()
        q = torch.softmax(inputs.student_logits[0, own, mapped] / tau, dim=-1)
        first, second = (q, p) if reverse else (p, q)
        total = total + tau**2 * (first * (first.log() - second.log())).sum()
    return total


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("sharing", ["split", "copy"])
def test_value_and_gradient_are_those_of_the_definition(sharing: Any, direction: Any) -> None:
    inputs = random_inputs()
    output = MinedLoss(sharing=sharing, temperature=1.7, direction=direction)(inputs)
    truth = definition(inputs, sharing, 1.7, direction == "reverse")
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
    (true_grad,) = torch.autograd.grad(truth, inputs.student_logits)
    assert int(output.count) == 2
    # The projection's entries are fp32, here 1.
    torch.testing.assert_close(output.loss_sum, truth, rtol=1e-10, atol=0)
    torch.testing.assert_close(grad, true_grad, rtol=1e-10, atol=1e-14)
    assert grad[0, [0, 4]].any(dim=-1).all()
    assert not grad[0, 1:4].any()


def test_splitting_conserves_the_mass_that_is_mapped_and_the_rest_is_told() -> None:
    inputs = random_inputs()
    probs = torch.softmax(inputs.teacher.logits, dim=-1)
    total, count = MinedLoss()(inputs).metrics["offsupport_mass"]
    expected = sum(probs[0, other, 2].item() for _, other in ROWS)
    assert total.item() == pytest.approx(expected)
    assert int(count) == 2


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_teacher_that_masks_all_that_something_maps_to_teaches_nothing(direction: Any) -> None:
    inputs = random_inputs()
    inputs.teacher.logits[0, 0, [0, 1, 3]] = -torch.inf
    output = MinedLoss(direction=direction)(inputs)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
    assert not grad[0, 0].any()
    # The other chunk learns as it does alone, and both count.
    alone = replace(inputs, chunk_mask=torch.tensor([False, True, True, True]))
    expected = MinedLoss(direction=direction)(alone)
    (expected_grad,) = torch.autograd.grad(expected.loss_sum, inputs.student_logits)
    assert output.loss_sum > 0
    assert torch.equal(output.loss_sum, expected.loss_sum)
    assert torch.equal(grad, expected_grad)
    assert int(output.count) == 2
    for name in ("teacher_entropy", "top1_agreement"):
        assert torch.equal(output.metrics[name][0], expected.metrics[name][0])
    missed = output.metrics["offsupport_mass"][0] - expected.metrics["offsupport_mass"][0]
    assert missed.item() == pytest.approx(1.0)


def test_a_teacher_that_masks_everything_is_no_number() -> None:
    inputs = random_inputs()
    inputs.teacher.logits[0, 0] = -torch.inf
    assert MinedLoss()(inputs).loss_sum.isnan()


def test_slices_of_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs()
    whole = MinedLoss()(inputs).loss_sum
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, "cpu", 5)
    assert torch.equal(MinedLoss()(inputs).loss_sum, whole)


def test_a_projection_is_needed_and_one_of_these_shards() -> None:
    inputs = random_inputs()
    with pytest.raises(LossError, match="objective mined needs a vocabulary projection"):
        MinedLoss()(replace(inputs, projection=None))
    shards = [VocabShard(start=0, stop=size, vocab_size=size) for size in (5, 4)]
    other = projection_shard(torch.eye(5, 4), *shards)
    with pytest.raises(LossError, match=r"other shards .*got \(5, 4, 4\); expected \(6, 4, 4\)"):
        MinedLoss()(replace(inputs, projection=other))


def test_unknown_sharing_is_refused() -> None:
    with pytest.raises(LossError, match="unknown sharing of the objective mined; got 'max'"):
        MinedLoss(sharing="max")
