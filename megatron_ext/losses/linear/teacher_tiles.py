"""A teacher's targets, a tile at a time. B batch, Tt tokens, Vp local columns."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from megatron_ext.losses.inputs.targets import TeacherTargets
from megatron_ext.ops.linear_form import Tile, TilePlan


class TeacherTiles:
    """Cuts targets of any kind; those of kind ``hidden`` become the logits of a tile.

    These are in one buffer [n, Vp], which the next tile overwrites.
    """

    def __init__(self, teacher: TeacherTargets | None, plan: TilePlan) -> None:
        self._teacher, self._plan = teacher, plan
        self._buffer: torch.Tensor | None = None
        if teacher is not None and teacher.hidden is not None and teacher.head_weight is not None:
            head = teacher.head_weight
            self._buffer = head.new_empty(plan.largest[1], len(head))

    def of(self, tile: Tile) -> TeacherTargets | None:
        """Targets of a tile's rows, as one sample [1, n]."""
        teacher = self._teacher
        if teacher is None:
            return None
        index = self._plan.teacher_index(tile)
        if self._buffer is not None:
            assert teacher.hidden is not None
            assert teacher.head_weight is not None
            logits = self._buffer[: tile.teacher_count]
            with torch.no_grad():
                torch.mm(teacher.hidden.flatten(0, 1)[index], teacher.head_weight.t(), out=logits)
            return TeacherTargets(kind="logits", shard=teacher.shard, logits=logits[None])
        cut: dict[str, Any] = {}
        for item in fields(teacher):
            value = getattr(teacher, item.name)
            if isinstance(value, torch.Tensor):
                cut[item.name] = value.flatten(0, 1)[index][None]
        return replace(teacher, **cut)
