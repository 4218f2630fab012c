"""Checks of an objective's options and of its inputs' shapes, shards and target kinds.

B batch, Ts Tt tokens, Vp local columns. Host-side: only ``check_shards_agree`` communicates.
"""

from __future__ import annotations

import math
from typing import Literal, TypeVar, get_args

import torch
import torch.distributed as dist

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.distributed.shard_collectives import gather_columns, group_size
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs
from megatron_ext.losses.lookup import Completions
from megatron_ext.losses.projection_shard import ProjectionShard
from megatron_ext.losses.targets import TargetKind, TeacherTargets
from megatron_ext.losses.vocabulary_match import VocabularyMatch
from megatron_ext.ops.divergence import Divergence

Found = TypeVar("Found", bound=Completions)


def check_shard(shard: VocabShard, *, side: str) -> None:
    """Check a shard against its rank and the size of its group. No collectives.

    Args:
        side: Model that it belongs to, for errors: ``"student"``.

    Raises:
        LossError: The shard is another rank's, or the shards do not cover the vocabulary.
    """
    size = group_size(shard.group)
    rank = 0 if shard.group is None else dist.get_rank(shard.group)
    if shard.start != rank * shard.width:
        raise LossError(
            f"the {side}'s vocabulary shard is not that of rank {rank}",
            got=f"columns {shard.start} to {shard.stop}",
            expected=f"columns {rank * shard.width} to {(rank + 1) * shard.width}",
        )
    if size * shard.width < shard.vocab_size:
        raise LossError(
            f"the {side}'s vocabulary shards do not cover the vocabulary",
            got=f"{size} of {shard.width} columns",
            expected=f"at least {shard.vocab_size} columns together",
        )


def check_shards_agree(shard: VocabShard, *, side: str, device: torch.device | str) -> None:
    """Check that every rank's shard is its own, and that all have one width and vocabulary.

    Call it once, before training: one all-gather of three numbers, and the host waits for it.

    Raises:
        LossError: On every rank, where two shards differ or one is not its rank's.
    """
    numbers = torch.tensor([[shard.start, shard.width, shard.vocab_size]], device=device)
    ranks = gather_columns(numbers, shard.group).reshape(-1, 3).tolist()
    width, vocab_size = ranks[0][1:]
    for rank, (start, other_width, other_size) in enumerate(ranks):
        if (start, other_width, other_size) != (rank * width, width, vocab_size):
            raise LossError(
                f"the {side}'s vocabulary shards differ between ranks",
                got=f"rank {rank} has columns {start} to {start + other_width} of {other_size} "
                "tokens",
                expected=f"columns {rank * width} to {(rank + 1) * width} of {vocab_size}",
            )
    check_shard(shard, side=side)


def check_student(inputs: DistillationInputs) -> None:
    """Check the student's logits [B, Ts, Vp] against its labels and shard.

    Raises:
        LossError: They differ in shape, or the shard does not fit its rank and vocabulary.
    """
    check_shard(inputs.student_shard, side="student")
    logits = tuple(inputs.student_logits.shape)
    expected = (*inputs.labels.shape, inputs.student_shard.width)
    if len(logits) != 3 or logits != expected:
        raise LossError(
            "student logits do not fit labels [B, Ts] and vocabulary shard",
            got=logits,
            expected=expected,
        )


