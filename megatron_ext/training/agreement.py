"""Whether student and teacher choose the same token, on held-out text. B rows, T positions.

    agreement = #{c in C1 : m(argmax_v z_c(v)) = argmax_w y_c(w)} / #C1

``C1`` are the chunks of one student token and one teacher token, which both models predict after
the same bytes; ``z_c`` and ``y_c`` are the logits that predict them; ``m`` takes a student token to
the teacher's token of the same bytes, or, for control tokens, of the same role or name. A choice
that the other vocabulary lacks agrees with nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from megatron_ext.alignment.alignment import ChunkClass
from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.distributed.context_parallel import ContextRank, in_order
from megatron_ext.distributed.vocab_parallel import VocabShard, vocab_argmax
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.layout import VocabularyLayout
from megatron_ext.tokenizers.base import ByteTokenizer

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
        layout: The order of both heads' rows; None: that of the ids.
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
    """Counts over microbatches against one teacher, on the device."""

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
            student: [B, S] its likeliest columns.
            teacher: [B, S] the teacher's.
            alignment: Of whole rows.
            context: Whose part S of the T positions is; None: rows are whole.

        Collectives: two all-gathers over the ranks that share rows.
        """
        chosen = _whole(student, context)[alignment.student_spans[:, 0]]
        taught = _whole(teacher, context)[alignment.teacher_spans[:, 0]]
        is_single = alignment.chunk_class == ChunkClass.ONE_TO_ONE
        # Columns that pad the vocabulary are never chosen.
        agrees = (self.same_tokens[chosen] == taught) & is_single
        self._counts.append(torch.stack((agrees.sum(), is_single.sum())))

    def share(self, group: dist.ProcessGroup) -> tuple[float | None, int]:
        """The agreement over all replicas, None without a chunk, and the number of chunks.

        Collectives: one all-reduce over ``group``, the replicas. Waits for the device.
        """
        device = self.same_tokens.device
        total = torch.stack(self._counts).sum(0) if self._counts else torch.zeros(2, device=device)
        total = total.to(torch.int64)
        dist.all_reduce(total, group=group)
        agreeing, chunks = total.tolist()
        return (agreeing / chunks if chunks else None), int(chunks)


def _whole(choices: torch.Tensor, context: ContextRank | None) -> torch.Tensor:
    """[B T] of whole rows, one after the other, on every rank that shares them."""
    if context is None:
        return choices.flatten()
    columns = choices.t().contiguous()
    every = [torch.empty_like(columns) for _ in range(context.size)]
    dist.all_gather(every, columns, group=context.group)
    return in_order(torch.cat(every), context.size).t().flatten()
