"""A run's loss from hidden states and heads. B batch, T tokens, Vp local columns, D hidden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from megatron_ext.losses import (
    AnnouncedLoss,
    ChunkCompletions,
    KnownAhead,
    LossOutput,
    Objective,
    PlannedPart,
)
from megatron_ext.losses.linear import LinearDistillation, MicrobatchTiles
from megatron_ext.training.cross_tokenizer.rows.batch import CrossTokenizerBatch

_ALONE = ""
"""Stands for a teacher where there is none."""


@dataclass(frozen=True, slots=True)
class LinearForms:
    """A linear form for each teacher; the first takes the cross-entropy along."""

    forms: Mapping[str, LinearDistillation]
    """By teacher."""

    @classmethod
    def of(
        cls, next_token: Objective, objectives: Mapping[str, Objective], *, tile_rows: int
    ) -> LinearForms:
        """Of the objectives by teacher; with none, of the cross-entropy alone.

        Raises:
            LossError: An objective has no linear form.
        """
        forms: dict[str, dict[str, Objective]] = {
            name: {f"kd/{name}": objective} for name, objective in objectives.items()
        } or {_ALONE: {}}
        next(iter(forms.values()))["ce"] = next_token
        return cls(
            {
                name: LinearDistillation(objectives=own, tile_rows=tile_rows)
                for name, own in forms.items()
            }
        )

    def tiles(
        self, sides: CrossTokenizerBatch, completions: Mapping[str, ChunkCompletions]
    ) -> dict[str, MicrobatchTiles]:
        """Where a microbatch is cut for each teacher; on the host."""
        found = {}
        for name, form in self.forms.items():
            known = KnownAhead(labels=sides.student.labels)
            if name != _ALONE:
                known = replace(
                    known,
                    alignment=sides.alignments[name],
                    teacher_labels=sides.teachers[name].labels,
                )
            found[name] = form.tiles(known, completions.get(name))
        return found

    def loss(
        self,
        parts: Mapping[str, PlannedPart],
        tiles: Mapping[str, MicrobatchTiles],
        term_weights: Mapping[str, float],
        global_counts: Mapping[str, torch.Tensor | int],
    ) -> AnnouncedLoss:
        """As ``announced_loss``, of parts whose inputs have hidden states and no logits.

        A term of weight 0 is logged as what its kernels say without a gradient, 0 for some.
        Collectives: those of the objectives' forwards and backwards in every tile.
        """
        scales = {name: part.scale(term_weights, global_counts) for name, part in parts.items()}
        outputs: dict[str, LossOutput] = {}
        totals = []
        for name, form in self.forms.items():
            # Of the objective: the cross-entropy needs nothing that these have not.
            main = next(iter(form.objectives))
            found = form(
                parts[main].inputs, tiles[name], {part: scales[part] for part in form.objectives}
            )
            totals.append(found.total)
            outputs |= found.parts
        return AnnouncedLoss(
            total=torch.stack(totals).sum(),
            outputs={name: outputs[name] for name in parts},
            scales=scales,
        )
