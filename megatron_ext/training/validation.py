"""Held-out bits per byte of student and teachers, accuracy, and agreement on the next token.

Bits per byte is ``sum(-log2 p(token)) / bytes``: the cross-entropy of the text, in bits, over the
number of bytes of the text. It does not depend on how the text is cut into tokens, so models with
different tokenizers compare. Control tokens, which stand for no byte, are left out of the sum.

    accuracy = #{labels that are the student's likeliest token} / #labels
    agreement = #{c in C1 : m(argmax_v z_c(v)) = argmax_w y_c(w)} / #C1

``C1`` are the chunks of one student token and one teacher token, which both models predict after
the same bytes; ``z_c`` and ``y_c`` are the logits that predict them; ``m`` takes a student token to
the teacher's token of the same bytes, or, for control tokens, of the same role or name. A choice
that the other vocabulary lacks agrees with nothing.

B rows, T positions, S those of this rank, Vp local columns, Vs of the student's, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ext.alignment.alignment import ChunkClass
from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.distributed.context_parallel import ContextRank, in_order
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard, vocab_argmax
from megatron_ext.losses import DistillationInputs, Objective, TeacherTargets
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import VocabularyLayout
from megatron_ext.teachers import Teacher
from megatron_ext.teachers.megatron_teacher import without_head
from megatron_ext.tokenizers.base import ByteTokenizer
from megatron_ext.training.configuration.config import TEACHER
from megatron_ext.training.megatron_models.models import has_head
from megatron_ext.training.megatron_models.student_head import head_of
from megatron_ext.training.microbatch import Microbatch, TokenBatch

_NONE = -1


def same_tokens(
    student: ByteTokenizer,
    teacher: ByteTokenizer,
    *,
    layout: VocabularyLayout | None = None,
    device: torch.device,
) -> torch.Tensor:
    """``m`` [Vs] int64: the teacher's column for each of the student's, -1 where it has none.

    Args:
        layout: Order of both heads' rows; None for the order of ids.
    """
    projection = SparseProjection.from_tokenizers(student, teacher, "exact", top_k=1)
    if layout is not None:
        projection = projection.permuted(layout)
    rows = np.flatnonzero(projection.is_exact_row)
    table = np.full(projection.shape[0], _NONE, dtype=np.int64)
    table[rows] = projection.indices[projection.indptr[rows]]
    return torch.from_numpy(table).to(device)


def first_choices(logits: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """[...] int64: the likeliest column of ``logits`` [..., Vp]. Two all-reduces over the shard."""
    return vocab_argmax(logits.flatten(0, -2), shard).view(logits.shape[:-1])


@dataclass(slots=True)
class Agreement:
    """Counts of agreeing chunks with one teacher, over microbatches, on the device."""

    same_tokens: torch.Tensor
    """``m`` [Vs]."""

    _counts: list[torch.Tensor] = field(default_factory=list)

    def add(
        self,
        student: torch.Tensor,
        teacher: torch.Tensor,
        alignment: AlignmentBatch,
        context: ContextRank | None,
    ) -> None:
        """Count one microbatch.

        Args:
            student: [B, S] likeliest columns of the student.
            teacher: [B, S] likeliest columns of the teacher.
            alignment: Alignment of whole rows.
            context: The rank that has S of the T positions; None where rows are whole.

        Collectives: two all-gathers over the ranks that share rows.
        """
        of_student = _whole(student, context)[alignment.student_spans[:, 0]]
        of_teacher = _whole(teacher, context)[alignment.teacher_spans[:, 0]]
        is_single = alignment.chunk_class == ChunkClass.ONE_TO_ONE
        # Columns that pad the vocabulary are never chosen.
        agrees = (self.same_tokens[of_student] == of_teacher) & is_single
        self._counts.append(torch.stack((agrees.sum(), is_single.sum())))

    def share(self, group: dist.ProcessGroup) -> tuple[float | None, int]:
        """The share of agreeing chunks over all replicas, None without chunks, and their number.

        Collectives: one all-reduce over ``group``, the replicas. Waits for the device.
        """
        device = self.same_tokens.device
        total = torch.stack(self._counts).sum(0) if self._counts else torch.zeros(2, device=device)
        total = total.to(torch.int64)
        dist.all_reduce(total, group=group)
        agreeing, chunks = total.tolist()
        return (agreeing / chunks if chunks else None), int(chunks)


def _whole(choices: torch.Tensor, context: ContextRank | None) -> torch.Tensor:
    """[B T] choices of whole rows, one after the other, on every rank that shares them."""
    if context is None:
        return choices.flatten()
    columns = choices.t().contiguous()
    of_ranks = [torch.empty_like(columns) for _ in range(context.size)]
    dist.all_gather(of_ranks, columns, group=context.group)
    return in_order(torch.cat(of_ranks), context.size).t().flatten()


class TextScore(NamedTuple):
    """Cross-entropy and first choices of one model on a microbatch."""

    nats: torch.Tensor
    """Scalar: the cross-entropy of the labels, summed."""

    hits: torch.Tensor | None
    """[2] float64: labels that are the likeliest token, and labels; None where not known."""

    choices: torch.Tensor | None
    """[B, T] int64: the likeliest columns; None where they are not asked for, or not known."""


@dataclass(frozen=True, slots=True)
class TextNats:
    """Scores of a text from logits, or from hidden states and a head; without a graph."""

    next_token: Objective

    tile_rows: int | None = None
    """Number of positions whose logits are made at a time; None for all of a microbatch."""

    with_choices: bool = False
    """Whether first choices are asked for, too."""

    def of_logits(self, logits: torch.Tensor, labels: torch.Tensor, shard: VocabShard) -> TextScore:
        """The score for ``logits`` [B, T, Vp] and ``labels`` [B, T].

        Collectives: those of ``next_token``, and of ``first_choices``.
        """
        inputs = DistillationInputs(student_logits=logits, student_shard=shard, labels=labels)
        choices = first_choices(logits, shard) if self.with_choices else None
        output = self.next_token(inputs)
        hits = torch.stack([part.double() for part in output.metrics["accuracy"]])
        return TextScore(output.loss_sum, hits, choices)

    def of_hidden(
        self,
        hidden: torch.Tensor,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
        labels: torch.Tensor,
        shard: VocabShard,
    ) -> TextScore:
        """The score for hidden states [B, T, D] that ``logits_of`` makes logits of, by tiles.

        Collectives: those of ``of_logits`` in each of the B T / ``tile_rows`` tiles.
        """
        rows, flat_labels = hidden.flatten(0, 1), labels.flatten()
        step = self.tile_rows or len(rows)
        tiles = [slice(start, start + step) for start in range(0, len(rows), step)]
        with torch.no_grad():
            scores = [
                self.of_logits(logits_of(rows[tile])[None], flat_labels[None, tile], shard)
                for tile in tiles
            ]
        nats = torch.stack([score.nats for score in scores]).sum()
        hits = torch.stack([score.hits for score in scores if score.hits is not None]).sum(0)
        return TextScore(nats, hits, _joined([score.choices for score in scores], labels.shape))

    def of_targets(self, targets: TeacherTargets, labels: torch.Tensor) -> TextScore:
        """The score for a teacher's targets; no choices where these are log-probabilities alone."""
        if targets.label_log_probs is not None:
            log_probs = targets.label_log_probs.masked_fill(labels < 0, 0.0)
            return TextScore(-log_probs.float().sum(), None, None)
        hidden = targets.hidden
        if self.tile_rows is not None and hidden is not None:
            return self.of_hidden(hidden, targets.logits_of, labels, targets.shard)
        return self.of_logits(targets.to_logits(), labels, targets.shard)


