"""The loss that a run computes is that of its objectives, weighted and divided."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.losses import DistillationInputs, LossOutput, LossPart, LossPlan, NextTokenLoss
from megatron_ext.losses.fused_evaluation import evaluate_together
from megatron_ext.ops.unit_gradient import scale_rows_
from tests.losses.objective_cases import CASES, CHOSEN, as_kind

PADDING = (3, 2)
TERMS = {"kd": 0.7, "ce": 0.3}
COUNTS: dict[str, torch.Tensor | int] = {"kd/a": 11, "kd/b": 0, "ce": torch.tensor(23)}
WITH_TEACHER = [name for name in CHOSEN if CASES[name].kinds]
SWEPT = [
    "vocab_kl",
    "partition_kl",
    "projected_kl",
    "projected_kl on the teacher's top tokens",
    "gold",
    "hybrid_kl",
    "uld",
    "uld by position",
    "strict_topk",
    "alm",
]


def leaf(inputs: DistillationInputs) -> DistillationInputs:
    return replace(inputs, student_logits=inputs.student_logits.detach().clone().requires_grad_())


def parts_of(name: str, inputs: DistillationInputs) -> dict[str, LossPart]:
    """The objective as two teachers, of which one weighs by a tensor, and cross-entropy."""
    objective = CASES[name].objective()
    return {
        "ce": LossPart(objective=NextTokenLoss(), inputs=inputs, term="ce", count_name="ce"),
        "kd/a": LossPart(
            objective=objective,
            inputs=inputs,
            term="kd",
            count_name="kd/a",
            weight=torch.tensor(1.5),
        ),
        "kd/b": LossPart(
            objective=objective, inputs=inputs, term="kd", count_name="kd/b", weight=0.25
        ),
    }


def assert_same(output: LossOutput, expected: LossOutput) -> None:
    assert output.count == expected.count
    torch.testing.assert_close(output.loss_sum.detach(), expected.loss_sum.detach())
    for name, (total, count) in expected.metrics.items():
        torch.testing.assert_close(output.metrics[name][0], total)
        assert output.metrics[name][1] == count


@pytest.mark.parametrize("name", WITH_TEACHER)
@pytest.mark.parametrize("names", [("ce", "kd/a"), ("ce", "kd/a", "kd/b")], ids=["one", "two"])
def test_total_gradient_and_metrics_are_those_of_the_parts(
    name: str, names: tuple[str, ...]
) -> None:
    inputs = leaf(CASES[name].build(CASES[name].batch(), PADDING))
    parts = {part: planned for part, planned in parts_of(name, inputs).items() if part in names}
    found = LossPlan(parts=parts, term_weights=TERMS).loss(COUNTS)
    (gradient,) = torch.autograd.grad(found.total, inputs.student_logits)

    plain = LossPlan(parts=parts, term_weights=TERMS).outputs()
    total = plain.total(COUNTS)
    (expected,) = torch.autograd.grad(total, inputs.student_logits)
    torch.testing.assert_close(found.total, total)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    assert list(found.outputs) == list(names)
    for part in names:
        assert_same(found.outputs[part], plain.outputs[part])


@pytest.mark.parametrize("name", SWEPT)
def test_cross_entropy_is_part_of_the_one_sweep(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def recorded(objectives: Any, *args: Any, **options: Any) -> Any:
        calls.append(list(objectives))
        return evaluate_together(objectives, *args, **options)

    monkeypatch.setattr("megatron_ext.losses.plan.evaluate_together", recorded)
    inputs = leaf(CASES[name].build(CASES[name].batch(), PADDING))
    parts = parts_of(name, inputs)
    del parts["kd/b"]
    LossPlan(parts=parts, term_weights=TERMS).loss(COUNTS)
    assert calls == [["kd/a", "ce"]]


@pytest.mark.parametrize(
    ("name", "ce"),
    # The cross-entropy of weight 0 reads the logits before a gradient alone is written over them.
    [(name, TERMS["ce"]) for name in SWEPT]
    + [(name, 0.0) for name in ("gold", "uld", "vocab_kl", "alm")],
)
def test_in_place_the_gradient_is_where_the_logits_were(name: str, ce: float) -> None:
    inputs = leaf(CASES[name].build(CASES[name].batch(), PADDING))
    parts, weights = parts_of(name, inputs), TERMS | {"ce": ce}
    del parts["kd/b"]
    expected = LossPlan(parts=parts, term_weights=weights).loss(COUNTS)
    (gradient,) = torch.autograd.grad(expected.total, inputs.student_logits)

    whole = inputs.student_logits * 1.0
    place = whole.data_ptr()
    parts = {
        part: replace(planned, inputs=replace(inputs, student_logits=whole))
        for part, planned in parts.items()
    }
    found = LossPlan(parts=parts, term_weights=weights).loss(COUNTS, in_place=True)
    (there,) = torch.autograd.grad(found.total, whole)
    assert there.data_ptr() == place
    assert torch.equal(there, gradient)
    for part, output in expected.outputs.items():
        assert_same(found.outputs[part], output)


@pytest.mark.parametrize("name", ["gold", "uld", "vocab_kl", "alm"])
def test_tiles_have_the_gradient_in_place_of_their_logits(name: str) -> None:
    inputs = CASES[name].build(CASES[name].batch(), PADDING)
    logits = inputs.student_logits.detach().clone()
    inputs = replace(inputs, student_logits=logits)
    objectives = {"kd": CASES[name].objective(), "ce": NextTokenLoss()}
    scales = {"kd": torch.tensor(0.5), "ce": 0.0}
    beside = torch.empty_like(logits.flatten(0, 1))
    expected = evaluate_together(objectives, scales, inputs, gradient=beside)
    place = logits.flatten(0, 1)
    found = evaluate_together(objectives, scales, inputs, gradient=place)
    assert torch.equal(place, beside)
    for part, output in expected.items():
        assert_same(found[part], output)


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("name", ["strict_topk", "vocab_kl reverse"])
def test_a_label_is_one_more_token_beside_those_that_a_teacher_gave(
    name: str, in_place: bool
) -> None:
    inputs = as_kind(CASES[name].build(CASES[name].batch(), PADDING), "topk", top_k=9)
    labels, vocab = inputs.labels.clone(), inputs.student_shard.vocab_size
    # Labels among the tokens that are compared, and apart from them.
    labels[labels >= 0] = torch.arange(int((labels >= 0).sum())) % vocab
    logits = inputs.student_logits.detach()
    inputs = replace(inputs, labels=labels, student_logits=logits)
    objectives = {"kd": CASES[name].objective(), "ce": NextTokenLoss()}
    scales = {"kd": 0.5, "ce": 2.0}
    gradient, alone = torch.zeros_like(logits.flatten(0, 1)), {}
    for part, objective in objectives.items():
        own = torch.empty_like(gradient)
        alone |= evaluate_together({part: objective}, scales, inputs, gradient=own)
        gradient += own
    logits = logits.clone()
    place = logits.flatten(0, 1) if in_place else torch.empty_like(gradient)
    inputs = replace(inputs, student_logits=logits)
    found = evaluate_together(objectives, scales, inputs, gradient=place)
    torch.testing.assert_close(place, gradient, rtol=2e-6, atol=1e-7)
    for part, output in alone.items():
        assert_same(found[part], output)


@pytest.mark.parametrize("name", ["strict_topk", "vocab_kl reverse"])
def test_a_label_beyond_the_vocabulary_is_nan_and_reaches_no_other_row(name: str) -> None:
    inputs = as_kind(CASES[name].build(CASES[name].batch(), PADDING), "topk", top_k=9)
    labels, logits = inputs.labels.clone(), inputs.student_logits.detach()
    row = int((labels.flatten() >= 0).nonzero()[0])
    labels.view(-1)[row] = inputs.student_shard.vocab_size
    inputs = replace(inputs, labels=labels, student_logits=logits)
    gradient = torch.empty_like(logits.flatten(0, 1))
    objectives = {"kd": CASES[name].objective(), "ce": NextTokenLoss()}
    found = evaluate_together(objectives, {"kd": 1.0, "ce": 1.0}, inputs, gradient=gradient)
    assert found["ce"].loss_sum.isnan()
    assert found["kd"].loss_sum.isfinite()
    others = torch.arange(len(gradient)) != row
    assert gradient[others].isfinite().all()


@pytest.mark.parametrize("name", ["projected_kl", "alm", "gold"])
@pytest.mark.parametrize("term", ["ce", "kd"])
def test_a_term_of_weight_0_is_measured_all_the_same(name: str, term: str) -> None:
    inputs = leaf(CASES[name].build(CASES[name].batch(), PADDING))
    parts = parts_of(name, inputs)
    found = LossPlan(parts=parts, term_weights=TERMS | {term: 0.0}).loss(COUNTS)
    for part, planned in parts.items():
        assert_same(found.outputs[part], planned.objective(planned.inputs))


@pytest.mark.parametrize("name", ["gold", "uld", "projected_kl", "vocab_kl", "mined"])
def test_a_gradient_of_the_expected_scale_is_not_scaled_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors: list[torch.Tensor] = []

    def record(gradient: torch.Tensor, scale: torch.Tensor, *_: object) -> torch.Tensor:
        factors.append(scale.clone())
        return scale_rows_(gradient, scale)

    monkeypatch.setattr("megatron_ext.ops.unit_gradient.scale_rows_", record)
    inputs = leaf(CASES[name].build(CASES[name].batch(), PADDING))
    parts = {"kd/a": parts_of(name, inputs)["kd/a"]}
    LossPlan(parts=parts, term_weights=TERMS).loss(COUNTS).total.backward()
    for factor in factors:
        assert set(factor.tolist()) <= {0.0, 1.0}
