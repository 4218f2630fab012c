"""The student's last hidden states beside its logits. B batch, T tokens, D hidden, Vp columns."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megatron_ext.teachers.megatron_teacher import head_weight, whole_sequence


class StudentHidden:
    """Keeps what goes into the output layer of a last stage, until it is taken.

    Args:
        gpt: The stage, before or after it is wrapped.
    """

    def __init__(self, gpt: GPTModel) -> None:
        self._gpt = gpt
        self._last: torch.Tensor | None = None
        gpt.output_layer.register_forward_pre_hook(self._keep)

    def take(self) -> torch.Tensor:
        """[B, T, D] of the forward pass before, with its graph; once for each pass.

        The gradient of the logits is whole on every tensor-parallel rank here, since the output
        layer reduces it.

        Collectives: those of ``whole_sequence``.
        """
        assert self._last is not None
        hidden, self._last = self._last, None
        return whole_sequence(hidden, self._gpt).transpose(0, 1)

    @property
    def head_weight(self) -> torch.Tensor:
        """[Vp, D]"""
        return head_weight(self._gpt)

    def _keep(self, layer: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        self._last = inputs[0]
