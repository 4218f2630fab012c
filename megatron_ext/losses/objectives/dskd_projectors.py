"""Linear maps between the hidden states of two models. Ds Dt hidden, Vp local columns, N common."""

from __future__ import annotations

import math

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum, group_size
from megatron_ext.distributed.vocab_parallel import VocabShard, row_slices
from megatron_ext.errors import LossError
from megatron_ext.losses.inputs.vocabulary_match import VocabularyMatch


class DskdProjectors(torch.nn.Module):
    """The two maps of DSKD, replicated over the tensor-parallel group.

    Parameters are fp32 and start from a seed, so that every rank has the same ones, and their
    gradients are complete on every rank: a trainer reduces them over data-parallel replicas alone.
    """

    def __init__(self, *, student_hidden: int, teacher_hidden: int, seed: int = 0) -> None:
        super().__init__()
        self.student_hidden = student_hidden
        self.teacher_hidden = teacher_hidden
        generator = torch.Generator().manual_seed(seed)
        self.teacher_to_student = _random(student_hidden, teacher_hidden, generator)
        """[Ds, Dt]"""
        self.student_to_teacher: torch.nn.Parameter | None
        self.student_to_teacher = _random(teacher_hidden, student_hidden, generator)
        """[Dt, Ds]; None where it follows from the heads."""
        # Of the frozen teacher, from which a resumed run makes them again.
        self.matched_rows: torch.Tensor | None
        self.inverse_gram: torch.Tensor | None
        self.register_buffer("matched_rows", None, persistent=False)
        self.register_buffer("inverse_gram", None, persistent=False)

    @classmethod
    @torch.no_grad()
    def from_heads(
        cls,
        student_head_weight: torch.Tensor,
        teacher_head_weight: torch.Tensor,
        match: VocabularyMatch,
        *,
        student_shard: VocabShard,
        teacher_shard: VocabShard,
    ) -> DskdProjectors:
        """DSKDv2's maps, by pseudo-inverses of the heads' rows of common tokens.

        With ``E_s`` [N, Ds] and ``E_t`` [N, Dt] the rows of common tokens,
        ``E_s A = E_t`` in least squares for ``A = pinv(E_s) E_t``, the start of
        ``teacher_to_student``: its image of a teacher's state has, under the student's head, the
        logits that the state has under the teacher's. ``E_t B = E_s`` likewise; B is no parameter
        but follows the student's head as it learns.

        Collectives, once: all-reduces of [V', Dt] slices over the student's vocabulary, of [Ds, Ds]
        and of [Ds, Dt], [Dt, Dt]. Keeps [Vps, Dt] in the teacher's dtype.

        Raises:
            LossError: No token in common.
        """
        if not len(match.common_student):
            raise LossError(
                "projectors from heads need tokens that both vocabularies have",
                got="no token in common",
                fix="make DskdProjectors from a seed instead",
            )
        made = cls(
            student_hidden=student_head_weight.shape[1],
            teacher_hidden=teacher_head_weight.shape[1],
        ).to(student_head_weight.device)
        rows = _matched_rows(teacher_head_weight, match, student_shard, teacher_shard)
        is_common = torch.zeros(
            max(student_shard.vocab_size, student_shard.stop),
            dtype=torch.bool,
            device=rows.device,
        )
        is_common[match.common_student] = True
        is_common = is_common[student_shard.start : student_shard.stop]
        group = student_shard.group
        own = student_head_weight.double().masked_fill(~is_common[:, None], 0.0)
        student_gram = all_reduce_sum(own.t() @ own, group)
        cross = all_reduce_sum(own.t() @ rows.double(), group)
        teacher_gram = all_reduce_sum(rows.double().t() @ rows.double(), group)
        start = torch.linalg.pinv(student_gram, hermitian=True) @ cross
        made.teacher_to_student.copy_(start)
        made.student_to_teacher = None
        made.matched_rows = rows
        made.inverse_gram = torch.linalg.pinv(teacher_gram, hermitian=True).float()
        return made

    def to_teacher_weight(
        self, student_head_weight: torch.Tensor, shard: VocabShard
    ) -> torch.Tensor:
        """[Dt, Ds]: the parameter, or B of ``from_heads``: one all-reduce of [Dt, Ds], no graph."""
        if self.student_to_teacher is not None:
            return self.student_to_teacher
        assert self.matched_rows is not None
        assert self.inverse_gram is not None
        with torch.no_grad():
            dtype = self.teacher_to_student.dtype
            local = self.matched_rows.to(dtype).t() @ student_head_weight.to(dtype)
            return self.inverse_gram.to(dtype) @ all_reduce_sum(local, shard.group)


def _random(rows: int, columns: int, generator: torch.Generator) -> torch.nn.Parameter:
    values = torch.randn(rows, columns, generator=generator) / math.sqrt(columns)
    return torch.nn.Parameter(values)


def _matched_rows(
    teacher_head_weight: torch.Tensor,
    match: VocabularyMatch,
    student_shard: VocabShard,
    teacher_shard: VocabShard,
) -> torch.Tensor:
    """[Vps, Dt]: the teacher's head row of what each student column matches, 0 for none."""
    group, device = student_shard.group, teacher_head_weight.device
    width, hidden = student_shard.width, teacher_head_weight.shape[1]
    partner = torch.full((width * group_size(group),), -1, dtype=torch.int64, device=device)
    partner[match.common_student] = match.common_teacher
    local = partner - teacher_shard.start
    here = (local >= 0) & (local < teacher_shard.valid_width)
    found = teacher_head_weight.new_zeros(width, hidden)
    for rows in row_slices(len(partner), hidden, device=device):
        part = teacher_head_weight[torch.where(here[rows], local[rows], 0)]
        part = all_reduce_sum(part.masked_fill(~here[rows, None], 0.0), group)
        first = max(rows.start, student_shard.start)
        last = min(rows.stop, student_shard.stop)
        if first < last:
            own = slice(first - student_shard.start, last - student_shard.start)
            found[own] = part[first - rows.start : last - rows.start]
    return found
