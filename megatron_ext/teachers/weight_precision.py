"""Precisions that torchao rounds the weights of a model's linear layers to: ``round_weights``.

O rows and I columns of a weight, G columns in a group of it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from math import gcd
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn.utils import parametrize

from megatron_ext.constants import INT4_GROUP
from megatron_ext.errors import CheckpointError
from megatron_ext.imports import needed_packages

WeightPrecision = Literal["int8", "fp8", "int4"]


def round_weights(model: Any, precision: WeightPrecision) -> None:
    """Round the weights of linear layers in place, but those of the head.

    A layer multiplies by the weights as they are after rounding, in the dtype of its input. Weights
    are a byte each with a scale for each row, in int4 half a byte each with a scale and a zero for
    each ``INT4_GROUP`` columns.

    Args:
        model: A model of transformers.

    Raises:
        MissingDependencyError: torchao is not installed.
        CheckpointError: A layer's weights cannot be packed.
    """
    with needed_packages(f"weight_precision {precision}"):
        quantization: Any = importlib.import_module("torchao.quantization")
    head = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and layer is not head:
            _ROUNDING[precision](layer, name, quantization)


def _quantize(layer: nn.Linear, name: str, quantization: Any, *, config: str) -> None:
    rule = getattr(quantization, config)()
    quantization.quantize_(layer, rule, filter_fn=lambda *_: True)


def _pack(layer: nn.Linear, name: str, quantization: Any) -> None:
    """Keep a layer's weight as ``_PackedInt4`` does; it is unpacked for each product.

    torchao's own int4 layers need a GPU, and its int4 weights for any device take a byte each.
    """
    group = gcd(layer.in_features, INT4_GROUP)
    if group == 1:
        raise CheckpointError(
            "int4 keeps two weights of a row in a byte",
            where=f"{name}.weight",
            got=f"{layer.in_features} columns",
            expected="an even number",
            fix="set weight_precision to int8 or fp8",
        )
    layer.weight.requires_grad_(False)
    packed = _PackedInt4(quantization, group)
    parametrize.register_parametrization(layer, "weight", packed)


_ROUNDING: Final[Mapping[WeightPrecision, Callable[[nn.Linear, str, Any], None]]] = {
    "int8": partial(_quantize, config="Int8WeightOnlyConfig"),
    "fp8": partial(_quantize, config="Float8WeightOnlyConfig"),
    "int4": _pack,
}
"""How a layer is rounded by torchao's module ``quantization``."""


class _PackedInt4(nn.Module):
    """A weight [O, I] as integers of four bits, two in a byte, and ``(integer - zero) * scale``.

    A zero is an integer, so that weights of 0 stay 0.
    """

    def __init__(self, quantization: Any, group: int) -> None:
        super().__init__()
        self._quantization = quantization
        self._group = group

    def right_inverse(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Bytes [O, I/2] uint8, the even column in the low bits; scales [O, I/G] in the weight's
        dtype; zeros [O, I/G] uint8."""
        block, bounds = (1, self._group), (torch.uint8, 0, 15)
        rule = self._quantization.MappingType.ASYMMETRIC
        scale, zero = self._quantization.choose_qparams_affine(
            weight, rule, block, *bounds, zero_point_dtype=torch.uint8
        )
        whole = self._quantization.quantize_affine(weight, block, scale, zero, *bounds)
        return whole[:, ::2] | whole[:, 1::2] << 4, scale, zero

    def forward(
        self, packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
    ) -> torch.Tensor:
        """[O, I] in the dtype of ``scale``"""
        whole = torch.stack((packed & 15, packed >> 4), dim=-1)
        groups = whole.view(*scale.shape, self._group).to(scale.dtype)
        return groups.sub_(zero.unsqueeze(-1)).mul_(scale.unsqueeze(-1)).flatten(1)
