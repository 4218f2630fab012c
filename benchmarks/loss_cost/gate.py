"""Whether kernels compute what they should, before anything is timed.

Every objective that has kernels is compared with its torch implementation in fp64 on the same
logits: the loss, and the gradient at every logit. The kernels may be no further away than torch in
the logits' own dtype, plus rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_ext.losses import DistillationInputs

from .cases import OBJECTIVES, NotThereError, Objective
from .microbatch import RankVocabulary, same_vocabulary
from .pairs import Structure, synthetic_pair

SMALL = ("small synthetic pair", (500, 600), Structure(common=400, two_piece=60))


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One comparison."""

    objective: str
    dtype: str
    loss_error: float
    """Relative."""

    gradient_error: float
    """Largest difference over the largest gradient."""

    allowed: float
    passed: bool
    message: str = ""


def check_kernels(vocabulary: RankVocabulary, rows: int, device: str) -> Iterator[Checked]:
    """Compare every objective that has kernels; those without are left out."""
    for dtype in (torch.bfloat16, torch.float32):
        inputs = vocabulary.microbatch(rows, device=device, dtype=dtype)
        for objective in OBJECTIVES:
            try:
                yield _check(objective, inputs, dtype)
            except NotThereError:
                continue
            except Exception as error:
                yield Checked(
                    objective=objective.name,
                    dtype=str(dtype),
                    loss_error=float("nan"),
                    gradient_error=float("nan"),
                    allowed=0.0,
                    passed=False,
                    message=f"{type(error).__name__}: {str(error)[:500]}",
                )


def small_vocabulary() -> RankVocabulary:
    """What an interpreter can take: vocabularies of 500 and 600, 60 chunks."""
    return RankVocabulary.of(synthetic_pair(*SMALL, length=60), 1)


def _check(objective: Objective, inputs: DistillationInputs, dtype: torch.dtype) -> Checked:
    if objective.same_vocabulary:
        inputs = same_vocabulary(inputs)
    kernel_loss, kernel_gradient = _run(objective, "triton", inputs)
    torch_loss, torch_gradient = _run(objective, "torch", inputs)
    true_loss, true_gradient = _run(objective, "torch", _in_fp64(inputs))
    largest = float(true_gradient.abs().max())
    # A bf16 gradient is cut off, not rounded, where kernels are interpreted.
    rounding = torch.finfo(dtype).eps * 2
    allowed = _distance(torch_gradient, true_gradient) / largest + rounding
    gradient_error = _distance(kernel_gradient, true_gradient) / largest
    scale = abs(float(true_loss))
    loss_error = abs(float(kernel_loss) - float(true_loss)) / scale
    loss_allowed = abs(float(torch_loss) - float(true_loss)) / scale + 1e-5
    return Checked(
        objective=objective.name,
        dtype=str(dtype),
        loss_error=loss_error,
        gradient_error=gradient_error,
        allowed=allowed,
        passed=bool(gradient_error <= allowed and loss_error <= loss_allowed),
    )


def _run(
    objective: Objective, implementation: str, inputs: DistillationInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    loss = objective.loss(implementation)
    inputs.student_logits.grad = None
    value = loss(inputs)
    value.backward()
    gradient = inputs.student_logits.grad
    assert gradient is not None
    inputs.student_logits.grad = None
    return value.detach(), gradient


def _in_fp64(inputs: DistillationInputs) -> DistillationInputs:
    assert inputs.teacher is not None
    assert inputs.teacher.logits is not None
    changes: dict[str, Any] = {
        "student_logits": inputs.student_logits.detach().double().requires_grad_(),
        "teacher": replace(inputs.teacher, logits=inputs.teacher.logits.double()),
    }
    return replace(inputs, **changes)


def _distance(gradient: torch.Tensor, truth: torch.Tensor) -> float:
    return float((gradient.double() - truth).abs().max())
