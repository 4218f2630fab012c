"""Operands and results of the matched divergence: column matching, options, masses and values.

Vps Vpt local columns, C chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import group_size, sum_columns
from megatron_ext.distributed.vocab_parallel import (
    VocabShard,
    columns_until_last,
    leading_columns,
)
from megatron_ext.ops.divergence import DivergenceOptions
from megatron_ext.ops.model_rows import ModelRows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class PairColumns(NamedTuple):
    """Pairs in this rank's columns, as kernels read them."""

    teacher: torch.Tensor
    """int32 [Vps], ``Matching.teacher_columns``."""

    aligned: int
    """Student columns before the first whose pair is not the column of the same number; with pairs
    side by side, these are all that have one."""

    end: int
    """Student columns up to the last that has a pair."""

    excluded: tuple[torch.Tensor, torch.Tensor]
    """``Matching.excluded``."""

    first_open: tuple[int, int]
    """Columns of either side before the first that is not excluded."""

    @classmethod
    def of(cls, matching: Matching, student: VocabShard, teacher: VocabShard) -> PairColumns:
        """Find them; waits for the device."""
        columns, excluded = matching.teacher_columns(student), matching.excluded(student, teacher)
        same = columns == torch.arange(len(columns), device=columns.device)
        first_open = leading_columns(excluded[0]), leading_columns(excluded[1])
        end = columns_until_last(columns >= 0)
        return cls(columns, leading_columns(same), end, excluded, first_open)


