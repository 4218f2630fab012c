"""Losses from hidden states: the linear form, its floor, and what others have for one vocabulary.

T rows, V columns, D hidden. The floor is the products with the heads alone: the student's logits,
the teacher's, and the gradients of the student's hidden states and head.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from megatron_ext.losses import LOSS_REGISTRY, KnownAhead, TeacherTargets
from megatron_ext.losses.linear import LinearDistillation, no_logits
from megatron_ext.ops.linear_form import add_weight_gradient_

from .cases import NotThereError
from .microbatch import RankVocabulary, Text

STUDENT_HIDDEN: Final = 2048
TEACHER_HIDDEN: Final = 2560
"""Of Llama 3.2 1B and Qwen 3 4B."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Hidden states and head rows of one rank."""

    student_hidden: torch.Tensor
    """[Ts, Ds] with a gradient."""

    student_weight: torch.Tensor
    """[Vs, Ds] with a gradient, and with megatron-core's fp32 ``main_grad``, as in a run."""

    teacher_hidden: torch.Tensor
    """[Tt, Dt]"""

    teacher_weight: torch.Tensor
    """[Vt, Dt]"""

    labels: torch.Tensor
    """int64 [Ts]"""

    @classmethod
    def random(
        cls,
        rows: tuple[int, int],
        columns: tuple[int, int],
        *,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        hidden: tuple[int, int] = (STUDENT_HIDDEN, TEACHER_HIDDEN),
        seed: int = 0,
    ) -> Heads:
        """Normal numbers, the heads scaled so that logits have a standard deviation of 3."""
        generator = torch.Generator(device=device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        sides = [
            (normal(count, width), normal(vocabulary, width).mul_(3 / width**0.5))
            for count, vocabulary, width in zip(rows, columns, hidden, strict=True)
        ]
        weight = sides[0][1].requires_grad_()
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
        return cls(
            student_hidden=sides[0][0].requires_grad_(),
            student_weight=weight,
            teacher_hidden=sides[1][0],
            teacher_weight=sides[1][1],
            labels=torch.randint(0, columns[0], rows[:1], generator=generator, device=device),
        )

    def clear(self) -> None:
        """Drop the gradients."""
        self.student_hidden.grad = self.student_weight.grad = None

    @property
    def flops(self) -> int:
        """Of the products alone."""
        student = self.student_hidden.numel() * len(self.student_weight)
        teacher = self.teacher_hidden.numel() * len(self.teacher_weight)
        return 2 * (3 * student + teacher)


def bare_products(heads: Heads, tile: int = 2048) -> None:
    """The four products and nothing else, in tiles of rows; the logits stand for their gradient.

    The sum over tiles is the linear form's own: one product that is added in fp32.
    """
    weight = heads.student_weight.detach()
    hidden = heads.student_hidden.detach()
    of_weight = heads.student_weight.main_grad  # type: ignore[attr-defined]
    of_hidden = torch.empty_like(hidden)
    for start in range(0, len(hidden), tile):
        rows = hidden[start : start + tile]
        logits = rows @ weight.t()
        torch.mm(logits, weight, out=of_hidden[start : start + tile])
        add_weight_gradient_(of_weight, logits, rows)
    for start in range(0, len(heads.teacher_hidden), tile):
        heads.teacher_hidden[start : start + tile] @ heads.teacher_weight.t()


TILED: Final = {
    "projected_kl + next_token": ("projected_kl", "next_token"),
    "next_token": ("next_token",),
}
"""Objectives that are measured in their linear form."""


def linear_form(
    names: Sequence[str], vocabulary: RankVocabulary, text: Text, heads: Heads, *, tile_rows: int
) -> Callable[[], torch.Tensor]:
    """The loss of ``LinearDistillation`` on the hidden states, one sum with scales of 1."""
    shards = vocabulary.shards
    form = LinearDistillation(
        objectives={name: LOSS_REGISTRY[name]() for name in names},
        tile_rows=tile_rows,
        into_main_grad=True,
    )
    tiles = form.tiles(KnownAhead(labels=text.labels, alignment=text.alignment))
    hidden = heads.student_hidden[None]
    teacher = TeacherTargets(
        kind="hidden",
        shard=shards[1],
        hidden=heads.teacher_hidden[None],
        head_weight=heads.teacher_weight,
    )
    inputs = replace(
        vocabulary.inputs(text, no_logits(hidden, shards[0]), teacher),
        student_hidden=hidden,
        student_head_weight=heads.student_weight,
    )
    tiles = tiles.to(hidden.device)
    scales = dict.fromkeys(names, 1.0)

    def loss() -> torch.Tensor:
        given = replace(inputs, student_hidden=heads.student_hidden[None])
        return form(given, tiles, scales).total

    return loss


def _liger_chunked(heads: Heads) -> Callable[[], torch.Tensor]:
    loss = _liger("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0
    )
    return lambda: loss(
        heads.student_hidden,
        heads.student_weight,
        heads.teacher_hidden,
        heads.teacher_weight,
        heads.labels,
        None,
        None,
    )


def _liger_triton(heads: Heads) -> Callable[[], torch.Tensor]:
    loss = _liger("liger_kernel.transformers.fused_linear_jsd").LigerFusedLinearJSD(jsd_beta=0.0)
    return lambda: loss(
        heads.student_hidden,
        heads.student_weight,
        heads.teacher_hidden,
        heads.teacher_weight,
        heads.labels,
    )


def _liger(module: str) -> Any:
    if importlib.util.find_spec("liger_kernel") is None:
        raise NotThereError("liger-kernel is not installed")
    return importlib.import_module(module)


ONE_VOCABULARY: Final[dict[str, Callable[[Heads], Callable[[], torch.Tensor]]]] = {
    "liger, chunked": _liger_chunked,
    "liger, fused": _liger_triton,
}
"""Forward KL of one vocabulary from hidden states, by liger-kernel (0.8): name -> maker."""
