"""Objectives from hidden states, tile by tile, give the numbers that they give from logits."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.errors import LossError
from megatron_ext.losses import LOSS_REGISTRY, DistillationInputs
from megatron_ext.losses.linear import LinearDistillation, no_logits
from megatron_ext.losses.objective import Objective
from megatron_ext.teachers.formed_targets import FormedTargets
from megatron_ext.teachers.target_form import TargetForm
from tests.losses.linear.linear_case import (
    Numbers,
    by_logits,
    by_tiles,
    inputs_of_case,
    leaves,
    ordered,
    with_hidden,
)
from tests.losses.microbatch import known_ahead
from tests.losses.objective_cases import CASES, CHOSEN, as_kind
from tests.ops.kernel_case import assert_as_exact

WHOLE_ONLY = {
    name
    for name, case in CASES.items()
    if case.name in ("dskd", "hidden_mse", "hidden_cosine", "sampled_kl")
    or "merge" in case.options
    or case.options.get("alignment") == "position"
}
TILED = [name for name in CHOSEN if name not in WHOLE_ONLY]
WITH_CROSS_ENTROPY = (
    *("projected_kl", "partition_kl", "vocab_kl", "strict_topk", "gold"),
    # These read the row behind a chunk, which can be in the next tile.
    *("alm", "projected_kl with repeats"),
)
SCALES = {"kd": 0.7, "ce": 0.3}


def objectives_of(name: str, *, with_ce: bool = False) -> dict[str, Objective]:
    objectives: dict[str, Objective] = {"kd": CASES[name].objective()}
    if with_ce:
        objectives["ce"] = LOSS_REGISTRY["next_token"]()
    return objectives


def scales_of(objectives: dict[str, Objective]) -> dict[str, float]:
    return {name: SCALES[name] for name in objectives}


def assert_same(got: Numbers, truth: Numbers, tolerance: float = 2e-5) -> None:
    """Sums of tiles are taken in another order: a few units of fp32 rounding of the largest."""
    pairs = [(got.total, truth.total), (got.d_hidden, truth.d_hidden)]
    pairs.append((got.d_weight, truth.d_weight))
    for name, output in truth.outputs.items():
        mine = got.outputs[name]
        assert mine.metrics.keys() == output.metrics.keys()
        assert torch.equal(mine.count, output.count)
        assert not mine.loss_sum.requires_grad
        pairs.append((mine.loss_sum, output.loss_sum))
        if output.chunk_loss is not None:
            pairs.append((mine.chunk_loss, output.chunk_loss))
        for metric, (total, count) in output.metrics.items():
            pairs.append((mine.metrics[metric][0], total))
            assert torch.equal(mine.metrics[metric][1], count), metric
    for one, other in pairs:
        scale = float(other.detach().abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * max(scale, 1e-3))


@pytest.mark.parametrize("name", TILED)
def test_every_objective_that_is_a_sum_over_chunks_has_its_numbers(name: str) -> None:
    inputs = inputs_of_case(CASES[name])
    objectives = objectives_of(name)
    truth = by_logits(objectives, scales_of(objectives), inputs)
    assert truth.d_weight.any()
    assert_same(by_tiles(objectives, scales_of(objectives), inputs, 3), truth)


@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize("name", WITH_CROSS_ENTROPY)
def test_tiles_of_any_size_with_cross_entropy(name: str, rows: int) -> None:
    inputs = inputs_of_case(CASES[name])
    objectives = objectives_of(name, with_ce=True)
    truth = by_logits(objectives, SCALES, inputs)
    assert_same(by_tiles(objectives, SCALES, inputs, rows), truth)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("projected_kl", "logits"),
        ("partition_kl", "topk"),
        ("strict_topk", "topk"),
        ("vocab_kl reverse", "topk"),
        ("alm without debiasing", "label"),
        ("alm", "label"),
    ],
)
def test_the_teacher_can_be_given_as_targets(name: str, kind: Any) -> None:
    inputs = inputs_of_case(CASES[name], kind=kind)
    inputs = as_kind(inputs, kind, 5)
    objectives = objectives_of(name, with_ce=True)
    truth = by_logits(objectives, SCALES, inputs)
    assert_same(by_tiles(objectives, SCALES, inputs, 4), truth)


def test_a_teacher_caps_its_logits_in_either_form() -> None:
    inputs = inputs_of_case(CASES["vocab_kl"])
    teacher = replace(inputs.teacher, logit_cap=2.0)
    expected = 2 * torch.tanh(teacher.hidden @ teacher.head_weight.t() / 2)
    torch.testing.assert_close(teacher.to_logits(), expected)
    assert not torch.allclose(inputs.teacher.to_logits(), expected, atol=0.1)
    inputs, objectives = replace(inputs, teacher=teacher), objectives_of("vocab_kl")
    truth = by_logits(objectives, scales_of(objectives), inputs)
    assert_same(by_tiles(objectives, scales_of(objectives), inputs, 3), truth)
    size, capped = teacher.shard.vocab_size, replace(teacher, kind="logits", logits=expected)
    form = TargetForm(kind="topk", precision="fp32", count=3, vocab_size=size)
    sent, whole = (
        FormedTargets(form=form, tile_rows=5)(each, inputs.teacher_labels)
        for each in (teacher, replace(capped, hidden=None, head_weight=None, logit_cap=None))
    )
    torch.testing.assert_close(sent, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["projected_kl", "partition_kl", "vocab_kl"])
def test_lower_precision_is_no_further_from_the_truth_than_logits(
    name: str, dtype: torch.dtype
) -> None:
    inputs = inputs_of_case(CASES[name], dtype=dtype)
    objectives = objectives_of(name, with_ce=True)
    got = by_tiles(objectives, SCALES, inputs, 4)
    same = by_logits(objectives, SCALES, inputs)
    truth = by_logits(objectives, SCALES, in_double(inputs))
    for part in ("total", "d_hidden", "d_weight"):
        one, other, exact = (getattr(numbers, part) for numbers in (got, same, truth))
        # Two gradients of a tile's logits are added before they meet the head, not after.
        assert_as_exact(one, other, exact, slack=torch.finfo(dtype).eps)


def in_double(inputs: DistillationInputs) -> DistillationInputs:
    hidden, weight = (leaf.detach().double().requires_grad_() for leaf in leaves(inputs))
    teacher = inputs.teacher
    teacher = replace(
        teacher, hidden=teacher.hidden.double(), head_weight=teacher.head_weight.double()
    )
    return replace(inputs, student_hidden=hidden, student_head_weight=weight, teacher=teacher)


@pytest.mark.parametrize("name", ["projected_kl", "partition_kl", "vocab_kl", "next_token"])
def test_kernels_write_the_gradient_over_a_tile(name: str) -> None:
    pytest.importorskip("triton")
    inputs = inputs_of_case(CASES[name], batch=1)
    objectives = objectives_of(name, with_ce=name != "next_token")
    truth = by_logits(objectives, scales_of(objectives), inputs)
    kernels = {part: replace(each, implementation="triton") for part, each in objectives.items()}
    assert_same(by_tiles(kernels, scales_of(objectives), inputs, 4), truth)


def test_a_chunk_mask_leaves_chunks_out() -> None:
    inputs = inputs_of_case(CASES["projected_kl"])
    mask = torch.arange(inputs.alignment.chunk_count) % 3 != 0
    inputs = replace(inputs, chunk_mask=mask, chunk_script=mask.to(torch.int8))
    objectives = objectives_of("projected_kl", with_ce=True)
    assert_same(by_tiles(objectives, SCALES, inputs, 4), by_logits(objectives, SCALES, inputs))


def test_one_microbatch_equals_eight() -> None:
    case = CASES["projected_kl"]
    batch = ordered(case.batch(batch=8))
    objectives = objectives_of("projected_kl", with_ce=True)
    whole = with_hidden(case.build(batch, (3, 3)))
    hidden, weight = leaves(whole)
    truth = by_tiles(objectives, SCALES, whole, 7)
    parts = []
    for sample in range(8):
        rows = slice(sample, sample + 1)
        inputs = case.build(batch.samples(rows), (3, 3))
        own = hidden.detach()[rows].requires_grad_()
        teacher = replace(whole.teacher, hidden=whole.teacher.hidden[rows])
        inputs = replace(inputs, student_hidden=own, student_head_weight=weight, teacher=teacher)
        parts.append(by_tiles(objectives, SCALES, inputs, 7))
    torch.testing.assert_close(sum(part.total for part in parts), truth.total)
    torch.testing.assert_close(torch.cat([part.d_hidden for part in parts]), truth.d_hidden)
    torch.testing.assert_close(sum(part.d_weight for part in parts), truth.d_weight)


@pytest.mark.parametrize("name", WITH_CROSS_ENTROPY)
def test_a_microbatch_without_chunks_and_labels_gives_zero_with_a_graph(name: str) -> None:
    case = CASES[name]
    inputs = with_hidden(case.build(case.batch().without_work(), (3, 3)))
    objectives = objectives_of(name, with_ce=True)
    got = by_tiles(objectives, SCALES, inputs, 4)
    assert got.total == 0
    assert not got.d_hidden.any()
    assert not got.d_weight.any()
    truth = by_logits(objectives, SCALES, inputs)
    for part, output in truth.outputs.items():
        assert got.outputs[part].metrics.keys() == output.metrics.keys()


def test_without_grad_mode_there_are_numbers_and_no_graph() -> None:
    inputs = inputs_of_case(CASES["projected_kl"])
    objectives = objectives_of("projected_kl", with_ce=True)
    form = LinearDistillation(objectives=objectives, tile_rows=4)
    tiles = form.tiles(known_ahead(inputs))
    hidden, _ = leaves(inputs)
    whole = replace(inputs, student_logits=no_logits(hidden, inputs.student_shard))
    with torch.no_grad():
        output = form(whole, tiles, SCALES)
    assert not output.total.requires_grad
    truth = by_logits(objectives, SCALES, inputs)
    torch.testing.assert_close(output.total, truth.total)


@pytest.mark.parametrize("name", sorted(WHOLE_ONLY))
def test_what_needs_more_than_its_own_rows_is_refused(name: str) -> None:
    with pytest.raises(LossError, match="no linear form"):
        LinearDistillation(objectives=objectives_of(name))


def test_nemo_numerics_are_refused() -> None:
    objective = LOSS_REGISTRY["projected_kl"](numerics="nemo")
    with pytest.raises(LossError, match="whole microbatch"):
        LinearDistillation(objectives={"kd": objective})


def test_missing_parts_are_refused() -> None:
    inputs = inputs_of_case(CASES["projected_kl"])
    form = LinearDistillation(objectives=objectives_of("projected_kl"))
    tiles = form.tiles(known_ahead(inputs))
    with pytest.raises(LossError, match="no student_hidden"):
        form(replace(inputs, student_hidden=None), tiles, {"kd": 1.0})
    with pytest.raises(LossError, match="scales"):
        form(inputs, tiles, {"ce": 1.0})
    with pytest.raises(LossError, match="needs an objective"):
        LinearDistillation(objectives={})
