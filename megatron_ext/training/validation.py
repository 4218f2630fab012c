"""Held-out bits per byte of student and teacher, and how often they choose the same token.

Bits per byte is ``sum(-log2 p(token)) / bytes``: the cross-entropy of the text, in bits, over the
number of bytes of the text. It does not know how the text was cut into tokens, so models with
different tokenizers compare. Control tokens, which stand for no byte, are left out of the sum.
Agreement is defined in ``training.agreement``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import Objective
from megatron_ext.teachers import Teacher
from megatron_ext.training.agreement import Agreement
from megatron_ext.training.config import TEACHER
from megatron_ext.training.data.microbatch import Microbatch, TokenBatch
from megatron_ext.training.model_chunks import has_head
from megatron_ext.training.student_head import head_of, without_head
from megatron_ext.training.text_nats import TextNats, TextScore


@dataclass(frozen=True, slots=True)
class HeldOutScores:
    """Results of one measurement; None where a model was not measured or on other stages."""

    student: float | None

    teachers: Mapping[str, float | None]
    """Bits per byte by name."""

    agreement: Mapping[str, tuple[float | None, int]]
    """By the names of the teachers: the share, and of how many chunks."""

    def metrics(self) -> dict[str, float | int | None]:
        """As the log has them; the one of a ``teacher`` section goes without a name."""
        found: dict[str, float | int | None] = {"student_bits_per_byte": self.student}
        for name, measured in (self.teachers or {TEACHER: None}).items():
            found[f"teacher_bits_per_byte{_suffix(name)}"] = measured
        for name, (share, chunks) in self.agreement.items():
            found[f"agreement{_suffix(name)}"] = share
            found[f"agreement_chunks{_suffix(name)}"] = chunks
        return found


def measure_held_out(
    global_batches: Iterable[Sequence[Microbatch]],
    *,
    student: Sequence[Any],
    student_shard: VocabShard,
    teachers: Mapping[str, Teacher],
    next_token: Objective,
    groups: ProcessGroups,
    tile_rows: int | None = None,
    same_tokens: Mapping[str, torch.Tensor] | None = None,
) -> HeldOutScores:
    """Bits per byte and agreement over this replica's microbatches and all others.

    Args:
        global_batches: This replica's microbatches, as many at a time as one schedule runs over,
            of a ``HeldOut``; equally many on every rank.
        student: This rank's chunks, wrapped.
        tile_rows: Make logits of so many positions at a time, from hidden states and heads; all of
            a microbatch with None.
        same_tokens: By the names of teachers whose agreement is asked for, on the last stage, what
            ``agreement.same_tokens`` returned; the same names on all its ranks.

    Collectives: the schedules', those of ``next_token`` in every tile, and one all-reduce over
    ``dp_cp`` a model; for agreement two all-reduces a tile, those of ``Agreement.add``, and one
    all-reduce over ``dp`` a teacher.
    """
    agreement = {name: Agreement(table) for name, table in (same_tokens or {}).items()}
    nats = TextNats(next_token, tile_rows, with_choices=bool(agreement))
    student_bytes = 0
    student_nats: list[torch.Tensor] = []
    teacher_bytes = dict.fromkeys(teachers, 0)
    teacher_nats: dict[str, list[torch.Tensor]] = {name: [] for name in teachers}
    for batches in global_batches:
        sides = [batch.student for batch in batches]
        student_bytes += sum(side.byte_count for side in sides)
        of_student = _student_scores(sides, student, student_shard, nats, batches[0].row_length)
        student_nats += [score.nats for score in of_student]
        for name, teacher in teachers.items():
            sides = [batch.teachers[name] for batch in batches]
            teacher_bytes[name] += sum(side.byte_count for side in sides)
            of_teacher = _teacher_scores(sides, teacher, nats)
            teacher_nats[name] += [score.nats for score in of_teacher]
            if name in agreement:
                _compare(agreement[name], name, batches, of_student, of_teacher)
    return HeldOutScores(
        student=_to_bits_per_byte(student_nats, student_bytes, groups),
        teachers={
            name: _to_bits_per_byte(teacher_nats[name], teacher_bytes[name], groups)
            for name in teachers
        },
        agreement={name: counts.share(groups.dp) for name, counts in agreement.items()},
    )


def _compare(
    agreement: Agreement,
    teacher: str,
    batches: Sequence[Microbatch],
    of_student: Sequence[TextScore],
    of_teacher: Sequence[TextScore],
) -> None:
    """Count the microbatches of one schedule; on the last stage."""
    for batch, student, taught in zip(batches, of_student, of_teacher, strict=True):
        if student.choices is not None and taught.choices is not None:
            alignment = batch.sides.alignments[teacher]
            agreement.add(student.choices, taught.choices, alignment, batch.context)


def _student_scores(
    sides: Sequence[TokenBatch],
    student: Sequence[Any],
    shard: VocabShard,
    nats: TextNats,
    row_length: int,
) -> list[TextScore]:
    """Of each microbatch on the last stage, nothing elsewhere."""
    for chunk in student:
        chunk.eval()
    with torch.no_grad():
        scores = get_forward_backward_func()(
            forward_step_func=partial(_student_step, shard, nats),
            data_iterator=[iter(sides) for _ in student],
            model=list(student),
            num_microbatches=len(sides),
            seq_length=row_length,
            micro_batch_size=sides[0].tokens.shape[0],
            forward_only=True,
            collect_non_loss_data=True,
        )
    for chunk in student:
        chunk.train()
    return list(scores)


def _student_step(
    shard: VocabShard, nats: TextNats, sides: Iterator[TokenBatch], model: Any
) -> tuple[torch.Tensor, Any]:
    side = next(sides)
    is_headless = nats.tile_rows is not None and has_head(model)
    with without_head(model) if is_headless else nullcontext():
        output = model(side.tokens, side.position_ids, side.attention_mask)

    def of_logits(logits: torch.Tensor, *, non_loss_data: bool) -> TextScore:
        return nats.of_logits(logits, side.labels, shard)

    def of_hidden(hidden: torch.Tensor, *, non_loss_data: bool) -> TextScore:
        head = head_of(model)
        return nats.of_hidden(head.whole(hidden, shard.group), head.weight, side.labels, shard)

    return output, of_hidden if is_headless else of_logits


def _teacher_scores(
    sides: Sequence[TokenBatch], teacher: Teacher, nats: TextNats
) -> list[TextScore]:
    with torch.no_grad():
        return [
            nats.of_targets(target, side.labels)
            for target, side in zip(teacher.targets(sides), sides, strict=False)
        ]


def _to_bits_per_byte(
    nats: list[torch.Tensor], byte_count: int, groups: ProcessGroups
) -> float | None:
    if not nats:
        return None
    summed = torch.stack(nats).double().sum()
    # Ranks that share rows have a part of the sum each, and know the bytes of whole rows.
    own_bytes = byte_count if groups.cp_rank == 0 else 0
    totals = torch.stack([summed, torch.full_like(summed, own_bytes)])
    dist.all_reduce(totals, group=groups.dp_cp)
    total_nats, total_bytes = totals.tolist()
    return float(total_nats / math.log(2) / total_bytes)


def _suffix(teacher: str) -> str:
    return "" if teacher == TEACHER else f"/{teacher}"