def check_alignment(
    inputs: DistillationInputs,
    *,
    objective: str,
    kinds: tuple[TargetKind, ...] = ("logits", "hidden"),
    why: str | None = None,
) -> tuple[AlignmentBatch, TeacherTargets]:
    """Return the alignment and the teacher, checked against the logits' shapes.

    Args:
        inputs: Inputs of the objective.
        objective: Its name, for errors.
        kinds: Kinds of teacher targets that it accepts.
        why: Reason why it does not accept the others, for errors.

    Raises:
        LossError: One is missing, the targets are of another kind, or chunk ids, chunk mask, chunk
            classes or columns have another shape than the positions, chunks or shard they describe.
    """
    teacher, alignment = inputs.teacher, inputs.alignment
    if teacher is None or alignment is None:
        raise LossError(
            f"the objective {objective} needs a teacher and an alignment",
            got=" and ".join(
                f"no {name}"
                for name, value in (("teacher", teacher), ("alignment", alignment))
                if value is None
            ),
        )
    check_teacher(teacher, objective=objective, kinds=kinds, why=why)
    for side, chunk_id, rows in (
        ("student", alignment.student_chunk_id, inputs.student_logits.shape[:2]),
        ("teacher", alignment.teacher_chunk_id, teacher.positions),
    ):
        if chunk_id.shape != rows:
            raise LossError(
                f"{side} chunk ids do not fit the {side}'s positions [B, T]",
                got=tuple(chunk_id.shape),
                expected=tuple(rows),
            )
    mask = inputs.chunk_mask
    if mask is not None and (mask.shape != (alignment.chunk_count,) or mask.dtype != torch.bool):
        raise LossError(
            "the chunk mask does not fit the alignment",
            got=f"{mask.dtype} {tuple(mask.shape)}",
            expected=f"torch.bool ({alignment.chunk_count},)",
        )
    for name, classes in (
        ("text classes", inputs.chunk_text_class),
        ("scripts", inputs.chunk_script),
    ):
        if classes is not None and classes.shape != (alignment.chunk_count,):
            raise LossError(
                f"the chunks' {name} do not fit the alignment",
                got=tuple(classes.shape),
                expected=f"({alignment.chunk_count},)",
            )
    return alignment, teacher


def check_teacher(
    teacher: TeacherTargets,
    *,
    objective: str,
    kinds: tuple[TargetKind, ...],
    why: str | None = None,
) -> None:
    """Check that an objective accepts these targets, and that they fit their shard.

    Raises:
        LossError: They are of another kind, or their tensors do not fit one another or the shard.
    """
    if teacher.kind not in kinds:
        raise LossError(
            f"the objective {objective} cannot use these teacher targets",
            got=f"kind {teacher.kind!r}",
            expected=f"kind {' or '.join(map(repr, kinds))}",
            fix=why,
        )
    check_shard(teacher.shard, side="teacher")
    columns = {"logits": teacher.logits, "hidden": teacher.head_weight}.get(teacher.kind)
    width = None if columns is None else columns.shape[-1 if teacher.kind == "logits" else 0]
    if width not in (None, teacher.shard.width):
        raise LossError(
            "teacher targets do not fit the teacher's vocabulary shard",
            got=f"{width} columns",
            expected=f"{teacher.shard.width}",
        )
    ids, logits, normaliser = teacher.topk_ids, teacher.topk_logits, teacher.log_normaliser
    if ids is None or logits is None or normaliser is None:
        return
    if ids.shape != logits.shape or normaliser.shape != ids.shape[:-1] or not ids.shape[-1]:
        raise LossError(
            "a top-k teacher's tensors do not fit one another",
            got=f"ids {tuple(ids.shape)}, logits {tuple(logits.shape)} and log-normaliser "
            f"{tuple(normaliser.shape)}",
            expected="[B, T, K], [B, T, K] and [B, T] with K of at least 1",
        )


def check_same_tokenizer(
    inputs: DistillationInputs, *, objective: str, kinds: tuple[TargetKind, ...]
) -> TeacherTargets:
    """Return the teacher, checked to predict the student's tokens at the student's positions.

    Its rows of padding may be more or fewer (``TeacherTargets.logits_over``).

    Raises:
        LossError: There is none, its targets are of another kind, it predicts at other positions,
            or its tokenizer has another number of ids.
    """
    teacher, student = inputs.teacher, inputs.student_shard
    if teacher is None:
        raise LossError(f"the objective {objective} needs a teacher", got="no teacher")
    check_teacher(teacher, objective=objective, kinds=kinds)
    if teacher.positions != inputs.labels.shape:
        raise LossError(
            f"the objective {objective} needs a teacher that reads the student's tokens",
            got=f"positions {tuple(teacher.positions)}",
            expected=tuple(inputs.labels.shape),
            fix="take an objective over chunks for a teacher with another tokenizer",
        )
    if teacher.shard.vocab_size != student.vocab_size:
        raise LossError(
            f"the objective {objective} needs a teacher with the student's vocabulary",
            got=f"{teacher.shard.vocab_size} tokens",
            expected=student.vocab_size,
            fix="take an objective over chunks for a teacher with another tokenizer",
        )
    return teacher


