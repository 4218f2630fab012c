"""Targets as the bytes that travel, and back. B rows, T positions, R bytes of a token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from megatron_ext.teachers.serving.frames import bytes_of
from megatron_ext.teachers.targets.form import Precision, TargetForm
from megatron_ext.teachers.targets.records import from_records, to_records

Fields = Mapping[str, torch.Tensor]
"""By the field of ``TeacherTargets``, [B, T, ...] each."""

_DTYPES: Final[dict[Precision, torch.dtype]] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def payload_of(fields: Fields, form: TargetForm) -> torch.Tensor:
    """uint8 [B T R]; hidden states stay on their device, other forms are records on the CPU.

    Raises:
        LossError: A number cannot be kept; see ``to_records``.
    """
    if form.kind == "hidden":
        return bytes_of(fields["hidden"].to(_DTYPES[form.precision]))
    flat = {name: values.flatten(0, 1).cpu() for name, values in fields.items()}
    return torch.from_numpy(to_records(flat, form)).flatten()


def fields_of(payload: torch.Tensor, form: TargetForm, shape: Sequence[int]) -> Fields:
    """The fields of ``payload``; hidden states are a view of it.

    Args:
        shape: B, T
    """
    if form.kind == "hidden":
        return {"hidden": payload.view(_DTYPES[form.precision]).view(*shape, form.count)}
    records = payload.numpy().reshape(-1, form.bytes_per_token)
    return {
        name: values.unflatten(0, tuple(shape))
        for name, values in from_records(records, form).items()
    }


def empty_fields(form: TargetForm, shape: Sequence[int], device: torch.device) -> Fields:
    """Memory for the fields of ``fields_of``."""
    few = {"topk_ids": torch.int64, "topk_logits": _DTYPES[form.precision]}
    many = few | {"hidden": _DTYPES[form.precision]}
    return {
        name: torch.empty(*shape, form.count, dtype=many[name], device=device)
        if name in many
        else torch.empty(*shape, dtype=torch.float32, device=device)
        for name in form.parts
    }


def payload_size(form: TargetForm, shape: Sequence[int]) -> int:
    """Bytes of the payload of B x T tokens."""
    return math.prod(shape) * form.bytes_per_token
