from dataclasses import replace
from typing import Any

import pytest
import torch

import megatron_ext
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.errors import LossError, UnknownNameError
from megatron_ext.losses import LOSS_REGISTRY, NextTokenLoss, ProjectedKLLoss
from megatron_ext.losses.base import KnownAhead
from megatron_ext.losses.nemo_rl import CrossTokenizerDistillationLossFn, objective_of
from megatron_ext.losses.nemo_rl_config import CrossTokenizerLossConfig, TeacherLossConfig
from megatron_ext.losses.weighting import FixedWeighting, MatchedWeighting
from tests.losses.microbatch import Microbatch, known_ahead
from tests.losses.objective_cases import CASES, ObjectiveCase, table_of
from tests.losses.teacher_pair import known_of, pair_inputs, teacher_pair

FIXED = {"dynamic_loss_scaling": False, "kl_loss_weight": 0.8, "ce_loss_scale": 0.3}

TEACHERS: list[dict[str, Any]] = [
    {"name": "a", "projection_matrix_path": "a.safetensors", "weight": 0.5},
    {"name": "b", "projection_matrix_path": "b.safetensors", "weight": 2.0},
]


def test_the_facade_is_importable_from_the_package() -> None:
    assert megatron_ext.CrossTokenizerDistillationLossFn is CrossTokenizerDistillationLossFn
    assert megatron_ext.MultiTeacherLossAggregator is not None


