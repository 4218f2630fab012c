"""Objectives on the pretended device, held to what they give on the CPU."""

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final

import torch

from megatron_ext.losses import LOSS_REGISTRY, DistillationInputs, Objective
from tests.losses.objective_cases import CASES, ObjectiveCase, as_kind
from tests.rehearsal.pretended_cuda import EVENTS, held

_LEAST: Final = 0.01
"""Gradients that are smaller are differences of probabilities, rounded as these are."""


def rehearse_loss(name: str) -> list[dict[str, Any]]:
    """For each form of targets the largest errors, relative to the largest number or ``_LEAST``,
    and the record.

    The record is of a second evaluation. ``launches`` are those of torch's operations, ``kernels``
    those of ours.
    """
    case = CASES[name]
    return [_compared(case, kind, inputs) for kind, inputs in _forms(case)]


def _forms(case: ObjectiveCase) -> Iterator[tuple[str, DistillationInputs]]:
    inputs = case.build(case.batch(), (3, 1))
    if inputs.teacher is None or inputs.teacher.kind != "logits":
        yield "own", inputs
        return
    for kind in case.kinds or ("none",):
        yield kind, inputs if kind in ("logits", "none") else as_kind(inputs, kind, 5)


def _compared(case: ObjectiveCase, kind: str, inputs: DistillationInputs) -> dict[str, Any]:
    truth, true_grads = _run(objective_on(case, "cpu"), inputs)
    objective, moved = objective_on(case, "cuda"), on_device(inputs)
    # What is made once a run, of a match of vocabularies, waits for the device.
    _run(objective, moved)
    EVENTS.clear()
    value, grads = _run(objective, moved)
    record = {
        "kind": kind,
        "waits": EVENTS.lines("wait"),
        "uploads": EVENTS.lines("upload", "pinned upload"),
        "mismatches": EVENTS.lines("mismatch"),
        "launches": EVENTS.number("launch"),
        "kernels": EVENTS.number("kernel"),
    }
    pairs = [(value, truth), *zip(grads, true_grads, strict=True)]
    errors = [float((held(x) - y).abs().max() / y.abs().max().clamp(min=_LEAST)) for x, y in pairs]
    return record | {"errors": errors, "gradients": len(grads)}


def objective_on(case: ObjectiveCase, device: str) -> Objective:
    """The objective of a case, with parameters of its own on the device."""
    options = dict(case.options)
    if "projectors" in options:
        options["projectors"] = copy.deepcopy(options["projectors"]).to(device)
    return LOSS_REGISTRY[case.name](**options)


def _run(
    objective: Objective, inputs: DistillationInputs
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The sum, and the gradients of logits, hidden states and the objective's parameters."""
    leaves = [inputs.student_logits]
    if inputs.student_hidden is not None:
        leaves.append(inputs.student_hidden.requires_grad_())
    projectors = getattr(objective, "projectors", None)
    if projectors is not None:
        leaves += projectors.parameters()
    total = objective(inputs).loss_sum
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return total.detach(), [grad for grad in grads if grad is not None]


def on_device(value: Any) -> Any:
    """A copy of everything that a record holds, on the device; leaves stay leaves."""
    if isinstance(value, torch.Tensor):
        moved = value.detach().to("cuda")
        return moved.requires_grad_() if value.requires_grad else moved
    if is_dataclass(value):
        parts = {part.name: on_device(getattr(value, part.name)) for part in fields(value)}
        return replace(value, **parts)
    if isinstance(value, tuple):
        parts = [on_device(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
