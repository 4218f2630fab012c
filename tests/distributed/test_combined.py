"""A global batch gives one loss, whatever replicas, shards and microbatches it is spread over."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ext.losses import LossPart, LossPlan, NextTokenLoss, ProjectedKLLoss, reduce_counts
from megatron_ext.losses.multi_teacher import MultiTeacherLossAggregator, TeacherObjective
from megatron_ext.losses.teacher_scores import TeacherText, reduce_scores
from megatron_ext.losses.weighting import LayerGradients
from tests.losses.teacher_pair import known_of, pair_inputs, teacher_labels, teacher_pair
from tests.process_group import run_ranks

PADDING = (7, 1)

HEAD = torch.randn(37, 5, generator=torch.Generator().manual_seed(1))
HIDDEN = torch.randn(4, 8, 5, generator=torch.Generator().manual_seed(2))
"""Logits are HIDDEN times HEAD, so that there is a last layer to measure."""


@dataclass(frozen=True, kw_only=True)
class Result:
    loss: torch.Tensor
    """Of this replica's microbatches."""

    counts: dict[str, int]
    grad: torch.Tensor
    """[Vp, D] of the head, of this replica."""

    weights: dict[str, list[float]]
    norms: dict[str, float]


def run(
    microbatches: list[slice], *, rank: int = 0, ranks: int = 1, tp: Any = None, dp: Any = None
) -> Result:
    """One global batch of which this replica has some microbatches."""
    pair = teacher_pair()
    objective = ProjectedKLLoss(temperature=1.5)
    losses = MultiTeacherLossAggregator(
        teachers={name: TeacherObjective(objective=objective) for name in pair},
        measure="bits_per_byte",
        alpha=0.3,
    )
    shards = {"rank": rank, "ranks": ranks, "group": tp, "padding": PADDING}
    batches = [pair_inputs(pair, rows, **shards) for rows in microbatches]
    weights = {
        measure: _weights(replace(losses, measure=measure), batches, dp)
        for measure in ("bits_per_byte", "entropy", "max_prob")
    }
    ahead = [losses.counts(known_of(batch)) for batch in batches]
    counts = reduce_counts(
        {name: torch.stack([part[name] for part in ahead]).sum() for name in ahead[0]}
        | {"ce": torch.stack([(batch["a"].labels >= 0).sum() for batch in batches]).sum()},
        dp,
    )
    shard = batches[0]["a"].student_shard
    head = torch.zeros(shard.width, HEAD.shape[1])
    head[: shard.valid_width] = HEAD[shard.start : shard.start + shard.valid_width]
    head.requires_grad_()
    head.tensor_model_parallel = True
    gradients = LayerGradients([head], ("kd", "ce"), tp_group=tp, dp_group=dp)
    loss, grad = torch.tensor(0.0), torch.zeros_like(head)
    for rows, batch in zip(microbatches, batches, strict=True):
        logits = HIDDEN[rows] @ head.t()
        inputs = {name: replace(part, student_logits=logits) for name, part in batch.items()}
        ce = LossPart(objective=NextTokenLoss(), inputs=inputs["a"], term="ce", count_name="ce")
        output = LossPlan(
            parts={"ce": ce, **losses(inputs, weights=weights["bits_per_byte"])},
            term_weights={"kd": 0.8, "ce": 0.3},
        ).outputs()
        gradients.add(output.terms(counts))
        total = output.total(counts)
        grad += torch.autograd.grad(total, head)[0]
        loss += total.detach()
    return Result(
        loss=loss,
        counts={name: int(count) for name, count in counts.items()},
        grad=grad[: shard.valid_width],
        weights={measure: value.tolist() for measure, value in weights.items()},
        norms=gradients.norms(),
    )


def _weights(losses: MultiTeacherLossAggregator, batches: list[Any], dp: Any) -> torch.Tensor:
    totals = [
        losses.scores(
            {
                name: TeacherText(
                    targets=part.teacher,
                    labels=teacher_labels(part),
                    byte_counts=torch.full((len(part.labels),), 21),
                )
                for name, part in batch.items()
            }
        )
        for batch in batches
    ]
    return losses.weights(reduce_scores(torch.stack(totals).sum(dim=0), dp))


def on_four_ranks(rank: int) -> Result:
    """Replicas with one and three samples, one and two microbatches, 5 and 15 chunks."""
    groups: dict[str, Any] = {}
    for kind, members in (("tp", ([0, 1], [2, 3])), ("dp", ([0, 2], [1, 3]))):
        for ranks in members:
            group = dist.new_group(ranks)
            if rank in ranks:
                groups[kind] = group
    microbatches = [[slice(0, 1)], [slice(1, 3), slice(3, 4)]][rank // 2]
    return run(microbatches, rank=rank % 2, ranks=2, **groups)


@pytest.fixture(scope="module")
def whole() -> Result:
    return run([slice(0, 4)])


@pytest.fixture(scope="module")
def ranks() -> list[Result]:
    return run_ranks(4, on_four_ranks)


def test_replicas_with_different_chunks_add_up_to_the_whole(
    whole: Result, ranks: list[Result]
) -> None:
    assert whole.counts == {"kd/a": 16, "kd/b": 4, "ce": 24}
    assert all(result.counts == whole.counts for result in ranks)
    for shard in range(2):
        loss = ranks[shard].loss + ranks[2 + shard].loss
        torch.testing.assert_close(loss, whole.loss, rtol=1e-6, atol=0)
    grads = [ranks[shard].grad + ranks[2 + shard].grad for shard in range(2)]
    scale = whole.grad.abs().max().item()
    torch.testing.assert_close(torch.cat(grads), whole.grad, rtol=0, atol=1e-6 * scale)


def test_dynamic_weights_and_norms_are_the_same_on_every_rank_and_of_the_whole(
    whole: Result, ranks: list[Result]
) -> None:
    for result in ranks:
        assert result.norms == pytest.approx(whole.norms, rel=1e-6)
        assert result.weights == ranks[0].weights
        for measure, weights in whole.weights.items():
            assert result.weights[measure] == pytest.approx(weights, rel=1e-6)
    assert len({tuple(weights) for weights in whole.weights.values()}) == 3