@dataclass(frozen=True, slots=True, eq=False)
class Matching:
    """Pairs of matching student and teacher columns, cut to this rank."""

    student_column: torch.Tensor
    """int64 [Vpt]: the global student column that each teacher column matches, -1 for none."""

    is_common: torch.Tensor
    """bool [Vps]: student columns that have a match."""

    with_rest: bool
    """Whether the masses outside are compared too; else both sides are normalised over the matched
    columns."""

    pairs_cross: bool = True
    """Whether a pair can lie on two ranks; the same on every rank."""

    _made: dict[tuple[VocabShard, VocabShard], PairColumns] = field(
        default_factory=dict, init=False, repr=False
    )

    _members: list[tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=list, init=False, repr=False
    )

    def pairs(self, student: VocabShard, teacher: VocabShard) -> PairColumns:
        """Pairs in these shards' columns, made once."""
        key = student, teacher
        if key not in self._made:
            self._made[key] = PairColumns.of(self, student, teacher)
        return self._made[key]

    def members(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of either side whose mass is summed; of two masses that add up to 1, the one that
        a difference from 1 would lose. Made once."""
        if not self._members:
            teacher_common = self.student_column >= 0
            if self.with_rest:
                self._members.append((~self.is_common, ~teacher_common))
            else:
                self._members.append((self.is_common, teacher_common))
        return self._members[0]

    def excluded(
        self, student: VocabShard, teacher: VocabShard
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns that are matched or padding, [Vps] and [Vpt]."""
        sides = ((self.is_common, student), (self.student_column >= 0, teacher))
        paddings = [shard.excluded_columns(common.device) for common, shard in sides]
        both = [
            common if padding is None else common | padding
            for (common, _), padding in zip(sides, paddings, strict=True)
        ]
        return both[0], both[1]

    def teacher_columns(self, student: VocabShard) -> torch.Tensor:
        """This rank's teacher column of each student column, int32 [Vps], -1 for none.

        If pairs cross, 0 for any match.
        """
        if self.pairs_cross and student.group is not None:
            return self.is_common.int() - 1
        count = len(self.student_column)
        local = torch.arange(count, dtype=torch.int32, device=self.is_common.device)
        place = torch.where(
            self.student_column >= 0, self.student_column - student.start, student.width
        )
        # Columns without a match are written beyond the end, where nothing reads them.
        columns = local.new_full((student.width + 1,), -1).index_copy_(0, place, local)
        return columns[: student.width]


def onto_student_columns(
    values: torch.Tensor, student_column: torch.Tensor, width: int, group: ProcessGroup | None
) -> torch.Tensor:
    """``values`` [C, Vpt] in the student's columns, 0 where a student column has no match.

    Args:
        values: Without a graph.
        student_column: int64 [Vpt], the global student column that each one matches, -1 for none.
        width: Student columns of a rank.

    Returns:
        [C, width]. One reduce-scatter of [C, width * ranks].
    """
    columns = width * group_size(group)
    # Columns without a match are written beyond the end, where nothing reads them.
    target = torch.where(student_column >= 0, student_column, columns)
    moved = values.new_zeros(values.shape[0], columns + 1).index_copy_(1, target, values)
    return sum_columns(moved[:, :columns], width, group)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedOptions(DivergenceOptions):
    """Options of the comparison of chunk distributions."""

    uncommon_weight: float = 0.0
    """w of the sorted L1 over the other columns."""

    top_u: int | None = None
    """Compared places of the sorted L1; None: all, which is exact."""


class MatchedDivergence(NamedTuple):
    """Result by chunk, fp32 [C] each (fp64 for fp64 logits), the same on every rank."""

    chunk_loss: torch.Tensor
    """``common + w uncommon``."""

    common: torch.Tensor
    """The divergence over matched columns and a bucket of all others, nats."""

    uncommon: torch.Tensor
    """The sorted L1 over the other columns."""

    discarded_mass: torch.Tensor
    """Upper bound of the error of ``uncommon``."""

    student_rest: torch.Tensor
    """The student's mass outside the matched columns."""

    teacher_rest: torch.Tensor

    agreement: torch.Tensor
    """1 where both have the same largest matched column, else 0."""

    student_log_sum: torch.Tensor
    """[Ts] logarithm of the row's sum, NaN where it has NaN or +inf."""

    teacher_log_sum: torch.Tensor
    """[Tt]"""

    cross_entropy: torch.Tensor | None = None
    """[Ts] of each label at temperature 1, 0 where there is none; None without labels."""

    top_column: torch.Tensor | None = None
    """int64 [Ts]: global column of the student's largest logit, with labels."""


class RestMasses(NamedTuple):
    """Masses, value and slope of the bucket of other columns, [C] each."""

    used: tuple[torch.Tensor, torch.Tensor]
    """Masses that student and teacher are normalised by."""

    masses: tuple[torch.Tensor, torch.Tensor]
    """Student's and teacher's masses outside the matched columns."""

    value: torch.Tensor
    """The bucket's term."""

    slope: torch.Tensor
    """``f_q`` of the bucket, 0 without one."""


class MatchedValues(NamedTuple):
    """Results [C], and [2, C] largest columns of teacher and student."""

    value: torch.Tensor
    """Divergence over the matched columns alone."""

    uncommon: torch.Tensor

    discarded: torch.Tensor

    best: torch.Tensor

    column: torch.Tensor
    """int64"""

    @classmethod
    def empty(cls, like: torch.Tensor) -> MatchedValues:
        """Empty results for the chunks of ``like`` [C]."""
        value, uncommon, discarded = like.new_empty(3, len(like))
        best = like.new_empty(2, len(like))
        return cls(value, uncommon, discarded, best, torch.empty_like(best, dtype=torch.int64))

    @classmethod
    def joined(cls, parts: Sequence[MatchedValues], like: torch.Tensor) -> MatchedValues:
        """Results of slices as those of all chunks of ``like``, as they are where there is one."""
        if len(parts) < 2:
            return parts[0] if parts else cls.empty(like)
        return cls(*(torch.cat(columns, dim=-1) for columns in zip(*parts, strict=True)))


class MatchedTask(NamedTuple):
    """Arguments of an evaluation, by kernels or by torch."""

    student: ModelRows

    teacher: ModelRows

    matching: Matching

    options: MatchedOptions

    rest: RestMasses

    scale: torch.Tensor
    """[C], from ``row_scale``."""

    gradient: torch.Tensor | None

    row_mass: torch.Tensor | None = None
    """[Ts] ``ModelRows.member_mass`` of the student's rows of chunks, where a kernel made it."""
