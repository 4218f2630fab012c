"""Surprise of the student and of its teachers at one sampled text, for the log of rollouts.

Surprise is the negative log-probability, in nats, at temperature 1. T label positions of the
student's row and Tt of a teacher's, S of T on this rank, D hidden, Vp local columns, N sampled
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import VocabShard, row_slices
from megatron_ext.losses import TeacherTargets
from megatron_ext.ops.token_log_prob import token_log_prob
from megatron_ext.training.microbatch import Microbatch, MicrobatchWithTargets

_MOST_PIECES: Final = 512
_MISSING: Final = "its targets have no log-probabilities of the labels"


class TeacherSurprise(NamedTuple):
    """A teacher's predictions of the text, and its chunks with the student's tokens."""

    log_probs: torch.Tensor | None
    """[Tt] fp32 of the labels, NaN where there is none; None where the targets do not have them."""

    student_chunk_id: torch.Tensor
    """[T] int64, ``NO_CHUNK`` for none."""

    teacher_chunk_id: torch.Tensor
    """[Tt] int64"""


class Surprise(NamedTuple):
    """Predictions of the text in one row by all models; the same on every rank of a stage."""

    student: torch.Tensor
    """[T] fp32 log-probabilities of the labels, NaN where there is none."""

    teachers: Mapping[str, TeacherSurprise]


def row_surprise(
    microbatch: MicrobatchWithTargets,
    output: torch.Tensor,
    shard: VocabShard,
    *,
    teachers: Collection[str],
    head_weight: torch.Tensor | None = None,
) -> Surprise | None:
    """The surprise at the microbatch's logged row, on the last stage; None where it has none.

    Args:
        output: [B, S, Vp] the student's logits, or [B, S, D] with ``head_weight`` [Vp, D].
        teachers: Names of those that teach the row.

    Collectives: for each model with logits three all-reduces over the tensor-parallel group, from
    hidden states for each slice of rows; where rows are cut, one all-reduce of [T] for each model.
    """
    batch, row = microbatch.batch, microbatch.batch.logged_row
    if row is None:
        return None
    labels = batch.student.labels[row]
    of_hidden = None if head_weight is None else lambda rows: rows @ head_weight.t()
    student = _log_probs(output[row], labels, shard, of_hidden)
    return Surprise(
        _whole(student, labels, batch, batch.row_length),
        {name: _of_teacher(microbatch.targets[name], batch, row, name) for name in teachers},
    )


def _of_teacher(targets: TeacherTargets, batch: Microbatch, row: int, name: str) -> TeacherSurprise:
    labels, alignment = batch.teachers[name].labels[row], batch.sides.alignments[name]
    values = None
    if targets.label_log_probs is not None:
        values = targets.label_log_probs[row]
    elif targets.logits is not None:
        values = _log_probs(targets.logits[row], labels, targets.shard)
    elif targets.hidden is not None:
        values = _log_probs(targets.hidden[row], labels, targets.shard, targets.logits_of)
    if values is not None:
        length = batch.sides.teachers[name].labels.shape[1]
        values = _whole(values, labels, batch, length)
    return TeacherSurprise(values, alignment.student_chunk_id[row], alignment.teacher_chunk_id[row])


@torch.no_grad()
def _log_probs(
    rows: torch.Tensor,
    labels: torch.Tensor,
    shard: VocabShard,
    of_hidden: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """[S] of the labels, of logits [S, Vp] or of hidden states [S, D] that ``of_hidden`` makes
    logits of."""
    if of_hidden is None:
        return token_log_prob(rows.detach(), labels, shard)
    parts = [
        token_log_prob(of_hidden(rows[part]), labels[part], shard)
        for part in row_slices(len(rows), shard.width, device=rows.device)
    ]
    return torch.cat(parts)


def _whole(
    values: torch.Tensor, labels: torch.Tensor, batch: Microbatch, length: int
) -> torch.Tensor:
    """[T] of this rank's part [S] of a row."""
    values = values.float().masked_fill(labels == IGNORE_INDEX, torch.nan)
    if batch.context is None:
        return values
    positions = torch.arange(length, device=values.device)
    whole = values.new_zeros(length)
    whole[batch.context.cut(positions[None])[0]] = values
    return all_reduce_sum(whole, batch.context.group)


