"""Events of chains by the kernel, held to autograd over the plain expressions in fp64."""

import pytest
import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.divergence import DivergenceOptions
from megatron_ext.ops.partition_kl.chain_chunks import (
    ChosenLogits,
    compare_chains,
    compare_chains_by_kernel,
)
from megatron_ext.ops.partition_kl.chain_masses import IMPOSSIBLE, row_masses
from megatron_ext.ops.partition_kl.operands import (
    ChainRows,
    Chains,
    PartitionPlan,
    SingleRows,
)
from tests.ops.kernel_case import DEVICE, DIRECTIONS

STEPS = (0, 3, 1, 0, 2), (2, 0, 1, 0, 4)
COMPLETIONS = (3, 1, 0, 300, 2)
"""Of each chain; 300 are more than a program of the kernel holds."""


def _chains():
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    sides = []
    for steps in STEPS:
        chain = torch.arange(len(steps)).repeat_interleave(torch.tensor(steps)).to(DEVICE)
        place = torch.cat([torch.arange(count) for count in steps]).to(DEVICE)
        sides.append(ChainRows(nothing, nothing, chain, place, nothing, nothing))
    pointers = torch.tensor([0, *COMPLETIONS]).cumsum(0).tolist()
    chain = torch.arange(len(COMPLETIONS)).repeat_interleave(torch.tensor(COMPLETIONS)).to(DEVICE)
    return Chains(*sides, chain, tuple(pointers), max(map(max, STEPS)))


def plan_of(direction, temperature):
    shard = VocabShard(start=0, stop=8, vocab_size=8)
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    options = DivergenceOptions(temperature=temperature, direction=direction, mixture=0.3)
    counted = torch.tensor([True, True, True, True, False], device=DEVICE)
    return PartitionPlan(
        SingleRows(nothing, nothing), None, _chains(), counted, shard, shard, options
    )


def random_logits(steps, *, spread, masked=()):
    events, chains = sum(COMPLETIONS), len(COMPLETIONS)
    chosen = spread * torch.randn(sum(steps) + events, dtype=torch.float64).to(DEVICE)
    chosen[[sum(steps) + place for place in masked]] = IMPOSSIBLE
    rest = spread * torch.randn(sum(steps) + chains, dtype=torch.float64)
    return ChosenLogits(chosen, rest.to(DEVICE))


@pytest.mark.parametrize("spread", [1.0, 12.0])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("of_teacher", ["logits", "masses"])
def test_values_and_gradients_are_those_of_autograd(of_teacher, direction, temperature, spread):
    plan = plan_of(direction, temperature)
    student = random_logits(STEPS[0], spread=spread, masked=(1,))
    # The reverse KL has the smallest normal number in a masked token's place: that of the dtype.
    masked = (1,) if direction == "reverse" else (1, 9)
    teacher = random_logits(STEPS[1], spread=spread, masked=masked)
    if of_teacher == "masses":
        teacher = row_masses(*teacher, plan.chains, sum(STEPS[1]))
    scale = torch.tensor([0.5, 2.0, 0.0, 1.0, 1.0], device=DEVICE)
    given = student, teacher, plan, scale
    values, gradients = compare_chains(*given, with_gradient=True)
    found, written = compare_chains_by_kernel(*given, with_gradient=True)
    counted = plan.counted
    for name in ("divergence", "student_rest", "teacher_rest"):
        own, exact = getattr(found, name)[counted], getattr(values, name)[counted]
        torch.testing.assert_close(own, exact.float(), rtol=2e-5, atol=1e-6)
    assert torch.equal(found.agreement[counted], values.agreement[counted])
    assert found.divergence[~counted].tolist() == [0.0]
    for own, exact in zip(written, gradients, strict=True):
        # The reverse KL's slopes are as large as it, and cancel.
        largest = max(float(exact.abs().max()), 1.0)
        torch.testing.assert_close(own, exact.float(), rtol=2e-5, atol=1e-6 * largest)


def test_without_a_gradient_values_are_the_same():
    plan = plan_of("forward", 1.0)
    given = random_logits(STEPS[0], spread=2.0), random_logits(STEPS[1], spread=2.0), plan, None
    with_gradient, _ = compare_chains_by_kernel(*given, with_gradient=True)
    alone, gradients = compare_chains_by_kernel(*given, with_gradient=False)
    assert all(map(torch.equal, alone, with_gradient))
    assert not any(map(torch.any, gradients))


def test_a_number_that_is_none_makes_its_own_chain_none():
    plan, student = plan_of("forward", 1.0), random_logits(STEPS[0], spread=1.0)
    student.chosen[sum(STEPS[0])] = torch.nan
    teacher = random_logits(STEPS[1], spread=1.0)
    values, _ = compare_chains_by_kernel(student, teacher, plan, None, with_gradient=True)
    assert values.divergence.isnan().tolist() == [True, False, False, False, False]


def test_no_chain_is_no_launch():
    plan = plan_of("forward", 1.0)
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    rows = ChainRows(*[nothing] * 6)
    plan = plan._replace(chains=Chains(rows, rows, nothing, (0,), 0), counted=nothing.bool())
    none = ChosenLogits(*torch.zeros(2, 0, device=DEVICE))
    values, gradients = compare_chains_by_kernel(none, none, plan, None, with_gradient=True)
    assert [len(part) for part in (*values, *gradients)] == [0] * 6