def check_match(inputs: DistillationInputs, *, objective: str) -> VocabularyMatch:
    """Return the vocabulary match, checked.

    Raises:
        LossError: There is none, or its two sides differ in number.
    """
    match = inputs.match
    if match is None:
        raise LossError(
            f"the objective {objective} needs to know which tokens both vocabularies have",
            got="no match",
            fix="make a VocabularyMatch from the projection's partition",
        )
    if match.common_student.shape != match.common_teacher.shape:
        raise LossError(
            "the two sides of a vocabulary match differ",
            got=f"{len(match.common_student)} student and {len(match.common_teacher)} teacher "
            "tokens",
            expected="equally many",
        )
    return match


def check_projection(inputs: DistillationInputs, *, objective: str) -> ProjectionShard:
    """Return the projection, checked to be cut for the shards of these inputs.

    That it is for these two vocabularies was checked when it was cut: ``ProjectionShard`` knows
    their sizes, and the file their fingerprints.

    Raises:
        LossError: There is none, or it is cut for other shards.
    """
    if inputs.projection is None or inputs.teacher is None:
        raise LossError(
            f"the objective {objective} needs a vocabulary projection",
            got="none",
            fix="build one and name it in the teacher's configuration",
        )
    if not isinstance(inputs.projection, ProjectionShard):
        raise LossError(
            f"the objective {objective} reads a projection on a device",
            got=type(inputs.projection).__name__,
            expected="a ProjectionShard",
            fix="ProjectionShard.from_projection(projection, student_shard=..., teacher_shard=...)",
        )
    shard = inputs.teacher.shard
    expected = (inputs.student_shard.width, shard.vocab_size, shard.width)
    got = (*inputs.projection.weight.shape, *inputs.projection.reachable.shape)
    if got != expected:
        raise LossError(
            "the projection is cut for other shards (student columns, teacher vocabulary, "
            "teacher columns)",
            got=got,
            expected=expected,
        )
    return inputs.projection


Numerics = Literal["proper", "nemo"]
"""``proper``: distributions stay distributions, see ``docs/losses.md``. ``nemo``: value and
gradient of NeMo RL's x_token losses, for comparison with runs that used them."""


def check_numerics(objective: str, numerics: Numerics, direction: Divergence) -> None:
    """Raise LossError where the numerics are unknown, or have no such direction."""
    check_choice(objective, "numerics", numerics, get_args(Numerics))
    if numerics == "nemo" and direction == "jensen_shannon":
        raise LossError(
            f"the nemo numerics of the objective {objective} have no such direction",
            got=repr(direction),
            expected="'forward' or 'reverse'",
        )


def why_nemo(numerics: Numerics) -> str | None:
    """Reason why an objective with these numerics cannot be cut; None: it can."""
    if numerics == "nemo":
        return "numerics nemo, which choose columns for the whole microbatch"
    return None


def check_temperature(objective: str, temperature: float) -> None:
    """Raise LossError where the temperature is not a positive number."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise LossError(
            f"the temperature of {objective} must be positive", got=temperature, expected="above 0"
        )


def check_choice(objective: str, option: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise LossError where ``value`` is none of the choices."""
    if value not in choices:
        raise LossError(
            f"unknown {option} of the objective {objective}",
            got=repr(value),
            expected=f"one of {', '.join(map(str, choices))}",
        )


def check_completions(inputs: DistillationInputs, kind: type[Found], *, objective: str) -> Found:
    """Return the inputs' completions, which are to be a ``kind`` and of their alignment.

    Raises:
        LossError: They are not.
    """
    found, alignment = inputs.completions, inputs.alignment
    assert alignment is not None
    if not isinstance(found, kind):
        raise LossError(
            f"the objective {objective} needs {kind.__name__} as completions",
            got="none" if found is None else type(found).__name__,
            fix="look them up in each batch where it is loaded, by the of_batch of their table",
        )
    if found.chunk_count != alignment.chunk_count:
        raise LossError(
            f"the completions of the objective {objective} are of another alignment",
            got=f"{found.chunk_count} chunks",
            expected=f"{alignment.chunk_count}",
        )
    return found


def check_count(objective: str, option: str, value: int | None) -> None:
    """Raise LossError where ``value`` is below 1; None stands for all."""
    if value is not None and value < 1:
        raise LossError(
            f"{option} of the objective {objective} compares nothing",
            got=value,
            expected="at least 1, or None for all",
        )
