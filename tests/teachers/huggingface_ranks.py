"""What spawned ranks run: a HuggingFace teacher that ranks share rows of."""

import torch
import torch.distributed as dist

from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.teachers.causal_lm import load_causal_lm
from megatron_ext.teachers.huggingface_teacher import HuggingFaceTeacher
from tests.teachers.tiny_causal_lms import VOCAB_SIZE, packed_rows, some_texts

WIDTH = 104
"""Columns of all ranks, padding included."""


def microbatches():
    """Three, so that one of two ranks has more of them; not all as long."""
    texts = some_texts(7, 5, 12, 9, 3, 16)
    return [
        packed_rows([texts[:2], texts[2:3]], 16),
        packed_rows([texts[3:5], texts[5:]], 16),
        packed_rows([texts[4:5], texts[1:2]], 8),
    ]


def share_rows(rank, folders):
    """For each model and microbatch this rank's columns of whole rows, and its part of rows."""
    group = dist.group.WORLD
    assert group is not None
    width = WIDTH // 2
    half = VocabShard(
        start=rank * width, stop=(rank + 1) * width, vocab_size=VOCAB_SIZE, group=group
    )
    whole = VocabShard(start=0, stop=WIDTH, vocab_size=VOCAB_SIZE)
    context = ContextRank.of(group)
    assert context is not None
    found = []
    for folder in folders:
        model = load_causal_lm(folder, dtype=torch.float32, device=torch.device("cpu"))
        tensor_parallel = HuggingFaceTeacher(model, shard=half, group=group)
        context_parallel = HuggingFaceTeacher(model, shard=whole, group=group, context=context)
        cut = [
            batch._replace(
                tokens=context.cut(batch.tokens), position_ids=context.cut(batch.position_ids)
            )
            for batch in microbatches()
        ]
        both = zip(
            tensor_parallel.targets(microbatches()), context_parallel.targets(cut), strict=True
        )
        found.append([(one.to_logits(), other.to_logits()) for one, other in both])
    return found
