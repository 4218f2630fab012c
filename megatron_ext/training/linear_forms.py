"""The linear forms of a run's loss, and where they cut a microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from megatron_ext.data.batch import CrossTokenizerBatch
from megatron_ext.losses import ChunkCompletions, KnownAhead, Objective
from megatron_ext.losses.linear import LinearDistillation
from megatron_ext.losses.microbatch_tiles import MicrobatchTiles

_ALONE: Final = ""
"""Stands for a teacher where there is none."""


def linear_forms(
    next_token: Objective, objectives: Mapping[str, Objective], *, tile_rows: int
) -> dict[str, LinearDistillation]:
    """A linear form for each teacher; the first takes the cross-entropy along.

    Args:
        objectives: By teacher; with none, the form is of the cross-entropy alone.

    Raises:
        LossError: An objective has no linear form.
    """
    forms: dict[str, dict[str, Objective]] = {
        name: {f"kd/{name}": objective} for name, objective in objectives.items()
    } or {_ALONE: {}}
    next(iter(forms.values()))["ce"] = next_token
    return {
        name: LinearDistillation(objectives=own, tile_rows=tile_rows) for name, own in forms.items()
    }


def cut_into_tiles(
    forms: Mapping[str, LinearDistillation],
    sides: CrossTokenizerBatch,
    completions: Mapping[str, ChunkCompletions],
) -> dict[str, MicrobatchTiles]:
    """Where a microbatch is cut for each form; on the host."""
    found = {}
    for name, form in forms.items():
        known = KnownAhead(labels=sides.student.labels)
        if name != _ALONE:
            known = replace(
                known,
                alignment=sides.alignments[name],
                teacher_labels=sides.teachers[name].labels,
            )
        found[name] = form.tiles(known, completions.get(name))
    return found