def _joined(choices: Sequence[torch.Tensor | None], shape: torch.Size) -> torch.Tensor | None:
    tiles = [tile for tile in choices if tile is not None]
    return torch.cat(tiles, dim=1).view(shape) if tiles else None


@dataclass(frozen=True, slots=True)
class HeldOutScores:
    """Results of one measurement; None for a model that was not measured, and on other stages."""

    student: float | None

    accuracy: float | None
    """Share of the student's labels that it predicts first; None without labels."""

    teachers: Mapping[str, float | None]
    """Bits per byte by name."""

    agreement: Mapping[str, tuple[float | None, int]]
    """By the names of the teachers: the share of agreeing chunks, and the number of chunks."""

    def metrics(self) -> dict[str, float | int | None]:
        """Metrics for the log; those of the teacher of a ``teacher`` section carry no name."""
        metrics: dict[str, float | int | None] = {
            "student_bits_per_byte": self.student,
            "student_accuracy": self.accuracy,
        }
        for name, measured in (self.teachers or {TEACHER: None}).items():
            metrics[f"teacher_bits_per_byte{_suffix(name)}"] = measured
        for name, (share, chunks) in self.agreement.items():
            metrics[f"agreement{_suffix(name)}"] = share
            metrics[f"agreement_chunks{_suffix(name)}"] = chunks
        return metrics


