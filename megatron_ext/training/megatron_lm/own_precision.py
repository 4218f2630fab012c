"""A model's output in the precision that it was computed in."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module


class InItsPrecision:
    """A model whose output is not made fp32, which ``Float16Module`` does with all logits.

    Our losses add up in fp32 whatever they read.

    Args:
        model: A chunk as Megatron-LM has wrapped it.
    """

    def __init__(self, model: Any) -> None:
        self.module = model

    def __call__(self, *inputs: Any) -> Any:
        model = self.module
        while not isinstance(model, (GPTModel, Float16Module)):
            model = model.module
        options = {"fp32_output": False} if isinstance(model, Float16Module) else {}
        return self.module(*inputs, **options)
