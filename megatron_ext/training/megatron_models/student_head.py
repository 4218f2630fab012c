"""The student's head and last hidden states, and the linear forms of the loss that use them.

B batch, T tokens, D hidden, Vp local columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megatron_ext.data.batch import CrossTokenizerBatch
from megatron_ext.distributed.shard_collectives import copy_to_shards
from megatron_ext.losses import CompletionSource, KnownAhead, Objective
from megatron_ext.losses.linear import LinearDistillation
from megatron_ext.losses.microbatch_tiles import MicrobatchTiles
from megatron_ext.losses.objective import LAST_LAYER
from megatron_ext.losses.targets import capped_
from megatron_ext.teachers.megatron_teacher import (
    LOGIT_CAP,
    head_weight,
    keep_states,
    unwrapped,
    whole_sequence,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Head(NamedTuple):
    """This rank's columns of an output layer, applied by the loss."""

    weight: torch.Tensor
    """[Vp, D]"""

    sequence_parallel: bool

    logit_cap: float | None = None
    """Cap of the logits, see ``capped_``."""

    @torch.no_grad()
    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's logits [..., Vp] of hidden states [..., D], without a graph."""
        return capped_(hidden @ self.weight.t(), self.logit_cap)

    def whole(self, hidden: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
        """[B, T, D] from a last stage's output [T, B, D], of which this rank may have a part of T.

        The gradient that comes back is of this rank's columns, and is summed over the
        tensor-parallel ``group``. Collectives: backward one all-reduce of [B, T, D]; under sequence
        parallelism forward one all-gather, backward one reduce-scatter.
        """
        if self.sequence_parallel:
            gathered = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True
            )
            batch_first: torch.Tensor = gathered.transpose(0, 1).contiguous()
            return batch_first
        # megatron-core's own copy loses the sum of a gradient that is not contiguous.
        return copy_to_shards(hidden.transpose(0, 1).contiguous(), group)


def head_of(model: Any) -> Head:
    """The head of a chunk that has one, wrapped or not."""
    gpt = unwrapped(model)
    cap = getattr(gpt, LOGIT_CAP, None)
    return Head(head_weight(gpt), gpt.config.sequence_parallel, cap)


class StudentHidden:
    """Hidden states of a last stage, kept from a forward pass until they are taken.

    Args:
        gpt: The stage, before or after it is wrapped.
        layers: Numbers from 1 of layers below the last, which are on the stage.
    """

    def __init__(self, gpt: GPTModel, layers: Collection[int] = ()) -> None:
        self._gpt = gpt
        self._states: dict[int, torch.Tensor] = {}
        gpt.output_layer.register_forward_pre_hook(
            lambda _, inputs: self._states.update({LAST_LAYER: inputs[0]})
        )
        keep_states(gpt, layers, self._states.__setitem__)

    def take(self) -> dict[int, torch.Tensor]:
        """[B, T, D] by layer of the latest forward pass, with their graph, the output layer's input
        as ``LAST_LAYER``; call it once for each pass.

        The gradient of the logits is whole on every tensor-parallel rank here, since the output
        layer reduces it, and so is the gradient of a layer's output.

        Collectives: those of ``whole_sequence``, for each layer.
        """
        assert LAST_LAYER in self._states
        states = {layer: self._states[layer] for layer in sorted(self._states)}
        self._states.clear()
        return {
            layer: whole_sequence(hidden, self._gpt).transpose(0, 1)
            for layer, hidden in states.items()
        }

    @property
    def head_weight(self) -> torch.Tensor:
        """[Vp, D]"""
        return head_weight(self._gpt)


_ALONE: Final = ""
"""Stands for a teacher where there is none."""


def linear_forms(
    next_token: Objective,
    objectives: Mapping[str, Objective],
    *,
    tile_rows: int,
    into_main_grad: bool,
) -> dict[str, LinearDistillation]:
    """A linear form for each teacher; the first includes the cross-entropy.

    Args:
        objectives: By teacher; with none, the only form is of the cross-entropy alone.
        into_main_grad: See ``linear_loss``.

    Raises:
        LossError: An objective has no linear form.
    """
    forms: dict[str, dict[str, Objective]] = {
        name: {f"kd/{name}": objective} for name, objective in objectives.items()
    } or {_ALONE: {}}
    next(iter(forms.values()))["ce"] = next_token
    return {
        name: LinearDistillation(
            objectives=of_form, tile_rows=tile_rows, into_main_grad=into_main_grad
        )
        for name, of_form in forms.items()
    }


def cut_into_tiles(
    forms: Mapping[str, LinearDistillation],
    sides: CrossTokenizerBatch,
    tables: Mapping[str, CompletionSource],
) -> dict[str, MicrobatchTiles]:
    """Tiles of a microbatch for each form; on the host."""
    tiles = {}
    for name, form in forms.items():
        known = KnownAhead(labels=sides.student.labels)
        if name != _ALONE:
            known = replace(
                known,
                alignment=sides.alignments[name],
                teacher_labels=sides.teachers[name].labels,
            )
        tiles[name] = form.tiles(known, tables.get(name))
    return tiles
