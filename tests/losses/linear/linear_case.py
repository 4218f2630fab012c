"""Hidden states, heads and everything else of an objective, as whole logits and as tiles.

B batch, T tokens, Vp columns, D hidden, C chunks.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_ext.losses import DistillationInputs, LossOutput, TeacherTargets
from megatron_ext.losses.linear import LinearDistillation, no_logits
from megatron_ext.losses.objective import Objective
from tests.losses.microbatch import Microbatch, known_ahead
from tests.losses.objective_cases import ObjectiveCase, table_of

HIDDEN = 6


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a form of a loss gives."""

    total: torch.Tensor
    outputs: dict[str, LossOutput]
    d_hidden: torch.Tensor
    d_weight: torch.Tensor


def ordered_chunks(lengths: tuple[int, int], chunks: int, seed: int) -> list[torch.Tensor]:
    """Chunk ids in the order of the text: runs of a row or more, and rows of none in between."""
    generator = torch.Generator().manual_seed(seed)
    sides = []
    for length in lengths:
        # So many rows besides one a chunk go to chunks or to none.
        extra = torch.randint(-1, chunks, (length - chunks,), generator=generator)
        at = torch.cat([torch.arange(chunks), extra[extra >= 0]]).sort().values.tolist()
        before = torch.randint(0, len(at) + 1, (int((extra < 0).sum()),), generator=generator)
        for place in sorted(before.tolist(), reverse=True):
            at.insert(place, -1)
        # A row of no chunk within a chunk stays in it.
        sides.append(torch.tensor(at))
    return sides


def ordered(batch: Microbatch, chunks: int = 4) -> Microbatch:
    """The same microbatch with chunks in order."""
    lengths = batch.student_logits.shape[1], batch.teacher_logits.shape[1]
    pairs = [ordered_chunks(lengths, chunks, row) for row in range(len(batch.chunk_ids))]
    return replace(batch, chunk_ids=[(student, teacher) for student, teacher in pairs])


def with_hidden(
    inputs: DistillationInputs, *, kind: str = "hidden", dtype: torch.dtype = torch.float32
) -> DistillationInputs:
    """The student's logits, and the teacher's for ``hidden``, become those of random heads."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden = normal(*inputs.labels.shape, HIDDEN).requires_grad_()
    weight = (1.5 * normal(inputs.student_shard.width, HIDDEN)).requires_grad_()
    inputs = replace(inputs, student_hidden=hidden, student_head_weight=weight)
    if inputs.teacher is None or kind != "hidden":
        return inputs
    states = normal(*inputs.teacher.positions, HIDDEN)
    head = 1.5 * normal(inputs.teacher.shard.width, HIDDEN)
    shard = inputs.teacher.shard
    teacher = TeacherTargets(kind="hidden", shard=shard, hidden=states, head_weight=head)
    return replace(inputs, teacher=teacher)


def inputs_of_case(
    case: ObjectiveCase, *, kind: str = "hidden", dtype: torch.dtype = torch.float32, **sizes: Any
) -> DistillationInputs:
    """Unsharded and padded."""
    inputs = case.build(ordered(case.batch(**sizes)), (3, 3))
    if not case.kinds:
        inputs = replace(inputs, teacher=None)
    return with_hidden(inputs, kind=kind, dtype=dtype)


def by_logits(
    objectives: dict[str, Objective], scales: dict[str, float], inputs: DistillationInputs
) -> Numbers:
    """Logits first, as a whole."""
    hidden, weight = leaves(inputs)
    whole = replace(
        inputs, student_logits=hidden @ weight.t(), student_hidden=None, student_head_weight=None
    )
    outputs = {name: objective(whole) for name, objective in objectives.items()}
    total = torch.stack([scales[name] * out.loss_sum for name, out in outputs.items()]).sum()
    return Numbers(
        total=total.detach(),
        outputs=outputs,
        **dict(
            zip(("d_hidden", "d_weight"), torch.autograd.grad(total, [hidden, weight]), strict=True)
        ),
    )


def by_tiles(
    objectives: dict[str, Objective],
    scales: dict[str, float],
    inputs: DistillationInputs,
    rows: int,
) -> Numbers:
    """Without whole logits."""
    hidden, weight = leaves(inputs)
    form = LinearDistillation(objectives=objectives, tile_rows=rows)
    tiles = form.tiles(known_ahead(inputs), table_of(inputs))
    whole = replace(inputs, student_logits=no_logits(hidden, inputs.student_shard))
    output = form(whole, tiles, scales)
    d_hidden, d_weight = torch.autograd.grad(output.total, [hidden, weight])
    return Numbers(
        total=output.total.detach(), outputs=output.parts, d_hidden=d_hidden, d_weight=d_weight
    )


def leaves(inputs: DistillationInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and head of the student."""
    return inputs.student_hidden, inputs.student_head_weight
