import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.errors import LossError
from megatron_ext.losses import (
    CombinedOutput,
    DistillationInputs,
    LossOutput,
    LossPlan,
    NextTokenLoss,
    Objective,
    ProjectedKLLoss,
    TeacherTargets,
)
from megatron_ext.losses.base import KnownAhead
from megatron_ext.losses.multi_teacher import MultiTeacherLossAggregator, TeacherObjective
from megatron_ext.losses.teacher_scores import TeacherText
from tests.losses.microbatch import Microbatch
from tests.losses.objective_cases import CASES
from tests.losses.teacher_pair import known_of, pair_inputs, teacher_labels, teacher_pair

WEIGHTS = {"a": 0.5, "b": 2.0}


def aggregator(
    weights: dict[str, float] | None = None, **options: Any
) -> MultiTeacherLossAggregator:
    objective = ProjectedKLLoss(temperature=1.5)
    return MultiTeacherLossAggregator(
        teachers={
            name: TeacherObjective(objective=objective, weight=weight)
            for name, weight in (weights or {"a": 1.0, "b": 1.0}).items()
        },
        **options,
    )


def combined(parts: Any) -> CombinedOutput:
    return LossPlan(parts=parts, term_weights={"kd": 1.0}).outputs()


def test_a_sum_divides_each_teachers_sum_by_its_own_count() -> None:
    inputs = pair_inputs(teacher_pair())
    output = combined(aggregator(WEIGHTS)(inputs))
    counts = output.counts()
    assert {name: int(count) for name, count in counts.items()} == {"kd/a": 16, "kd/b": 4}
    alone = {name: ProjectedKLLoss(temperature=1.5)(part).loss_sum for name, part in inputs.items()}
    expected = 0.5 * alone["a"].item() / 16 + 2.0 * alone["b"].item() / 4
    assert output.total(counts).item() == pytest.approx(expected, rel=1e-6)
    metrics = output.metrics()
    assert metrics["kd/b/weight"][0].item() == 2.0
    assert int(metrics["kd/b/teacher_entropy"][1]) == 4


