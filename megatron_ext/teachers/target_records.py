"""Targets of tokens as records of bytes, and back. L tokens, R bytes of a record, K top-k.

Everything here is on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.errors import LossError
from megatron_ext.teachers.target_form import Precision, TargetForm, pack_ids, unpack_ids

Records = NDArray[np.uint8]

Fields = Mapping[str, torch.Tensor]
"""By the field of ``TeacherTargets``, [L, ...] each."""

PRECISION_DTYPES: Final[dict[Precision, torch.dtype]] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def to_records(fields: Fields, form: TargetForm) -> Records:
    """[L, R]

    A top-k is written by ascending id. Where its numbers are rounded, the log-normaliser becomes
    that of the rounded ones and the exact mass of all others, so that what is read is a
    distribution whose tail is the teacher's.

    Raises:
        LossError: A number is NaN or +inf, or outside what the precision holds.
    """
    fields = dict(fields)
    if form.kind == "topk":
        fields |= _rounded_top_k(fields, form)
    parts = []
    for name in form.parts:
        values = fields[name]
        if name == "topk_ids":
            parts.append(pack_ids(values.numpy(), form.vocab_size))
            continue
        kept = values.to(_dtype(name, form)).contiguous()
        if (kept.isnan() | (kept == torch.inf)).any():
            raise LossError(
                "the teacher's predictions cannot be kept",
                got=f"NaN or infinity in {name} in {form.precision}",
                fix="look for a broken checkpoint, or choose a wider precision",
            )
        parts.append(kept.view(torch.uint8).view(len(kept), -1).numpy())
    return np.concatenate(parts, axis=1)


def from_records(records: Records, form: TargetForm) -> dict[str, torch.Tensor]:
    """The fields of [L, R]: ids in int64, numbers in the form's precision, others in fp32."""
    fields, start = {}, 0
    for name, width in form.parts.items():
        part = np.ascontiguousarray(records[:, start : start + width])
        start += width
        if name == "topk_ids":
            fields[name] = torch.from_numpy(unpack_ids(part, form.count, form.vocab_size))
            continue
        values = torch.from_numpy(part).view(_dtype(name, form))
        fields[name] = values if name in ("topk_logits", "hidden") else values[:, 0]
    return fields


def filler(form: TargetForm, length: int) -> dict[str, torch.Tensor]:
    """Fields of ``length`` positions of which nothing is known; nothing reads them."""
    shapes = {"topk_ids": form.count, "topk_logits": form.count, "hidden": form.count}
    fields = {}
    for name in form.parts:
        shape = (length, shapes[name]) if name in shapes else (length,)
        if name == "topk_ids":
            fields[name] = torch.arange(form.count).expand(shape).contiguous()
        else:
            fields[name] = torch.zeros(shape, dtype=_dtype(name, form))
    return fields


def _dtype(name: str, form: TargetForm) -> torch.dtype:
    is_many = name in ("topk_logits", "hidden")
    return PRECISION_DTYPES[form.precision] if is_many else torch.float32


def _rounded_top_k(fields: Fields, form: TargetForm) -> dict[str, torch.Tensor]:
    ids, order = fields["topk_ids"].sort(dim=-1)
    exact = fields["topk_logits"].gather(-1, order)
    kept = exact.to(_dtype("topk_logits", form))
    log_sum = fields["log_normaliser"]
    if kept.dtype != exact.dtype:
        named, rounded = (x.double().exp().sum(dim=-1) for x in (exact, kept))
        tail = (log_sum.double().exp() - named).clamp(min=0)
        log_sum = (rounded + tail).log().to(log_sum.dtype)
    return {"topk_ids": ids, "topk_logits": kept, "log_normaliser": log_sum}
