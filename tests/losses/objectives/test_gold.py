"""GOLD and hybrid KL against dense torch in fp64, their metrics, and what they refuse."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from megatron_ext.errors import LossError
from megatron_ext.losses import LOSS_REGISTRY, GoldLoss, HybridKLLoss, LossOutput, VocabularyMatch
from megatron_ext.ops.divergence import Divergence
from megatron_ext.ops.matched_divergence import matched_divergence_reference
from megatron_ext.ops.model_rows import chunk_mean_softmax_reference
from megatron_ext.ops.sorted_l1 import sorted_l1_reference
from megatron_ext.projection.sparse_projection import SparseProjection
from tests.losses.microbatch import Microbatch
from tests.losses.objective_cases import CASES

COMMON = torch.arange(0, 23, 2)
"""The match of ``Microbatch``: these student tokens, and the same teacher tokens backwards."""


def without(columns: torch.Tensor, width: int) -> torch.Tensor:
    kept = torch.ones(width, dtype=torch.bool)
    kept[columns] = False
    return kept


def truth(
    batch: Microbatch, *, temperature: float, direction: str, weight: float, largest: int | None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Sums over the chunks, and the gradient of ``loss``."""
    alignment = batch.alignment()
    student = batch.student_logits.double().requires_grad_()
    sides = (
        (student, alignment.student_chunk_id),
        (batch.teacher_logits.double(), alignment.teacher_chunk_id),
    )
    q, p = (
        chunk_mean_softmax_reference(
            logits.flatten(0, 1), ids.flatten(), alignment.chunk_count, temperature=temperature
        )
        for logits, ids in sides
    )
    kl = matched_divergence_reference(
        q, p, common_student=COMMON, common_teacher=COMMON.flip(0), direction=direction
    )
    uncommon = q[:, without(COMMON, 37)], p[:, without(COMMON, 23)]
    l1 = sorted_l1_reference(*uncommon, largest=largest)
    loss = temperature**2 * (kl + weight * l1).sum()
    (grad,) = torch.autograd.grad(loss, student)
    sums = {"loss": loss, "kl_common": kl.sum(), "l1_uncommon": l1.sum()}
    sums["student_uncommon_mass"] = uncommon[0].sum()
    sums["teacher_uncommon_mass"] = uncommon[1].sum()
    return {name: value.detach() for name, value in sums.items()}, grad


def run(objective: Any, inputs: Any) -> tuple[LossOutput, torch.Tensor]:
    output = objective(inputs)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
    return output, grad


@pytest.mark.parametrize("name", ["gold", "hybrid_kl"])
@pytest.mark.parametrize("largest", [None, 5])
@pytest.mark.parametrize("direction", get_args(Divergence))
def test_the_registered_objective_is_dense_torch_over_the_flattened_batch(
    direction: Divergence, largest: int | None, name: str
) -> None:
    batch = Microbatch.random()
    objective = LOSS_REGISTRY[name](
        temperature=1.5, direction=direction, uncommon_weight=0.7, uncommon_topk=largest
    )
    output, grad = run(objective, batch.inputs(padding=(3, 1)))
    sums, true_grad = truth(
        batch, temperature=1.5, direction=direction, weight=0.7, largest=largest
    )
    assert output.loss_sum.item() == pytest.approx(sums.pop("loss").item(), rel=1e-6)
    assert int(output.count) == 12
    for metric, value in sums.items():
        total, count = output.metrics[metric]
        assert total.item() == pytest.approx(value.item(), rel=1e-6)
        assert int(count) == 12
    scale = true_grad.abs().max().item()
    torch.testing.assert_close(grad[..., :37].double(), true_grad, rtol=0, atol=2e-6 * scale)


def test_what_the_sorted_part_leaves_out_is_in_the_metrics() -> None:
    inputs = Microbatch.random().inputs()
    exact = GoldLoss(uncommon_topk=None)(inputs).metrics
    cut = GoldLoss(uncommon_topk=2)(inputs).metrics
    assert exact["discarded_mass"][0].item() == 0
    missing = (exact["l1_uncommon"][0] - cut["l1_uncommon"][0]).item()
    assert 0 < missing <= cut["discarded_mass"][0].item()


