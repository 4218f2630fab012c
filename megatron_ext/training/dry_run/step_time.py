"""Seconds of a step on machines whose rates are given: computed, never measured."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from megatron_ext.training.dry_run.arithmetic import step_arithmetic
from megatron_ext.training.dry_run.plan import Plan
from megatron_ext.training.dry_run.wire import wire_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One accelerator and what joins it to others: data-sheet rates, and the share of them reached.

    The shares are assumptions.
    """

    name: str
    operations: float
    """A second, of bf16 products."""
    memory: float
    """Bytes a second."""
    link: float
    """Bytes a second that a rank sends within its node."""
    network: float
    """Bytes a second that a rank sends to other nodes."""
    node: int
    """Accelerators of a node."""
    reached_operations: float = 0.4
    reached_bytes: float = 0.7


H100: Final = Machine(
    name="H100 SXM",
    operations=989e12,
    memory=3.35e12,
    link=450e9,
    network=50e9,
    node=8,
)
"""NVIDIA's data sheet; one 400 Gb/s adapter for each accelerator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Of one step, nothing overlapping with anything."""

    student: float
    teachers: float
    heads: float
    loss: float
    tensor_parallel: float
    context_parallel: float
    pipeline: float
    bubble: float
    """What the fullest stage waits for the others: ``(P - 1) / (V M)`` of its work."""
    data_parallel: float

    @property
    def total(self) -> float:
        """All parts."""
        return float(sum(getattr(self, item.name) for item in fields(self)))

    def shares(self) -> dict[str, float]:
        """Each part over the total."""
        return {item.name: getattr(self, item.name) / self.total for item in fields(self)}


def step_seconds(plan: Plan, machine: Machine = H100) -> StepSeconds:
    """What a step takes on the last stage, which has the heads and the loss besides its layers."""
    work = step_arithmetic(plan)
    products = machine.operations * machine.reached_operations
    stage_ranks = plan.gradient_ranks * plan.student.tp
    layers = products * stage_ranks * plan.stages
    student = work.student_layers / layers
    teachers = work.teacher_layers / layers
    heads = (work.student_head + work.teacher_heads) / (products * stage_ranks)
    loss = work.loss_bytes / (machine.memory * machine.reached_bytes * stage_ranks)
    sent = wire_bytes(plan, plan.stages - 1)
    first = wire_bytes(plan, 0)
    bubble = (plan.stages - 1) / (plan.chunks * plan.microbatches)
    within = plan.student.tp <= machine.node
    return StepSeconds(
        student=student,
        teachers=teachers,
        heads=heads,
        loss=loss,
        tensor_parallel=_seconds(sent.tensor_parallel + sent.loss, machine, within=within),
        context_parallel=_seconds(
            sent.context_parallel, machine, within=plan.cp * plan.student.tp <= machine.node
        ),
        pipeline=_seconds(first.pipeline, machine, within=plan.world_size <= machine.node),
        # The teacher's schedule fills and drains the pipeline, too.
        bubble=bubble * (student + teachers),
        data_parallel=_seconds(
            sent.data_parallel + sent.tied_embedding,
            machine,
            within=plan.world_size <= machine.node,
        ),
    )


def _seconds(sent: int, machine: Machine, *, within: bool) -> float:
    return sent / (machine.reached_bytes * (machine.link if within else machine.network))
