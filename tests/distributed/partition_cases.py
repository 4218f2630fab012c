"""Partition KL and a learned projection on one rank, for ``sharded_cases.py``."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from megatron_ext.distributed import vocab_parallel
from megatron_ext.losses import DistillationInputs, PartitionKLLoss, ProjectedKLLoss, TargetKind
from megatron_ext.losses.learned_projection import LearnedProjection
from megatron_ext.projection import SparseProjection
from tests.losses.microbatch import Microbatch, csr_arrays
from tests.losses.objective_cases import as_kind, with_completions

PADDING = (15, 5)

Case = Callable[[int, int, Any], tuple[list[torch.Tensor], torch.Tensor]]


def completed(batch: Microbatch, inputs: DistillationInputs) -> DistillationInputs:
    """One rank's inputs with the match and the completions of the batch."""
    whole = with_completions(batch, PADDING)
    return replace(inputs, match=whole.match, completions=whole.completions)


def partition(
    *,
    chunks: int = 4,
    kind: TargetKind = "logits",
    slice_elements: int | None = None,
    **options: Any,
) -> Case:
    """``partition_kl`` with completions."""

    def run(rank: int, ranks: int, group: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        batch = Microbatch.random(chunks=chunks)
        inputs = batch.inputs(rank=rank, ranks=ranks, group=group, padding=PADDING)
        inputs = completed(batch, inputs)
        if kind == "topk":
            top = as_kind(batch.inputs(), kind, top_k=9).teacher
            inputs = replace(inputs, teacher=replace(top, shard=inputs.teacher.shard))
        elements = slice_elements or vocab_parallel.SLICE_ELEMENTS["cpu"]
        with patch.dict(vocab_parallel.SLICE_ELEMENTS, cpu=elements):
            output = PartitionKLLoss(**options)(inputs)
            (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
        pairs = [part for pair in output.metrics.values() for part in pair]
        return [output.loss_sum.detach(), output.count, *pairs], grad

    return run


def learned_projection(
    rank: int, ranks: int, group: Any
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The gradient of the shares, which every rank has whole, and of the logits."""
    batch = Microbatch.random()
    inputs = batch.inputs(rank=rank, ranks=ranks, group=group, padding=PADDING)
    module = LearnedProjection(
        SparseProjection(*csr_arrays(batch.projection), (37, 23)),
        student_shard=inputs.student_shard,
        teacher_shard=inputs.teacher.shard,
    )
    loss = ProjectedKLLoss()(replace(inputs, projection=module())).loss_sum
    grad, shares = torch.autograd.grad(loss, (inputs.student_logits, module.logits))
    return [loss.detach(), shares], grad


CASES: dict[str, Case] = {
    "partition KL": partition(temperature=1.4),
    "reverse partition KL": partition(direction="reverse", chain_weight=0.5),
    "Jensen-Shannon partition KL": partition(direction="jensen_shannon"),
    "partition KL in slices": partition(slice_elements=60),
    "partition KL without chunks": partition(chunks=0),
    "partition KL to top-k targets": partition(kind="topk"),
    "learned projection": learned_projection,
}
