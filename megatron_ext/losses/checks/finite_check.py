"""Whether logits hold NaN or infinities: an error on every rank, and no wait in the hot path.

B batch, T tokens, Vp local columns.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.distributed.shard_collectives import all_reduce_max
from megatron_ext.distributed.vocab_parallel import VocabShard, row_slices
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs

_SIDES: Final = ("student", "teacher")


class FiniteCheck(NamedTuple):
    """What was found in one microbatch, on the device until somebody asks."""

    bad: torch.Tensor
    """int32 [2], the same on every rank of the group: whether the student's and the teacher's
    numbers are bad on any rank."""

    def merged(self, other: FiniteCheck) -> FiniteCheck:
        """Of both microbatches; for one question a step."""
        return FiniteCheck(torch.maximum(self.bad, other.bad))

    def raise_if_bad(self, *, where: str | None = None) -> None:
        """Wait for the device and raise, on every rank alike.

        Args:
            where: Which microbatch or iteration it was.

        Raises:
            LossError: A number was bad.
        """
        sides = [side for side, bad in zip(_SIDES, self.bad.tolist(), strict=True) if bad]
        if sides:
            raise LossError(
                f"the {' and the '.join(sides)}'s predictions hold NaN or infinity",
                got="at least one on at least one rank",
                expected="finite logits; -inf is allowed for masked tokens",
                fix="look for a learning rate that is too high, or a broken checkpoint",
                where=where,
            )


def check_finite(inputs: DistillationInputs) -> FiniteCheck:
    """Look at everything that an objective reads, in one pass and one all-reduce of two flags.

    NaN and +inf are bad; -inf masks a token. Rows without a label and of no chunk, and padding, are
    not looked at. Nothing waits for the device; ``FiniteCheck.raise_if_bad`` does, once a step if
    asked so. Every rank calls this for every microbatch, whatever it holds.

    Collectives: one all-reduce of int32 [2] over the student's group.
    """
    alignment, teacher = inputs.alignment, inputs.teacher
    rows = inputs.labels != IGNORE_INDEX
    if alignment is not None:
        rows = rows | (alignment.student_chunk_id != NO_CHUNK)
    device = inputs.student_logits.device
    bad = torch.zeros(2, dtype=torch.int32, device=device)
    bad[0] = _is_bad(inputs.student_logits, rows, inputs.student_shard)
    if teacher is not None:
        teacher_rows = torch.ones(teacher.positions, dtype=torch.bool, device=device)
        if alignment is not None:
            teacher_rows = alignment.teacher_chunk_id != NO_CHUNK
        for tensor in (teacher.logits, teacher.hidden, teacher.topk_logits):
            if tensor is not None:
                shard = teacher.shard if tensor is teacher.logits else None
                bad[1] |= _is_bad(tensor, teacher_rows, shard)
        for vector in (teacher.log_normaliser, teacher.label_log_probs):
            if vector is not None:
                bad[1] |= _is_bad(vector[..., None], teacher_rows, None)
    return FiniteCheck(all_reduce_max(bad, inputs.student_shard.group))


def _is_bad(values: torch.Tensor, rows: torch.Tensor, shard: VocabShard | None) -> torch.Tensor:
    """int32 scalar: whether a used row [.., V] of ``values`` has NaN or +inf."""
    flat, used = values.detach().flatten(0, 1), rows.flatten()
    found = torch.zeros((), dtype=torch.bool, device=values.device)
    width = flat.shape[-1] if shard is None else shard.valid_width
    for part in row_slices(*flat.shape, device=values.device):
        seen = flat[part, :width]
        bad = (seen.isnan() | (seen == torch.inf)).any(dim=-1)
        found |= (bad & used[part]).any()
    return found.to(torch.int32)
