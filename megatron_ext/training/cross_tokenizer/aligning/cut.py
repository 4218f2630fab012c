"""Cutting a text where every model can be cut. C chunks that all models can be cut behind."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_ext.alignment.chunk_places import ChunkPlaces
from megatron_ext.alignment.window import fitting_runs
from megatron_ext.training.cross_tokenizer.aligning.aligned_text import AlignedText

Stops = NDArray[np.int64]


def cut(text: AlignedText, capacities: Sequence[int]) -> list[AlignedText]:
    """The text in order, in as few pieces as possible that fit all models.

    A piece ends where a chunk of every teacher does, so that all models read the same bytes in it.
    What lies between two such places and exceeds a capacity alone is in no piece: the bytes of the
    pieces are then fewer than those of the text.

    Of a conversation there is at most its beginning: what is behind that has another sense without
    it.

    Args:
        text: The text.
        capacities: Most tokens of a piece, of the student and of each teacher; at least 1.
    """
    counts = text.token_counts
    if all(count <= capacity for count, capacity in zip(counts, capacities, strict=True)):
        return [text]
    stops = _stops(text)
    edges, fits = fitting_runs(stops, capacities)
    fences = [np.append(0, side)[edges].tolist() for side in stops]
    bounds = zip(*([slice(*bound) for bound in pairwise(fence)] for fence in fences), strict=True)
    last = len(fits) - 1
    pieces = [
        text.part(bound, is_end=index == last)
        for index, (bound, is_piece) in enumerate(zip(bounds, fits, strict=True))
        if is_piece
    ]
    if text.is_conversation:
        return pieces[:1] if fits[0] else []
    return pieces


def _stops(text: AlignedText) -> list[Stops]:
    """For the student and each teacher, one past the last token of each chunk [C].

    A token that covers nothing goes with the byte behind it, and the last ones with the last byte.
    """
    own = np.flatnonzero(text.student_widths) + 1
    spans = []
    for teacher in text.teachers:
        student = ChunkPlaces.of_marks(teacher.student_marks, side="student").stop
        its = ChunkPlaces.of_marks(teacher.teacher_marks, side="teacher").stop
        own = own[np.isin(own, student, assume_unique=True)]
        spans.append((student, its))
    stops = [own, *(its[student.searchsorted(own)] for student, its in spans)]
    if len(own) and not text.student_widths[own[-1] :].any():
        stops = [side[:-1] for side in stops]
    return [np.append(side, count) for side, count in zip(stops, text.token_counts, strict=True)]