class _Piece(NamedTuple):
    """A run of sampled tokens: a chunk, a token in none, or several of them."""

    spelled: bytes
    """What is shown of it."""

    byte_count: int
    """Bytes of text; a stop token has none."""

    student: float | None
    """Nats; None where they are not known."""

    teacher: float | None


def surprise_record(
    surprise: Surprise, tokens: Sequence[bytes], *, first: int, stop: str | None
) -> dict[str, Any]:
    """The surprise of each teacher and of the student as plain values for the log.

    ``pieces`` are the shortest runs of chunks that spell whole characters, the first 512 of them,
    with the number of ``more_pieces``: the text, and nats of the student and of the teacher. A
    number is None for a token that is not trained or is in no chunk, and where it is not finite.
    ``bytes``, ``student`` and ``teacher`` are sums over all pieces with both numbers, so that
    models of any tokenizers compare.

    Args:
        tokens: [N] bytes of the sampled tokens, which together spell whole characters, without a
            stop token.
        first: Label position of the first of them.
        stop: Name of the stop token behind them; None where there is none.
    """
    spelled = [*tokens, *([] if stop is None else [stop.encode()])]
    counts = [*map(len, tokens), *([] if stop is None else [0])]
    student = _nats(surprise.student)[first : first + len(spelled)]
    records: dict[str, Any] = {}
    for name, teacher in surprise.teachers.items():
        pieces = list(_whole_characters(_pieces(teacher, first, spelled, counts, student)))
        records[name] = {"missing": _MISSING} if teacher.log_probs is None else _totals(pieces)
        records[name]["pieces"] = [
            [piece.spelled.decode(), *map(_rounded, (piece.student, piece.teacher))]
            for piece in pieces[:_MOST_PIECES]
        ]
        if len(pieces) > _MOST_PIECES:
            records[name]["more_pieces"] = len(pieces) - _MOST_PIECES
    return records


def _pieces(
    teacher: TeacherSurprise,
    first: int,
    spelled: Sequence[bytes],
    counts: Sequence[int],
    student: Sequence[float | None],
) -> Iterator[_Piece]:
    """Chunks of the completion, and the tokens between them."""
    chunk_of = teacher.student_chunk_id.tolist()[first : first + len(spelled)]
    last = {chunk: number for number, chunk in enumerate(chunk_of)}
    nats: dict[int, list[float | None]] = {}
    if teacher.log_probs is not None:
        ids = teacher.teacher_chunk_id.tolist()
        for chunk, value in zip(ids, _nats(teacher.log_probs), strict=True):
            nats.setdefault(chunk, []).append(value)
    start = 0
    while start < len(spelled):
        chunk = chunk_of[start]
        stop = 1 + (start if chunk == NO_CHUNK else last[chunk])
        yield _Piece(
            b"".join(spelled[start:stop]),
            sum(counts[start:stop]),
            _sum(student[start:stop]),
            None if chunk == NO_CHUNK else _sum(nats.get(chunk, [None])),
        )
        start = stop


def _whole_characters(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    """``pieces``, joined where a character lies across several."""
    parts: list[_Piece] = []
    for piece in pieces:
        parts.append(piece)
        spelled, counts, student, teacher = zip(*parts, strict=True)
        whole = b"".join(spelled)
        try:
            whole.decode()
        except UnicodeDecodeError:
            continue
        yield _Piece(whole, sum(counts), _sum(student), _sum(teacher))
        parts = []
    assert not parts, "what is kept of a completion ends with a whole character"


def _totals(pieces: Sequence[_Piece]) -> dict[str, Any]:
    known = [
        (piece.byte_count, piece.student, piece.teacher)
        for piece in pieces
        if piece.student is not None and piece.teacher is not None
    ]
    count, student, teacher = map(sum, zip(*known, strict=True)) if known else (0, 0.0, 0.0)
    return {"bytes": count, "student": _rounded(student), "teacher": _rounded(teacher)}


def _nats(log_probs: torch.Tensor) -> list[float | None]:
    return [-value if math.isfinite(value) else None for value in log_probs.tolist()]


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
