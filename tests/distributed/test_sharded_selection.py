"""What kernels select over three shards, one of padding alone, and the likelihoods of tokens are
those of torch on one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ext.losses import LOSS_REGISTRY, LossOutput
from megatron_ext.losses.vocabulary_match import BoundaryColumns
from tests.losses.microbatch import Microbatch
from tests.process_group import run_ranks

pytest.importorskip("triton")

PADDING = (20, 13)
"""37 + 20 student columns in three shards of 19, 23 + 13 teacher columns in three of 12."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "uld": ("uld", {"top_u": 5, "temperature": 1.4}),
    "gold": ("gold", {"uncommon_topk": 4, "uncommon_weight": 0.7}),
    "strict_topk": ("strict_topk", {"top_k": 5}),
    "alm": ("alm", {}),
    "strict_topk renormalised": ("strict_topk", {"top_k": 5, "tail": "renormalise"}),
    "reverse gold": ("gold", {"uncommon_topk": 20, "direction": "reverse", "temperature": 1.4}),
}


def sharded(
    rank: int, ranks: int = 3, implementation: str = "triton"
) -> dict[str, tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Sums and this rank's columns of the gradient; without ranks, of all columns."""
    group = dist.group.WORLD if ranks > 1 else None
    found = {}
    for name, (objective, options) in CASES.items():
        batch = Microbatch.random(batch=2, lengths=(5, 4), chunks=3)
        inputs = batch.inputs(rank=rank, ranks=ranks, group=group, padding=PADDING)
        boundary = BoundaryColumns.of_ids(
            [2, 30],
            [0, 4, 20],
            student_shard=inputs.student_shard,
            teacher_shard=inputs.teacher.shard,
        )
        inputs = replace(inputs, boundary=boundary)
        output = LOSS_REGISTRY[objective](implementation=implementation, **options)(inputs)
        (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
        found[name] = (_sums(output), grad)
    return found


def _sums(output: LossOutput) -> dict[str, torch.Tensor]:
    sums = {name: total for name, (total, _) in output.metrics.items()}
    return sums | {"loss": output.loss_sum.detach()}


def test_kernels_over_shards_are_torch_on_one_rank() -> None:
    truth = sharded(0, ranks=1, implementation="torch")
    ranks = run_ranks(3, sharded, timeout_s=300)
    for name, (sums, grad) in truth.items():
        for rank in ranks:
            torch.testing.assert_close(rank[name][0], sums, rtol=2e-6, atol=1e-6)
            # To the bit: ranks that went apart would drift.
            torch.testing.assert_close(rank[name][0], ranks[0][name][0], rtol=0, atol=0)
        together = torch.cat([rank[name][1] for rank in ranks], dim=-1)
        scale = grad.abs().max().item()
        assert scale > 0, "chunks of one token a side and of several"
        torch.testing.assert_close(together, grad, rtol=0, atol=2e-6 * scale)
