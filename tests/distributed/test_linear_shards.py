"""The linear form of a sharded head is that of a whole one, on every rank alike."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed.shard_collectives import copy_to_shards
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.losses import LOSS_REGISTRY, DistillationInputs, TeacherTargets
from megatron_ext.losses.linear import LinearDistillation, no_logits
from megatron_ext.losses.objective import Objective
from tests.distributed.sharded_inputs import completed, repeating, with_boundaries
from tests.losses.linear.linear_case import ordered
from tests.losses.microbatch import Microbatch, known_ahead
from tests.losses.objective_cases import table_of
from tests.process_group import run_ranks

PADDING = (15, 5)
"""37 + 15 student columns: the second of two shards has padding at its end."""

HIDDEN = 6
SCALES = {"kd": 0.7, "ce": 0.3}
NAMES = ("projected_kl", "partition_kl", "vocab_kl", "strict_topk", "next_token", "alm", "repeats")

Result = dict[str, tuple[list[torch.Tensor], torch.Tensor]]
"""Name -> (what is replicated, the gradient of this rank's head rows)."""


def both_sizes(rank: int) -> tuple[Result, Result]:
    """Unsharded on this rank alone, and on both ranks."""
    return every_case(0, 1, None), every_case(rank, 2, dist.group.WORLD)


def every_case(rank: int, ranks: int, group: Any) -> Result:
    return {name: _case(name, rank, ranks, group) for name in NAMES}


def _case(name: str, rank: int, ranks: int, group: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    batch, padding = ordered(Microbatch.random()), PADDING
    if name == "vocab_kl":
        batch = ordered(Microbatch.random(vocabs=(37, 37), lengths=(8, 8)))
    inputs = batch.inputs(rank=rank, ranks=ranks, group=group, padding=padding)
    inputs = repeating(batch, inputs) if name == "repeats" else completed(batch, inputs)
    if name == "alm":
        inputs = with_boundaries(batch, inputs)
    hidden, weight = _student(inputs)
    inputs = replace(
        inputs,
        student_hidden=copy_to_shards(hidden, group),
        student_head_weight=weight,
        student_logits=no_logits(hidden, inputs.student_shard),
        teacher=_teacher(inputs),
    )
    objectives: dict[str, Objective] = {"ce": LOSS_REGISTRY["next_token"]()}
    if name == "repeats":
        objectives["kd"] = LOSS_REGISTRY["projected_kl"](repeat_weight=1.0)
    elif name != "next_token":
        objectives["kd"] = LOSS_REGISTRY[name]()
    form = LinearDistillation(objectives=objectives, tile_rows=5)
    tiles = form.tiles(known_ahead(inputs), table_of(inputs))
    output = form(inputs, tiles, {part: SCALES[part] for part in objectives})
    d_hidden, d_weight = torch.autograd.grad(output.total, [hidden, weight])
    sums = [part.loss_sum for part in output.parts.values()]
    return [output.total.detach(), *sums, d_hidden], d_weight


def _student(inputs: DistillationInputs) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = _normal(1, *inputs.labels.shape, HIDDEN).requires_grad_()
    return hidden, _head(2, inputs.student_shard).requires_grad_()


def _teacher(inputs: DistillationInputs) -> TeacherTargets:
    shard = inputs.teacher.shard
    states = _normal(3, *inputs.teacher.positions, HIDDEN)
    return TeacherTargets(kind="hidden", shard=shard, hidden=states, head_weight=_head(4, shard))


def _head(seed: int, shard: VocabShard) -> torch.Tensor:
    """This rank's rows of a head whose padding holds huge rows."""
    rows = _normal(seed, 64, HIDDEN)
    rows[shard.vocab_size :] = 30.0
    return rows[shard.start : shard.stop].clone()


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def ranks() -> list[tuple[Result, Result]]:
    return run_ranks(2, both_sizes)


@pytest.mark.parametrize("name", NAMES)
def test_shards_reproduce_the_unsharded_loss_and_gradients(
    name: str, ranks: list[tuple[Result, Result]]
) -> None:
    truth, true_weight = ranks[0][0][name]
    for _, sharded in ranks:
        for value, true_value in zip(sharded[name][0], truth, strict=True):
            # Sums over shards are taken in another order: a few units of fp32 rounding.
            torch.testing.assert_close(value, true_value, rtol=1e-5, atol=1e-6)
    one, other = (sharded[name][0] for _, sharded in ranks)
    assert all(map(torch.equal, one, other)), "other bits on the other rank"
    weight = torch.cat([sharded[name][1] for _, sharded in ranks])
    scale = float(true_weight.abs().max())
    torch.testing.assert_close(weight[: len(true_weight)], true_weight, rtol=0, atol=2e-6 * scale)
    assert (weight[len(true_weight) :] == 0).all()