PLAIN = {"temperature": 1.0, "direction": "forward", "numerics": "proper"}
EVERY_TOKEN = {"vocab_topk": None, "exact_token_match_only": False}
CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, dict[str, Any]]]] = {
    "projected KL by default": ({}, {}, ("projected_kl", PLAIN | EVERY_TOKEN)),
    "the original's projected KL": (
        {"numerics": "nemo", "reverse_kl": True, "temperature": 2.0},
        {},
        (
            "projected_kl",
            {"temperature": 2.0, "direction": "reverse", "numerics": "nemo"}
            | {"vocab_topk": 8192, "exact_token_match_only": False},
        ),
    ),
    "GOLD": ({"gold_loss": True, "uncommon_topk": 7}, {}, ("gold", PLAIN | {"uncommon_topk": 7})),
    "H-KL for one teacher": (
        {},
        {"gold_loss": True, "xtoken_loss": True},
        ("hybrid_kl", PLAIN | {"uncommon_topk": 8192}),
    ),
    "GOLD for all others": (
        {"gold_loss": True, "vocab_topk": 5, "exact_token_match_only": True},
        {"gold_loss": False},
        ("projected_kl", PLAIN | {"vocab_topk": 5, "exact_token_match_only": True}),
    ),
    "one tokenizer, whatever GOLD says": (
        {"gold_loss": True, "temperature": 1.5},
        {"projection_matrix_path": None},
        ("vocab_kl", {"temperature": 1.5, "direction": "forward"}),
    ),
    "an objective by name": (
        {"temperature": 9.0},
        {"objective": "strict_topk", "options": {"top_k": 3}},
        ("strict_topk", {"top_k": 3}),
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_familiar_keys_choose_an_objective_that_is_registered(name: str) -> None:
    shared, own, expected = CHOICES[name]
    config = CrossTokenizerLossConfig(**shared)
    teacher = TeacherLossConfig(**({"projection_matrix_path": "p"} | own))
    assert objective_of(config, teacher) == expected
    LOSS_REGISTRY[expected[0]](**expected[1])


def test_the_loss_is_that_of_its_parts() -> None:
    inputs = pair_inputs(teacher_pair())
    loss_fn = CrossTokenizerDistillationLossFn({"temperature": 1.5, **FIXED}, TEACHERS)
    output = loss_fn(inputs["a"], inputs)
    known = known_of(inputs)
    counts = loss_fn.counts(known["a"], known)
    assert {name: int(count) for name, count in counts.items()} == {"ce": 24, "kd/a": 16, "kd/b": 4}
    assert {name: int(count) for name, count in output.counts().items()} == {
        name: int(count) for name, count in counts.items()
    }
    kd = ProjectedKLLoss(temperature=1.5)
    sums = {name: kd(part).loss_sum.item() for name, part in inputs.items()}
    ce = NextTokenLoss()(inputs["a"]).loss_sum.item() / 24
    expected = 0.8 * (0.5 * sums["a"] / 16 + 2.0 * sums["b"] / 4) + 0.3 * ce
    assert output.total(counts).item() == pytest.approx(expected, rel=1e-6)
    metrics = output.metrics()
    assert {"ce", "ce/accuracy", "kd/a", "kd/b/top1_agreement", "kd/b/weight"} <= set(metrics)


def test_no_chunk_of_any_teacher_leaves_cross_entropy_with_a_graph() -> None:
    pair = {name: Microbatch.random(chunks=0) for name in ("a", "b")}
    inputs = pair_inputs(pair)
    loss_fn = CrossTokenizerDistillationLossFn(FIXED, TEACHERS)
    counts = loss_fn.counts(known_of(inputs)["a"], known_of(inputs))
    output = loss_fn(inputs["a"], inputs)
    (grad,) = torch.autograd.grad(
        output.terms(counts)["kd"], inputs["a"].student_logits, retain_graph=True
    )
    assert not grad.any()
    ce = output.terms(counts)["ce"].item()
    assert output.total(counts).item() == pytest.approx(0.3 * ce)


def test_dynamic_scaling_follows_what_was_observed_and_resumes_exactly() -> None:
    loss_fns = [CrossTokenizerDistillationLossFn({}, TEACHERS) for _ in range(2)]
    assert isinstance(loss_fns[0].weighting, MatchedWeighting)
    loss_fns[0].observe({"kd": 4.0, "ce": 3.0})
    loss_fns[1].load_state_dict(loss_fns[0].state_dict())
    inputs = pair_inputs(teacher_pair())
    for loss_fn in loss_fns:
        weights = loss_fn(inputs["a"], inputs, step=1).plan.term_weights
        assert weights == {"kd": pytest.approx(0.75), "ce": 1.0}


def test_a_weighting_can_be_given_instead() -> None:
    weighting = FixedWeighting(kd=0.25, ce=0.0)
    loss_fn = CrossTokenizerDistillationLossFn({}, TEACHERS, weighting=weighting)
    inputs = pair_inputs(teacher_pair())
    assert loss_fn(inputs["a"], inputs).plan.term_weights == {"kd": 0.25, "ce": 0.0}


def test_metrics_and_normalisation_have_their_familiar_names() -> None:
    config = {"sum_weights_metric": "ce", "alpha": 0.5, "normalize_teacher_by_vocab": True}
    aggregator = CrossTokenizerDistillationLossFn(config, TEACHERS).aggregator
    assert (aggregator.measure, aggregator.alpha) == ("bits_per_byte", 0.5)
    assert aggregator.vocab_normalisation == "log_vocab"
    original = CrossTokenizerDistillationLossFn(config | {"numerics": "nemo"}, TEACHERS)
    assert original.aggregator.vocab_normalisation == "nemo"


def test_one_tokenizer_teachers_are_counted_by_labels_and_can_be_averaged() -> None:
    teachers = [{"weight": 1.0}, {"weight": 3.0}]
    loss_fn = CrossTokenizerDistillationLossFn(
        {"kd_loss_mode": "averaged_logits", **FIXED}, teachers
    )
    batch = Microbatch.random(vocabs=(23, 23), lengths=(8, 8))
    inputs = replace(batch.inputs(), projection=None, alignment=None)
    both = {"t0": inputs, "t1": inputs}
    known = KnownAhead(labels=inputs.labels)
    counts = loss_fn.counts(known, {"t0": known, "t1": known})
    assert {name: int(count) for name, count in counts.items()} == {"ce": 18, "kd/average": 18}
    output = loss_fn(inputs, both)
    alone = LOSS_REGISTRY["vocab_kl"]()(inputs)
    assert output.terms(counts)["kd"].item() == pytest.approx(alone.loss_sum.item() / 18, rel=1e-6)


BY_CONTENT = ("alm", "dskd", "uld by position")
"""What these leave out also depends on the labels of both sides, or on predictions."""

COUNTED = {name: case for name, case in CASES.items() if not name.startswith(BY_CONTENT)} | {
    "projected_kl of exact chunks": ObjectiveCase(
        name="projected_kl", options={"exact_token_match_only": True}
    )
}


@pytest.mark.parametrize("name", CASES)
def test_what_an_objective_sums_over_follows_from_its_name_and_options(name: str) -> None:
    assert CASES[name].objective().sums_over == CASES[name].over


@pytest.mark.parametrize(
    ("name", "chunks"),
    [(name, "all") for name in COUNTED]
    + [
        (name, chunks)
        for name, case in COUNTED.items()
        for chunks in ("masked", "some unlabelled")
        if case.over == "chunks"
    ],
)
def test_what_an_objective_counts_is_known_ahead(name: str, chunks: str) -> None:
    case = COUNTED[name]
    inputs = case.build(case.batch(), (3, 1))
    if chunks == "masked":
        alignment = replace(inputs.alignment, is_exact=torch.arange(12) % 3 != 0)
        inputs = replace(inputs, alignment=alignment, chunk_mask=torch.arange(12) % 4 != 2)
    if chunks == "some unlabelled":
        is_left_out = inputs.alignment.student_chunk_id % 4 == 1
        inputs = replace(inputs, labels=inputs.labels.masked_fill(is_left_out, IGNORE_INDEX))
    table = table_of(inputs)
    if table is not None:
        labels = inputs.labels, inputs.teacher_labels
        inputs = replace(inputs, completions=table.of_batch(inputs.alignment, *labels))
    count = case.objective().count_ahead(known_ahead(inputs))
    assert int(count) == int(case.objective()(inputs).count) > 0


BAD: dict[str, tuple[Any, Any, str]] = {
    "an unknown key": (
        {"temprature": 1.0},
        TEACHERS,
        r"temprature of CrossTokenizerLossConfig: unknown .* did you mean 'temperature'\?",
    ),
    "a text for a number": ({"temperature": "warm"}, TEACHERS, "got 'warm'; expected float"),
    "no configuration": (None, TEACHERS, "LossConfig: a section is not a mapping; got None"),
    "a teacher that is a name": ({}, ["qwen"], "LossConfig: a section is not a mapping; got 'qw"),
    "teachers by name": ({}, {"qwen": {}}, "in a list; got dict; pass a list with a TeacherLossCo"),
    "an option that the objective lacks": (
        {},
        [{"objective": "alm", "options": {"temprature": 2.0}}],
        "temprature of the objective alm: unknown .* did you mean 'temperature'",
    ),
    "an objective without what it needs": (
        {},
        [{"objective": "dskd"}],
        "the objective dskd: a required .* is missing; expected projectors",
    ),
    "H-KL without GOLD": ({"xtoken_loss": True}, TEACHERS, "xtoken_loss: .* GOLD, which is off"),
    "H-KL without GOLD for one teacher": (
        {"gold_loss": True, "xtoken_loss": True},
        [{"projection_matrix_path": "p", "gold_loss": False}],
        "xtoken_loss of a teacher: .* GOLD, which is off",
    ),
    "a metric outside of sum": (
        {"kd_loss_mode": "averaged_logits", "sum_weights_metric": "ce"},
        TEACHERS,
        "sum_weights_metric: .* got kd_loss_mode 'averaged_logits'; expected kd_loss_mode 'sum'",
    ),
    "normalisation outside of sum": (
        {"kd_loss_mode": "select_teacher", "normalize_teacher_by_vocab": True},
        TEACHERS,
        "normalize_teacher_by_vocab: weighs the teachers of a sum",
    ),
    "no weight to average by": (
        {"kd_loss_mode": "averaged_logits"},
        [{"weight": 0.0}, {"weight": 0.0}],
        "no teacher has a weight above 0",
    ),
    "a negative weight that dynamic scaling does not read": (
        {"kl_loss_weight": -1.0},
        TEACHERS,
        "kl_loss_weight: a weight that cannot be used; got -1.0; expected a finite number, >= 0",
    ),
    "a weight that is not a number": (
        {"ce_loss_scale": float("nan"), "dynamic_loss_scaling": False},
        TEACHERS,
        "ce_loss_scale of CrossTokenizerLossConfig: .*; got nan; expected a finite number",
    ),
    "an unknown mode": ({"kd_loss_mode": "max"}, TEACHERS, "kd_loss_mode of .* one of sum"),
    "one name twice": ({}, [{"name": "a"}, {"name": "a"}], "share a name; got 'a'"),
    "no teacher": ({}, [], "no teacher to learn from"),
    "GOLD for one tokenizer": ({}, [{"gold_loss": True}], "gold_loss: .* another tokenizer"),
    "GOLD beside an objective": (
        {},
        [{"gold_loss": True, "objective": "uld"}],
        "beside the one that is named; got objective 'uld'",
    ),
    "options of nothing": ({}, [{"options": {"top_k": 3}}], "options are of an objective"),
    "exact chunks of GOLD": (
        {"gold_loss": True, "exact_token_match_only": True},
        TEACHERS,
        "exact_token_match_only: restricts projected KL",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_contradictions_are_refused_when_it_is_built(name: str) -> None:
    config, teachers, message = BAD[name]
    with pytest.raises(LossError, match=message):
        CrossTokenizerDistillationLossFn(config, teachers)


def test_an_objective_that_there_is_not_is_named_with_the_choices() -> None:
    with pytest.raises(UnknownNameError, match="got 'glod'; expected one of"):
        CrossTokenizerDistillationLossFn({}, [{"objective": "glod"}])
