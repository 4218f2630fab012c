"""Which columns of two vocabularies stand for the same token. Vps Vpt local columns."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard


class Matching(NamedTuple):
    """This rank's columns."""

    student_column: torch.Tensor
    """int64 [Vpt]: the global student column that each teacher column matches, -1 for none."""

    is_common: torch.Tensor
    """bool [Vps]: student columns that have a match."""

    with_rest: bool
    """Compare the masses outside too. Otherwise both sides are normalised over the matched
    columns."""

    pairs_cross: bool = True
    """Whether a pair can lie on two ranks; the same on every rank."""

    def members(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of either side whose mass is summed: of two masses that add up to 1, the one
        that a difference would lose."""
        teacher_common = self.student_column >= 0
        if self.with_rest:
            return ~self.is_common, ~teacher_common
        return self.is_common, teacher_common

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
        """int32 [Vps]: this rank's teacher column of each pair, -1 for none. If pairs cross, 0 for
        any."""
        if self.pairs_cross and student.group is not None:
            return self.is_common.int() - 1
        count = len(self.student_column)
        own = torch.arange(count, dtype=torch.int32, device=self.is_common.device)
        place = torch.where(
            self.student_column >= 0, self.student_column - student.start, student.width
        )
        # Columns without a match are written beyond the end, where nothing reads them.
        found = own.new_full((student.width + 1,), -1).index_copy_(0, place, own)
        return found[: student.width]
