"""Counted bytes of every objective and implementation, without running a kernel or a GPU.

Torch operators are recorded on a few rows at the real widths and extended to the wanted length:
what they move is a polynomial in the rows, of degree 1, or 2 for the one-hot products of the eager
recipe. The text repeats one excerpt, so that chunks grow in proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch

from megatron_ext.distributed import vocab_parallel
from megatron_ext.losses import DistillationInputs

from .cases import OBJECTIVES, NotThereError, Objective
from .counted_bytes import floors, kernel_bytes, logits_bytes
from .eager_recipe import KEPT_COLUMNS
from .microbatch import RankVocabulary, same_vocabulary
from .traffic import Traffic

EXCERPT: Final = 12
"""Rows of the text that is repeated: few, and close to the texts' ratio of tokens all the same."""

ONE_SLICE: Final = 1 << 25
"""Elements: a slice of a GPU, which holds all recorded rows."""

SMALL_SLICE: Final = 1 << 18
"""A slice far below the recorded rows, so that what grows with them is not hidden in it."""

RECORDED: Final = ("torch", "eager")


def counted_rows(vocabulary: RankVocabulary, ranks: int, lengths: Sequence[int]) -> Iterator[Any]:
    """One row of results for each objective, implementation and length."""
    excerpt = replace(vocabulary, pair=vocabulary.pair.excerpt(EXCERPT))
    for objective in OBJECTIVES:
        recorded = {
            name: _recorded(objective, name, excerpt)
            for name in RECORDED
            if name in objective.implementations
        }
        for rows in lengths:
            shape = vocabulary.shape(rows)
            if objective.same_vocabulary:
                shape = replace(shape, teacher_rows=rows, teacher_columns=shape.student_columns)
            size = torch.bfloat16.itemsize
            once, twice = floors(shape, size, objective.teacher)
            common = {
                "pair": vocabulary.pair.name,
                "inputs": vocabulary.pair.source,
                "objective": objective.name,
                "rows": rows,
                "ranks": ranks,
                "student_logits": shape.student_rows * shape.student_columns,
                "floor_b1": once,
                "floor_b2": twice,
            }
            gradient = logits_bytes(shape, size)[0]
            moved = kernel_bytes(objective.name, shape, size)
            if moved is not None:
                yield common | {
                    "implementation": "triton",
                    "bytes": round(moved),
                    "peak_bytes": gradient,
                    "counted": "launch by launch",
                }
            for name, (bytes_at, peak_at) in recorded.items():
                yield common | {
                    "implementation": name,
                    "bytes": round(bytes_at(rows)),
                    "peak_bytes": max(gradient, round(peak_at(rows))),
                    "counted": "from recorded operators",
                }


def _recorded(
    objective: Objective, implementation: str, excerpt: RankVocabulary
) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """Bytes moved and most bytes held beyond the inputs, as functions of the rows."""

    def recorded(length: int, slice_elements: int) -> Traffic:
        inputs = excerpt.microbatch(length)
        _mark_columns(inputs)
        if objective.same_vocabulary:
            inputs = same_vocabulary(inputs)
        return record(objective, implementation, inputs, slice_elements)

    lengths = [EXCERPT, 2 * EXCERPT, 3 * EXCERPT]
    if implementation == "eager":
        found = [recorded(length, ONE_SLICE) for length in lengths]
        moved = _through(lengths, [float(traffic.moved) for traffic in found])
        return moved, _through(lengths, [float(traffic.peak) for traffic in found])
    # More rows than a slice holds, for what outlives it.
    longer = [2 * EXCERPT, 4 * EXCERPT]
    held = [float(recorded(length, SMALL_SLICE).peak) for length in longer]
    one_slice = [float(recorded(length, ONE_SLICE).moved) for length in lengths[:2]]
    return _through(lengths[:2], one_slice), _through(longer, held)


def _mark_columns(inputs: DistillationInputs) -> None:
    """Let the teacher's largest logits be in the same columns whatever the length."""
    assert inputs.teacher is not None
    assert inputs.teacher.logits is not None
    order = torch.randperm(
        inputs.teacher.shard.valid_width, generator=torch.Generator().manual_seed(0)
    )
    inputs.teacher.logits[..., order[:KEPT_COLUMNS]] += 50


def record(
    objective: Objective, implementation: str, inputs: DistillationInputs, slice_elements: int
) -> Traffic:
    """What forward and backward move and hold, in slices of so many elements.

    Raises:
        NotThereError: There is no such implementation here.
    """
    loss = objective.loss(implementation)
    inputs.student_logits.grad = None
    traffic = Traffic()
    with _slices_of(slice_elements), traffic:
        loss(inputs).backward()
    return traffic


@contextmanager
def _slices_of(elements: int) -> Iterator[None]:
    before = vocab_parallel.SLICE_ELEMENTS["cpu"]
    vocab_parallel.SLICE_ELEMENTS["cpu"] = elements
    try:
        yield
    finally:
        vocab_parallel.SLICE_ELEMENTS["cpu"] = before


def _through(places: Sequence[int], values: Sequence[float]) -> Callable[[int], float]:
    """The polynomial through the points, by divided differences."""
    table = list(values)
    for order in range(1, len(table)):
        for index in range(len(table) - 1, order - 1, -1):
            step = places[index] - places[index - order]
            table[index] = (table[index] - table[index - 1]) / step

    def at(place: int) -> float:
        total = 0.0
        for coefficient, known in zip(reversed(table), reversed(places), strict=True):
            total = total * (place - known) + coefficient
        return total

    return at


__all__ = ["NotThereError", "counted_rows", "record"]