@pytest.mark.parametrize("name", ["gold", "hybrid_kl"])
def test_two_models_that_agree_have_a_gradient_with_the_original_numerics(name: str) -> None:
    match = VocabularyMatch(common_student=COMMON, common_teacher=COMMON)
    inputs = replace(CASES[name].same().inputs(), match=match)
    _, biased = run(LOSS_REGISTRY[name](numerics="nemo"), inputs)
    assert biased.abs().max().item() > 1e-2


def test_a_match_without_uncommon_tokens_is_a_divergence_alone() -> None:
    batch = Microbatch.random(vocabs=(23, 23))
    everything = torch.arange(23)
    match = VocabularyMatch(common_student=everything, common_teacher=everything)
    output = GoldLoss()(replace(batch.inputs(), match=match))
    assert output.metrics["l1_uncommon"][0].item() == 0
    assert output.loss_sum.item() == pytest.approx(output.metrics["kl_common"][0].item())


def test_the_relaxed_match_makes_a_common_token_of_a_large_share() -> None:
    projection = SparseProjection.from_entries(
        [0, 1, 1, 2, 2], [0, 1, 2, 2, 3], [1.0, 0.7, 0.3, 0.55, 0.45], (3, 4)
    )
    exact, relaxed = (
        VocabularyMatch.from_partition(projection.partition(share))
        for share in (None, HybridKLLoss().min_share)
    )
    assert exact.common_student.tolist() == [0]
    assert relaxed.common_student.tolist() == [0, 1]
    np.testing.assert_array_equal(relaxed.common_teacher, [0, 1])


BAD_MATCHES: dict[str, tuple[VocabularyMatch | None, str]] = {
    "none": (
        None,
        "objective gold needs to know which tokens both vocabularies have; got no match",
    ),
    "two lengths": (
        VocabularyMatch(common_student=COMMON, common_teacher=COMMON[1:]),
        "got 12 student and 11 teacher tokens; expected equally many",
    ),
    "of larger vocabularies": (
        VocabularyMatch(common_student=torch.arange(24), common_teacher=torch.arange(24)),
        "got 24 student and 24 teacher tokens; expected equally many, at most 23",
    ),
}


@pytest.mark.parametrize("name", BAD_MATCHES)
def test_a_match_that_does_not_fit_is_refused(name: str) -> None:
    match, message = BAD_MATCHES[name]
    with pytest.raises(LossError, match=message):
        GoldLoss()(replace(Microbatch.random().inputs(), match=match))


@pytest.mark.parametrize("part", ["teacher", "alignment"])
def test_a_missing_part_is_named(part: str) -> None:
    inputs = replace(Microbatch.random().inputs(), **{part: None})
    with pytest.raises(LossError, match=f"objective hybrid_kl needs .*got no {part}"):
        HybridKLLoss()(inputs)


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": 0.0}, "temperature of hybrid_kl must be positive"),
    "direction": ({"direction": "both"}, "got 'both'; expected one of forward, reverse"),
    "numerics": ({"numerics": "exact"}, "got 'exact'; expected one of proper, nemo"),
    "places": ({"uncommon_topk": 0}, "uncommon_topk of the objective hybrid_kl compares nothing"),
    "weight": ({"uncommon_weight": -1.0}, "must not be negative; got -1.0"),
    "share": ({"min_share": 0.0}, "min_share .* is not a share; got 0.0"),
    "mixture": (
        {"numerics": "nemo", "direction": "jensen_shannon"},
        "nemo numerics of the objective hybrid_kl have no such direction",
    ),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options_that_mean_nothing_are_refused(name: str) -> None:
    options, message = BAD_OPTIONS[name]
    with pytest.raises(LossError, match=message):
        HybridKLLoss(**options)