KeptScores = dict[str, list[Sequence[TextScore]]]
"""Scores of frozen teachers by name, of each global batch of the held-out text so far: on the
device, 8 bytes a position."""


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
    kept: KeptScores | None = None,
) -> HeldOutScores:
    """Bits per byte, accuracy and agreement over the microbatches of all replicas.

    Args:
        global_batches: This replica's microbatches of a ``HeldOut``, grouped as one schedule runs
            them; equally many on every rank.
        student: This rank's chunks, wrapped.
        tile_rows: As in ``TextNats``.
        same_tokens: Results of ``same_tokens`` by the names of teachers whose agreement is asked
            for, on the last stage; the same names on all its ranks.
        kept: Of teachers that never change, under whose names new scores are added: what is there
            is not asked for again. The same names and lengths on every rank.

    Collectives: the schedules', those of ``next_token`` in every tile, and one all-reduce over
    ``dp_cp`` a model and for accuracy; for agreement two all-reduces a tile, those of
    ``Agreement.add``, and one all-reduce over ``dp`` a teacher.
    """
    kept = {} if kept is None else kept
    agreement = {name: Agreement(table) for name, table in (same_tokens or {}).items()}
    nats = TextNats(next_token, tile_rows, with_choices=bool(agreement))
    student_bytes = 0
    student_nats: list[torch.Tensor] = []
    hits: list[torch.Tensor] = []
    teacher_bytes = dict.fromkeys(teachers, 0)
    teacher_nats: dict[str, list[torch.Tensor]] = {name: [] for name in teachers}
    for number, batches in enumerate(global_batches):
        sides = [batch.student for batch in batches]
        student_bytes += sum(side.byte_count for side in sides)
        of_student = _student_scores(sides, student, student_shard, nats, batches[0].row_length)
        student_nats += [score.nats for score in of_student]
        hits += [score.hits for score in of_student if score.hits is not None]
        for name, teacher in teachers.items():
            sides = [batch.teachers[name] for batch in batches]
            teacher_bytes[name] += sum(side.byte_count for side in sides)
            known = kept.get(name)
            if known is not None and number < len(known):
                of_teacher = known[number]
            else:
                of_teacher = _teacher_scores(sides, teacher, nats)
                if known is not None:
                    known.append(of_teacher)
            teacher_nats[name] += [score.nats for score in of_teacher]
            if name in agreement:
                _compare(agreement[name], name, batches, of_student, of_teacher)
    return HeldOutScores(
        student=_to_bits_per_byte(student_nats, student_bytes, groups),
        accuracy=accuracy(hits, groups.dp_cp),
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
    for batch, ours, theirs in zip(batches, of_student, of_teacher, strict=True):
        if ours.choices is not None and theirs.choices is not None:
            alignment = batch.sides.alignments[teacher]
            agreement.add(ours.choices, theirs.choices, alignment, batch.context)


@torch.no_grad()
def _teacher_scores(
    sides: Sequence[TokenBatch], teacher: Teacher, nats: TextNats
) -> list[TextScore]:
    """Score of each microbatch on the last stage, [] on the others."""
    targets = zip(teacher.targets(sides), sides, strict=False)
    return [nats.of_targets(target, side.labels) for target, side in targets]


def _student_scores(
    sides: Sequence[TokenBatch],
    student: Sequence[Any],
    shard: VocabShard,
    nats: TextNats,
    row_length: int,
) -> list[TextScore]:
    """Score of each microbatch on the last stage, [] on the others."""
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
        whole = head.whole(hidden, shard.group)
        return nats.of_hidden(whole, head.logits_of, side.labels, shard)

    return output, of_hidden if is_headless else of_logits


def _to_bits_per_byte(
    nats: list[torch.Tensor], byte_count: int, groups: ProcessGroups
) -> float | None:
    if not nats:
        return None
    summed = torch.stack(nats).double().sum()
    # Ranks that share rows each have a share of the sum, but the bytes of whole rows.
    counted_bytes = byte_count if groups.cp_rank == 0 else 0
    totals = torch.stack([summed, torch.full_like(summed, counted_bytes)])
    dist.all_reduce(totals, group=groups.dp_cp)
    total_nats, total_bytes = totals.tolist()
    return float(total_nats / math.log(2) / total_bytes)


def accuracy(hits: Sequence[torch.Tensor], group: dist.ProcessGroup) -> float | None:
    """The share of hits in ``TextScore.hits`` of all replicas; None without labels.

    Collectives: one all-reduce over ``group`` where there is a score at all.
    """
    if not hits:
        return None
    total = torch.stack([*hits]).sum(0)
    dist.all_reduce(total, group=group)
    right, labels = total.tolist()
    return float(right / labels) if labels else None


def _suffix(teacher: str) -> str:
    return "" if teacher == TEACHER else f"/{teacher}"