@pytest.mark.parametrize("mode", ["sum", "select_teacher"])
def test_the_loss_and_its_gradient_do_not_change_with_the_split_into_microbatches(
    mode: str,
) -> None:
    pair, losses = teacher_pair(), aggregator(mode=mode)

    def run(parts: list[slice]) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
        batches = [pair_inputs(pair, rows) for rows in parts]
        if mode == "select_teacher":
            batches = [selected(losses, batch) for batch in batches]
        ahead = [losses.counts(known_of(batch)) for batch in batches]
        counts = {name: sum(int(part[name]) for part in ahead) for name in ahead[0]}
        total, grads = torch.tensor(0.0), []
        for batch in batches:
            output = combined(losses(batch))
            loss = output.total(counts)
            grads.append(torch.autograd.grad(loss, batch["a"].student_logits)[0])
            total = total + loss.detach()
        return total, torch.cat(grads), counts

    whole = run([slice(0, 4)])
    split = run([slice(0, 1), slice(1, 2), slice(2, 4)])
    assert whole[2] == split[2]
    torch.testing.assert_close(split[0], whole[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(split[1], whole[1], rtol=0, atol=1e-7)


def text_of(inputs: Any, byte_counts: list[int]) -> TeacherText:
    return TeacherText(
        targets=inputs.teacher,
        labels=teacher_labels(inputs),
        byte_counts=torch.tensor(byte_counts[: len(inputs.labels)]),
    )


def selected(losses: MultiTeacherLossAggregator, inputs: Any) -> Any:
    texts = {name: text_of(part, [21] * 4) for name, part in inputs.items()}
    known = losses.selected(known_of(inputs), losses.select(texts))
    return {name: replace(part, chunk_mask=known[name].chunk_mask) for name, part in inputs.items()}


def test_each_sample_is_learned_from_the_teacher_with_fewest_bits_per_byte() -> None:
    inputs = pair_inputs(teacher_pair())
    losses = aggregator(mode="select_teacher")
    labels = {name: teacher_labels(part) for name, part in inputs.items()}
    bits = []
    for name, part in inputs.items():
        log_probs = part.teacher.logits.double().log_softmax(-1)
        picked = log_probs.gather(-1, labels[name].clamp(min=0)[..., None])[..., 0]
        bits.append(-torch.where(labels[name] >= 0, picked, 0.0).sum(-1))
    best = torch.stack(bits).argmin(dim=0)
    assert len(set(best.tolist())) == 2
    texts = {name: text_of(part, [21] * 4) for name, part in inputs.items()}
    assert torch.equal(losses.select(texts), best)
    masks = {name: part.chunk_mask for name, part in selected(losses, inputs).items()}
    for index, (name, mask) in enumerate(masks.items()):
        alignment = inputs[name].alignment
        assert torch.equal(mask, best[alignment.sample] == index)


def test_a_better_teacher_of_shorter_text_wins_by_bytes_not_by_tokens() -> None:
    inputs = pair_inputs(teacher_pair())
    losses = aggregator(mode="select_teacher")
    # The same nats over ever more bytes: the second teacher becomes the better one.
    for bytes_of_b, best in (([1] * 4, 0), ([10**6] * 4, 1)):
        texts = {"a": text_of(inputs["a"], [100] * 4), "b": text_of(inputs["b"], bytes_of_b)}
        assert losses.select(texts).tolist() == [best] * 4


def test_labels_of_samples_that_went_to_another_teacher_are_left_out() -> None:
    teachers = {
        "a": TeacherObjective(objective=NextTokenLoss()),
        "b": TeacherObjective(objective=ProjectedKLLoss()),
    }
    losses = MultiTeacherLossAggregator(teachers=teachers, mode="select_teacher")
    inputs = pair_inputs(teacher_pair())
    known = losses.selected(known_of(inputs), torch.tensor([0, 1, 1, 0]))
    assert known["a"].chunk_mask is None
    assert (known["a"].labels[1:3] == IGNORE_INDEX).all()
    assert torch.equal(known["a"].labels[[0, 3]], inputs["a"].labels[[0, 3]])
    # Six labels of each of two samples, and sample 2 has three chunks with the other teacher.
    assert {name: int(count) for name, count in losses.counts(known).items()} == {"kd": 15}


def test_packed_labels_belong_to_the_samples_of_their_bounds() -> None:
    inputs = Microbatch.random(batch=1, lengths=(8, 8)).inputs()
    alignment = replace(
        inputs.alignment,
        student_cu_seqlens=torch.tensor([0, 3, 3, 8], dtype=torch.int32),
        teacher_cu_seqlens=torch.tensor([0, 3, 3, 8], dtype=torch.int32),
    )
    losses = MultiTeacherLossAggregator(
        teachers={"a": TeacherObjective(objective=NextTokenLoss())}, mode="select_teacher"
    )
    known = {"a": KnownAhead(labels=torch.arange(8)[None], alignment=alignment)}
    chosen = losses.selected(known, torch.tensor([1, 0, 0]))
    assert chosen["a"].labels.tolist() == [[IGNORE_INDEX] * 3 + [3, 4, 5, 6, 7]]


def test_dynamic_weights_replace_the_static_ones() -> None:
    inputs = pair_inputs(teacher_pair())
    losses = aggregator(WEIGHTS, measure="bits_per_byte", alpha=0.7)
    texts = {name: text_of(part, [21] * 4) for name, part in inputs.items()}
    totals = losses.scores(texts)
    assert totals[:, 1].tolist() == [84, 84]
    weights = losses.weights(totals)
    bits = totals[:, 0] / (84 * math.log(2))
    torch.testing.assert_close(
        weights.double(), torch.softmax(-0.7 * bits, dim=0), rtol=1e-6, atol=0
    )
    parts = losses(inputs, weights=weights)
    assert [part.weight for part in parts.values()] == weights.tolist()
    with pytest.raises(LossError, match="follow their scores and were not given"):
        losses(inputs)


@pytest.mark.parametrize(("normalisation", "ratio"), [("log_vocab", -1), ("nemo", 1)])
def test_vocabulary_normalisation_weighs_by_logarithms_of_sizes(
    normalisation: str, ratio: int
) -> None:
    inputs = pair_inputs(teacher_pair(), padding=(3, 2))
    parts = aggregator(WEIGHTS, vocab_normalisation=normalisation)(inputs)
    factor = (math.log(29) / math.log(23)) ** ratio
    assert parts["kd/a"].weight == pytest.approx(0.5)
    assert parts["kd/b"].weight == pytest.approx(2.0 * factor)


def _same_tokenizer_pair(batch: Microbatch) -> dict[str, Any]:
    inputs = replace(batch.inputs(), projection=None, alignment=None)
    generator = torch.Generator().manual_seed(3)
    other = TeacherTargets(
        kind="logits",
        shard=inputs.teacher.shard,
        logits=torch.randn(inputs.student_logits.shape, generator=generator),
    )
    return {"a": inputs, "b": replace(inputs, teacher=other)}


class _KeepTeacher(Objective):
    """An objective that hands out what it is given."""

    sums_over = "tokens"

    def compute(self, inputs: DistillationInputs) -> LossOutput:
        self.teacher = inputs.teacher
        return NextTokenLoss()(inputs)


def test_averaged_logits_are_a_convex_average_and_one_part() -> None:
    inputs = _same_tokenizer_pair(Microbatch.random(vocabs=(23, 23), lengths=(8, 8)))
    keep = _KeepTeacher()
    teachers = {
        name: TeacherObjective(objective=keep, weight=weight) for name, weight in WEIGHTS.items()
    }
    losses = MultiTeacherLossAggregator(teachers=teachers, mode="averaged_logits")
    parts = losses(inputs)
    assert list(parts) == ["kd/average"]
    expected = (0.5 * inputs["a"].teacher.logits + 2 * inputs["b"].teacher.logits) / 2.5
    assert int(combined(parts).outputs["kd/average"].count) == 18
    torch.testing.assert_close(keep.teacher.logits, expected)
    known = {name: KnownAhead(labels=part.labels) for name, part in inputs.items()}
    counts = losses.counts(known)
    assert {name: int(count) for name, count in counts.items()} == {"kd/average": 18}


def test_a_teacher_without_weight_does_not_touch_the_average() -> None:
    inputs = _same_tokenizer_pair(Microbatch.random(vocabs=(23, 23), lengths=(8, 8)))
    inputs["b"].teacher.logits.fill_(-torch.inf)
    keep = _KeepTeacher()
    teachers = {
        name: TeacherObjective(objective=keep, weight=weight)
        for name, weight in (("a", 2.0), ("b", 0.0))
    }
    combined(MultiTeacherLossAggregator(teachers=teachers, mode="averaged_logits")(inputs))
    assert torch.equal(keep.teacher.logits, inputs["a"].teacher.logits)


def test_logits_of_other_tokenizers_are_refused_and_never_summed_instead() -> None:
    inputs = pair_inputs(teacher_pair())
    with pytest.raises(
        LossError, match=r"teacher 'a': .* own tokenizer; got 23 tokens at .* and a projection"
    ):
        aggregator(mode="averaged_logits")(inputs)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a negative weight": ({"weights": {"a": -1.0}}, "weight cannot be used"),
    "no positive weight": ({"weights": {"a": 0.0}}, "no teacher has a weight above 0"),
    "an unknown mode": ({"mode": "mean"}, "unknown mode .* got 'mean'; expected one of sum"),
    "a measure outside of sum": (
        {"mode": "select_teacher", "measure": "entropy"},
        "are of the mode 'sum'; got mode 'select_teacher', measure 'entropy'",
    ),
    "weights in a selection": (
        {"mode": "select_teacher", "weights": WEIGHTS},
        "chooses by bits per byte and has no weights",
    ),
    "an infinite alpha": ({"measure": "entropy", "alpha": math.inf}, "alpha must be"),
}


@pytest.mark.parametrize("name", BAD)
def test_options_that_mean_nothing_are_refused(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(LossError, match=message):
        aggregator(**options)


def test_several_objectives_for_averaged_logits_are_refused() -> None:
    teachers = {
        "a": TeacherObjective(objective=ProjectedKLLoss()),
        "b": TeacherObjective(objective=ProjectedKLLoss(temperature=2.0)),
    }
    with pytest.raises(LossError, match="compared by one objective"):
        MultiTeacherLossAggregator(teachers=teachers, mode="averaged_logits")


def test_no_teacher_and_inputs_of_other_teachers_are_refused() -> None:
    with pytest.raises(LossError, match="no teacher to learn from"):
        MultiTeacherLossAggregator(teachers={})
    with pytest.raises(LossError, match="other teachers; got a; expected a, b"):
        aggregator()({"a": pair_inputs(teacher_pair())["a"]})


def test_teachers_that_agree_with_the_student_leave_nothing_to_learn() -> None:
    batch = CASES["projected_kl"].same()
    inputs = batch.inputs()
    output = combined(aggregator(WEIGHTS)({"a": inputs, "b": inputs}))
    loss = output.total(output.counts())
    (grad,) = torch.autograd.grad(loss, inputs.student_logits)
    assert abs(loss.item()) < 1e-6
    assert grad.abs().max().item() < 1e-7
