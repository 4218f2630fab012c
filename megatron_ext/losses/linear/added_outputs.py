"""Outputs of objectives on tiles, added up to those of the microbatch. C chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from megatron_ext.losses.base import LossOutput
from megatron_ext.ops.linear_form import Tile, TilePlan


class AddedOutputs:
    """Every number of a ``LossOutput`` is a sum, and so are its counts."""

    def __init__(self, plan: TilePlan) -> None:
        self._plan = plan
        self._outputs: dict[str, LossOutput] = {}
        self._chunk_loss: dict[str, torch.Tensor] = {}

    def add(self, tile: Tile, outputs: Mapping[str, LossOutput]) -> None:
        """What the objectives say of a tile; without a graph."""
        for name, output in outputs.items():
            before = self._outputs.get(name)
            self._outputs[name] = output if before is None else _sum(before, output)
            if output.chunk_loss is not None:
                whole = self._chunk_loss.get(name)
                if whole is None:
                    whole = output.chunk_loss.new_zeros(len(self._plan.chunks))
                    self._chunk_loss[name] = whole
                whole[self._plan.chunks[tile.chunks]] = output.chunk_loss

    def outputs(self) -> dict[str, LossOutput]:
        """Of the microbatch."""
        return {
            name: replace(output, chunk_loss=self._chunk_loss.get(name))
            for name, output in self._outputs.items()
        }


def _sum(one: LossOutput, other: LossOutput) -> LossOutput:
    return LossOutput(
        loss_sum=one.loss_sum + other.loss_sum,
        count=one.count + other.count,
        metrics={
            name: (total + other.metrics[name][0], count + other.metrics[name][1])
            for name, (total, count) in one.metrics.items()
        },
    )
