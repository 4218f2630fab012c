"""A HuggingFace teacher on the student's ranks. B rows, T positions, S those of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.teachers.base import (
    TokenInputs,
    TokenRows,
    device_tensor,
    text_batches,
    whole_rows,
)
from megatron_ext.teachers.causal_lm import CausalLM

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class HuggingFaceTeacher:
    """A ``Teacher`` that runs a whole model on each rank, over the texts of packed rows.

    Transformers builds attention masks itself, windows included, from a padding mask. So the texts
    of a packed row are separated, run as rows of their own, and scattered back.

    Ranks that share rows divide the microbatches among themselves; each keeps its part of the
    positions and of the vocabulary.

    Args:
        model: The whole model; the same on every rank of ``group``.
        shard: This rank's columns of the teacher's vocabulary.
        group: Tensor- and context-parallel group, whose ranks share rows; None for a single rank.
        context: Context-parallel rank; None for whole rows.
        keeps_head: Copy this rank's head rows instead of a view of the model's weights.
        layers: Numbers from 1 of layers below the last whose states are targets, too, ascending.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        shard: VocabShard,
        group: ProcessGroup | None = None,
        context: ContextRank | None = None,
        keeps_head: bool = False,
        layers: tuple[int, ...] = (),
    ) -> None:
        self.head_weight = _head_rows(model, shard, is_own=keeps_head)
        """[Vp, D] this rank's head rows; None if targets are logits."""
        # The whole head is no longer needed, unless it is tied.
        self._model = replace(model, head=None, layers=layers)
        self._shard = shard
        self._group = group
        self._size = 1 if group is None else dist.get_world_size(group)
        self._rank = 0 if group is None else dist.get_rank(group)
        self._context = context

    @property
    def module(self) -> nn.Module:
        """The module, without an untied head if targets are hidden states."""
        return self._model.module

    @torch.no_grad()
    def targets(self, microbatches: Sequence[TokenInputs]) -> list[TeacherTargets]:
        """Targets of each microbatch; see ``Teacher``. Zero for texts without labels.

        Collectives: one broadcast over ``group`` for each microbatch.
        """
        rows = [whole_rows(batch) for batch in microbatches]
        device = microbatches[0].tokens.device
        # Compute all of this rank's first: a broadcast waits for the rank that computes.
        outputs = {
            i: self._predict(rows[i], device) for i in range(self._rank, len(rows), self._size)
        }
        targets = []
        for i, its in enumerate(rows):
            values = outputs.pop(i) if i in outputs else self._zeros(its, device)
            if self._group is not None and self._size > 1:
                source = dist.get_global_rank(self._group, i % self._size)
                dist.broadcast(values, src=source, group=self._group)
            targets.append(self._targets(values))
        return targets

    def _targets(self, values: torch.Tensor) -> TeacherTargets:
        """This rank's part of the outputs of whole rows, [B, T, D] or [B, T, V]."""
        if self._context is not None:
            values = self._context.cut(values)
        if self.head_weight is not None:
            hidden, *lower = values.split(self._model.size, dim=-1)
            return TeacherTargets(
                kind="hidden",
                shard=self._shard,
                hidden=hidden,
                head_weight=self.head_weight,
                states=dict(zip(self._model.layers, lower, strict=True)),
            )
        columns = values[..., self._shard.start : self._shard.stop]
        missing = self._shard.width - columns.shape[-1]
        logits = functional.pad(columns, (0, missing)) if missing else columns.contiguous()
        return TeacherTargets(kind="logits", shard=self._shard, logits=logits)

    def _predict(self, rows: TokenRows, device: torch.device) -> torch.Tensor:
        """Outputs [B, T, width] of whole rows."""
        tokens = rows.tokens.numpy().ravel()
        outputs = self._zeros(rows, device)
        for batch in text_batches(rows):
            ids = device_tensor(tokens[batch.places], device)
            mask = batch.mask()
            if mask is None:
                output = self._model(ids, None).flatten(0, 1)
                places = device_tensor(batch.places.ravel(), device)
            else:
                output = self._model(ids, device_tensor(mask.astype(np.int64), device))
                output = output.flatten(0, 1)[device_tensor(np.flatnonzero(mask), device)]
                places = device_tensor(batch.places[mask], device)
            outputs.flatten(0, 1).index_copy_(0, places, output)
        return outputs

    def _zeros(self, rows: TokenRows, device: torch.device) -> torch.Tensor:
        shape = (*rows.tokens.shape, self._model.width)
        return torch.zeros(shape, dtype=self._model.dtype, device=device)


class StageWithoutTeacher:
    """Empty stand-in for a HuggingFace teacher on pipeline stages before the last."""

    head_weight: None = None

    def targets(self, microbatches: Sequence[TokenInputs]) -> list[TeacherTargets]:
        """An empty list."""
        return []


def _head_rows(model: CausalLM, shard: VocabShard, *, is_own: bool) -> torch.Tensor | None:
    """[Vp, D] head rows of a shard, zero-padded; None if the head is no plain matrix."""
    head = model.head
    if head is None:
        return None
    rows = head[shard.start : shard.stop]
    missing = shard.width - len(rows)
    if missing:
        return functional.pad(rows, (0, 0, 0, missing))
    is_tied = any(parameter is head for parameter in model.module.parameters())
    is_part = len(rows) < len(head)
    return rows.clone() if is_own or (is_part and not is_tied) else rows
