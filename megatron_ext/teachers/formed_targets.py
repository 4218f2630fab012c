"""Conversion of a teacher's targets to fields of a cached or remote form, and to byte records.

B rows, T positions, S those of this rank, Vp local columns; L tokens, R bytes of a record, K top-k.
Records are made and read on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.distributed.shard_collectives import group_size
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses import TeacherTargets
from megatron_ext.losses.targets import topk_targets
from megatron_ext.ops.token_likelihood import TokenRows, evaluate_token_likelihood
from megatron_ext.teachers.target_form import Precision, TargetForm, pack_ids, unpack_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class FormedTargets:
    """Converter of targets of the kind ``hidden`` or ``logits`` to the fields of a form."""

    form: TargetForm

    boundary: torch.Tensor | None = None
    """bool [Vp] mask of this rank's columns that begin a word; for ``label``."""

    tile_rows: int = 1024
    """Positions whose logits are materialised at a time."""

    context: ContextRank | None = None
    """Context-parallel rank; None if this rank has whole rows."""

    def __call__(self, targets: TeacherTargets, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Fields [B, T, ...] of ``TeacherTargets`` for whole rows, without a graph.

        Args:
            labels: [B, S] int64 targets, negative where there is none.

        Collectives: in every tile, for ``label`` and ``topk`` those of
        ``evaluate_token_likelihood`` and for ``topk`` also those of ``topk_targets``; then one
        context-parallel all-gather a field.
        """
        with torch.no_grad():
            fields = self._fields(targets, labels)
            return {name: self._whole(values) for name, values in fields.items()}

    def _fields(self, targets: TeacherTargets, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, head = targets.hidden, targets.head_weight
        if self.form.kind == "hidden":
            assert hidden is not None
            return {"hidden": hidden}
        source = hidden if hidden is not None else targets.logits
        assert source is not None
        parts = []
        tiles = source.flatten(0, 1).split(self.tile_rows), labels.flatten().split(self.tile_rows)
        for rows, its_labels in zip(*tiles, strict=True):
            logits = rows if head is None else targets.logits_of(rows)
            parts.append(self._of_logits(logits, its_labels, targets.shard))
        return {
            name: torch.cat([part[name] for part in parts]).unflatten(0, labels.shape)
            for name in parts[0]
        }

    def _of_logits(
        self, logits: torch.Tensor, labels: torch.Tensor, shard: VocabShard
    ) -> dict[str, torch.Tensor]:
        rows = TokenRows(logits, labels, self.boundary, shard)
        likelihood = evaluate_token_likelihood(rows).student
        if self.form.kind == "label":
            assert likelihood.log_mass is not None
            return {
                "label_log_probs": likelihood.log_prob,
                "boundary_log_probs": likelihood.log_mass,
            }
        top = topk_targets(logits[None], self.form.count, shard)
        names = ("topk_ids", "topk_logits", "log_normaliser")
        fields = {name: getattr(top, name)[0] for name in names}
        return fields | {"label_log_probs": likelihood.log_prob}

    def _whole(self, values: torch.Tensor) -> torch.Tensor:
        """Gather [B, T, ...] from the context-parallel ranks' [B, S, ...]."""
        context = self.context
        if context is None:
            return values
        parts = [torch.empty_like(values) for _ in range(context.size)]
        dist.all_gather(parts, values.contiguous(), group=context.group)
        length = values.shape[1] * context.size
        whole = values.new_empty(values.shape[0], length, *values.shape[2:])
        for rank, part in enumerate(parts):
            firsts = ContextRank(rank=rank, size=context.size).first_positions(length)
            for first, half in zip(firsts, part.chunk(2, dim=1), strict=True):
                whole[:, first : first + half.shape[1]] = half
        return whole


def whole_head(own: torch.Tensor, shard: VocabShard, *, is_kept: bool) -> torch.Tensor | None:
    """Gather the head [V, D] on the CPU, without padding.

    Args:
        own: [Vp, D] this rank's rows.
        is_kept: Whether this rank needs it; the others get None.

    Collectives: one all-gather over the shard's group.
    """
    parts = [own.detach().contiguous()]
    if shard.group is not None:
        parts = [torch.empty_like(parts[0]) for _ in range(group_size(shard.group))]
        dist.all_gather(parts, own.detach().contiguous(), group=shard.group)
    if not is_kept:
        return None
    return torch.cat([part.cpu() for part in parts])[: shard.vocab_size].contiguous()


Records = NDArray[np.uint8]

Fields = Mapping[str, torch.Tensor]
"""Tensors [L, ...] by field of ``TeacherTargets``."""

PRECISION_DTYPES: Final[dict[Precision, torch.dtype]] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def to_records(fields: Fields, form: TargetForm) -> Records:
    """Records [L, R] of the fields.

    A top-k is stored by ascending id. If its logits are rounded, the log-normaliser is recomputed
    from the rounded logits and the exact mass of all other tokens, so that the stored values are a
    distribution with the teacher's tail mass.

    Raises:
        LossError: A number is NaN or +inf, or out of range of the precision.
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
        stored = values.to(_dtype(name, form)).contiguous()
        # A label of a top-k may be unknown. NaN of a model is in its logits too.
        may_be_nan = form.kind == "topk" and name == "label_log_probs"
        if ((stored.isnan() & (not may_be_nan)) | (stored == torch.inf)).any():
            raise LossError(
                "the teacher's predictions cannot be kept",
                got=f"NaN or infinity in {name} in {form.precision}",
                fix="look for a broken checkpoint, or choose a wider precision",
            )
        parts.append(stored.view(torch.uint8).view(len(stored), -1).numpy())
    return np.concatenate(parts, axis=1)


def from_records(records: Records, form: TargetForm) -> dict[str, torch.Tensor]:
    """Fields of records [L, R]: ids int64, K or D numbers in the form's precision, others fp32."""
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


def as_targets(
    fields: Fields,
    form: TargetForm,
    shard: VocabShard,
    *,
    head_weight: torch.Tensor | None = None,
    logit_cap: float | None = None,
) -> TeacherTargets:
    """Fields on this rank's device as an objective reads them: hidden states in the dtype of
    ``head_weight`` [Vp, D], this rank's rows of the head."""
    values: dict[str, Any] = dict(fields)
    if head_weight is not None:
        hidden = values["hidden"].to(head_weight.dtype)
        values |= {"hidden": hidden, "head_weight": head_weight, "logit_cap": logit_cap}
    if "topk_logits" in values:
        values["topk_logits"] = values["topk_logits"].float()
    return TeacherTargets(kind=form.kind, shard=shard, **values)


def filler(form: TargetForm, length: int) -> dict[str, torch.Tensor]:
    """Placeholder fields of ``length`` positions that no loss reads."""
    fields = {}
    for name in form.parts:
        shape = (length, form.count) if name in ("topk_logits", "hidden") else (length,)
        fields[name] = torch.zeros(shape, dtype=_dtype(name, form))
        if name == "topk_ids":
            fields[name] = torch.arange(form.count).repeat(length, 1)
    return fields


def _dtype(name: str, form: TargetForm) -> torch.dtype:
    is_many = name in ("topk_logits", "hidden")
    return PRECISION_DTYPES[form.precision] if is_many else torch.float32


def _rounded_top_k(fields: Fields, form: TargetForm) -> dict[str, torch.Tensor]:
    ids, order = fields["topk_ids"].sort(dim=-1)
    exact = fields["topk_logits"].gather(-1, order)
    stored = exact.to(_dtype("topk_logits", form))
    log_sum = fields["log_normaliser"]
    if stored.dtype != exact.dtype:
        named, rounded = (x.double().exp().sum(dim=-1) for x in (exact, stored))
        tail = (log_sum.double().exp() - named).clamp(min=0)
        log_sum = (rounded + tail).log().to(log_sum.dtype)
    return {"topk_ids": ids, "topk_logits": stored, "log_normaliser": log_sum}
