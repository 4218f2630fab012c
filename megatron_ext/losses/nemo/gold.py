"""GOLD and H-KL with the numerics of NeMo RL's x_token. T rows, Vps Vpt columns, C chunks.

Source: NVIDIA-NeMo/RL at 7ea279a, ``nemo_rl/algorithms`` (x_token loss), by its behaviour. Kept for
comparison; ``docs/losses.md`` says what is wrong with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_ext.distributed.shard_collectives import group_size, sum_over_shards
from megatron_ext.distributed.vocab_parallel import log_softmax, row_slices, vocab_argmax
from megatron_ext.losses.base import DistillationInputs, LossOutput
from megatron_ext.losses.diagnostics import chunk_output
from megatron_ext.losses.inputs.matched_columns import MatchedColumns
from megatron_ext.losses.nemo.chunk_means import chunk_means
from megatron_ext.ops.matched_divergence import onto_student_columns
from megatron_ext.ops.sorted_l1 import sorted_l1

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron_ext.losses.inputs.targets import TeacherTargets


def nemo_gold(
    inputs: DistillationInputs,
    teacher: TeacherTargets,
    columns: MatchedColumns,
    *,
    temperature: float,
    is_reverse: bool,
    uncommon_weight: float,
    uncommon_topk: int | None,
) -> LossOutput:
    """``tau^2 * sum_c ( KL_c + w L1_c )``.

        A_c, B_c  means of log_softmax over student and teacher rows, not normalised again
        KL_c      sum over common tokens of exp(B) (B - A);  reverse: exp(A) (A - B)
        L1_c      sum of |sort(exp A) - sort(exp B)| over uncommon tokens, the largest
                  min(|U_s|, |U_t|, ``uncommon_topk``) of each

    The original divides by the chunks of the microbatch; here the count is returned beside the sum.
    Neither part is of distributions: ``KL_c`` can be negative and is not least where both are
    equal, where its gradient is not 0 either.

    Metrics: ``kl_common``, ``l1_uncommon``, ``top1_agreement`` over common tokens. Plain autograd
    keeps fp32 [Ts, Vps] and several [C, Vps]. Collectives: forward nine all-reduces of vectors
    and, a slice of chunks, one reduce-scatter of [C', Vs] and one all-gather; backward one
    all-reduce of [Ts].
    """
    alignment = inputs.alignment
    assert alignment is not None
    shard, count = inputs.student_shard, alignment.chunk_count
    student = chunk_means(
        log_softmax(inputs.student_logits.flatten(0, 1), shard, temperature=temperature),
        alignment.student_chunk_id.flatten(),
        count,
    )
    with torch.no_grad():
        log_p = log_softmax(
            teacher.to_logits().flatten(0, 1), teacher.shard, temperature=temperature
        )
        log_p = chunk_means(log_p, alignment.teacher_chunk_id.flatten(), count).to(student.dtype)
        moved = _moved(log_p, columns.student_column, shard.width, shard.group)

    common = columns.student_common
    log_q = torch.where(common, student, 0.0)
    terms = log_q.exp() * (log_q - moved) if is_reverse else moved.exp() * (moved - log_q)
    kl = sum_over_shards(torch.where(common, terms, 0.0).sum(dim=-1), shard.group)
    l1 = sorted_l1(
        student.exp(),
        log_p.exp(),
        student_excluded=columns.student_matched(shard),
        teacher_excluded=columns.teacher_matched(teacher.shard),
        largest=_places(columns, uncommon_topk),
        group=shard.group,
    ).value
    tops = [
        vocab_argmax(side.detach().masked_fill(~common, -torch.inf), shard)
        for side in (student, moved)
    ]
    return chunk_output(
        inputs,
        temperature**2 * (kl + uncommon_weight * l1),
        means={"kl_common": kl, "l1_uncommon": l1, "top1_agreement": tops[0] == tops[1]},
    )


def _places(columns: MatchedColumns, uncommon_topk: int | None) -> int:
    """Uncommon tokens that both sides have, and at most ``uncommon_topk``."""
    both = min(columns.student_rest, columns.teacher_rest)
    return both if uncommon_topk is None else min(both, uncommon_topk)


def _moved(
    values: torch.Tensor, student_column: torch.Tensor, width: int, group: ProcessGroup | None
) -> torch.Tensor:
    """``values`` [C, Vpt] of matched columns in the student's columns [C, width]."""
    out = values.new_empty(values.shape[0], width)
    for rows in row_slices(values.shape[0], width * group_size(group), device=values.device):
        out[rows] = onto_student_columns(values[rows], student_column, width, group)
    return out
