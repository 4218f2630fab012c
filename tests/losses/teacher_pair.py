"""One student with two teachers of other vocabularies and other chunks."""

from dataclasses import replace
from typing import Any

import torch

from megatron_ext.losses import DistillationInputs
from megatron_ext.losses.base import KnownAhead
from tests.losses.microbatch import Microbatch
from tests.ops.projected_kl_case import random_chunks


def teacher_pair(batch: int = 4) -> dict[str, Microbatch]:
    """Two views of one student. Samples of ``b`` have 1, 0, 3, 0 chunks, all of ``a`` four."""
    first = Microbatch.random(batch=batch)
    other = Microbatch.random(batch=batch, vocabs=(37, 29), lengths=(8, 5), seed=7)
    counts = [(1, 0, 3, 0)[row % 4] for row in range(batch)]
    ids = [random_chunks((8, 5), count, seed=row) for row, count in enumerate(counts)]
    other = replace(
        other,
        student_logits=first.student_logits,
        labels=first.labels,
        chunk_ids=[(student, teacher) for student, teacher in ids],
    )
    return {"a": first, "b": other}


def pair_inputs(
    pair: dict[str, Microbatch], rows: slice = slice(None), **shards: Any
) -> dict[str, DistillationInputs]:
    """Inputs of both teachers around one leaf of student logits."""
    inputs = {name: batch.samples(rows).inputs(**shards) for name, batch in pair.items()}
    logits = inputs["a"].student_logits
    return {name: replace(part, student_logits=logits) for name, part in inputs.items()}


def known_of(inputs: dict[str, DistillationInputs]) -> dict[str, KnownAhead]:
    return {
        name: KnownAhead(labels=part.labels, alignment=part.alignment, chunk_mask=part.chunk_mask)
        for name, part in inputs.items()
    }


def teacher_labels(inputs: DistillationInputs) -> torch.Tensor:
    """Any labels of the teacher's positions, the first of each row left out."""
    rows, length = inputs.teacher.positions
    labels = (torch.arange(length) % inputs.teacher.shard.vocab_size).repeat(rows, 1)
    labels[:, 0] = -100
    return labels
