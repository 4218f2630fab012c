"""What every objective says of fixed inputs, by every way to a loss, as it was recorded.

``golden_losses.json`` was written by ``python -m tests.guards.record losses``, in fp32 on a CPU.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from megatron_ext.errors import LossError
from megatron_ext.losses import DistillationInputs, Objective
from tests.guards.loss_cases import leaves, loss_cases
from tests.guards.loss_paths import PathLoss, alone, linear, with_cross_entropy

GOLDEN = Path(__file__).with_name("golden_losses.json")
ENTRIES = 8
REFUSED = "refused"
"""In the place of numbers: the objective has no such way."""

TOLERANCE = 2e-6
"""Machines add up in other orders: a few units of fp32 rounding, relative to what was recorded; for
an entry of a tensor to its largest one, for a metric to the loss that it may be a part of."""

_SIZES = {"entries": "largest", "weighted_sum": "norm", "metrics": "sum"}
"""Numbers -> the number beside them that their rounding is a share of."""

LossPath = Callable[[Objective, DistillationInputs], PathLoss]
_PATHS = {"alone": alone, "with cross-entropy": with_cross_entropy, "linear": linear}
_WEIGHTED = {
    "with cross-entropy of weight 0": partial(with_cross_entropy, ce_weight=0.0),
    "of weight 0 with cross-entropy": partial(with_cross_entropy, kd_weight=0.0),
    "with cross-entropy, weighted on the device": partial(
        with_cross_entropy, teacher_weight=torch.tensor(1.25)
    ),
}
_IS_WEIGHTED = ("projected_kl", "partition_kl", "vocab_kl", "gold", "alm")
"""Objectives that are swept together with the cross-entropy, and some that are not."""


class Measured(NamedTuple):
    """A loss and its gradients."""

    loss: PathLoss
    gradients: dict[str, torch.Tensor]
    """Of the leaves that one reaches."""


def golden_paths():
    """``case: way`` -> both."""
    found = {}
    for name, make in loss_cases().items():
        ways = _PATHS | (_WEIGHTED if name in _IS_WEIGHTED else {})
        found |= {f"{name}: {way}": (make, path) for way, path in ways.items()}
    return found


def measure(make, path):
    """Forward and backward; None where there is no such way."""
    case = make()
    try:
        loss = path(case.objective, case.inputs)
    except LossError:
        return None
    reached = leaves(case)
    gradients = torch.autograd.grad(loss.total, list(reached.values()), allow_unused=True)
    return Measured(
        loss,
        {
            name: gradient
            for name, gradient in zip(reached, gradients, strict=True)
            if gradient is not None
        },
    )


def numbers_of(measured):
    if measured is None:
        return REFUSED
    return {
        "total": _rounded(measured.loss.total),
        "parts": {name: _output(part) for name, part in measured.loss.parts.items()},
        "gradients": {name: _digest(tensor) for name, tensor in measured.gradients.items()},
    }


def bits_of(measured):
    """A hash of every tensor's bytes."""
    if measured is None:
        return REFUSED
    tensors = {"total": measured.loss.total}
    for name, part in measured.loss.parts.items():
        tensors |= {f"{name} sum": part.loss_sum, f"{name} count": part.count}
        tensors |= {f"{name} {metric}": total for metric, (total, _) in part.metrics.items()}
        if part.chunk_loss is not None:
            tensors[f"{name} chunk_loss"] = part.chunk_loss
    tensors |= {f"gradient of {name}": tensor for name, tensor in measured.gradients.items()}
    return {
        name: hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


def recorded_losses():
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return recorded


def mismatches(recorded, measured):
    """A line for every number that is another one."""
    return list(_mismatches(recorded, measured))


def _mismatches(recorded, measured, where="", scale=0.0):
    if not isinstance(recorded, Mapping) or not isinstance(measured, Mapping):
        if not _is_close(recorded, measured, scale=scale):
            yield f"{where}: {measured}, recorded {recorded}"
    elif recorded.keys() != measured.keys():
        yield f"{where}: has {', '.join(measured)}, recorded {', '.join(recorded)}"
    else:
        for name, value in recorded.items():
            size = recorded.get(_SIZES.get(name), scale)
            yield from _mismatches(value, measured[name], f"{where}/{name}", abs(size))


def _is_close(recorded, measured, *, scale):
    if isinstance(recorded, list) and isinstance(measured, list):
        pairs = list(zip(recorded, measured, strict=False))
        return len(recorded) == len(measured) and all(
            _is_close(one, other, scale=scale) for one, other in pairs
        )
    if isinstance(recorded, float) and isinstance(measured, float):
        return abs(recorded - measured) <= TOLERANCE * max(abs(recorded), scale)
    return type(recorded) is type(measured) and bool(recorded == measured)


def _output(part):
    numbers = {"sum": _rounded(part.loss_sum), "count": int(part.count)}
    if part.metrics:
        numbers["metrics"] = {
            name: [_rounded(total), int(count)] for name, (total, count) in part.metrics.items()
        }
    if part.chunk_loss is not None:
        numbers["chunk_loss"] = _digest(part.chunk_loss)
    return numbers


def _digest(tensor):
    """A few numbers that no change of the tensor leaves as they are.

    The sum is weighted by a cosine of the place: the gradient of a softmax adds up to 0.
    """
    flat = tensor.detach().double().flatten()
    places = torch.arange(1, ENTRIES + 1) * len(flat) // (ENTRIES + 1)
    weights = torch.arange(len(flat), dtype=torch.float64).cos()
    return {
        "norm": _rounded(flat.norm()),
        "largest": _rounded(flat.abs().max()),
        "weighted_sum": _rounded(flat @ weights),
        "entries": [_rounded(entry) for entry in flat[places]],
    }


def _rounded(value):
    """Nine significant digits: all that an fp32 has."""
    return float(f"{float(value.detach()):.9g}")
