from __future__ import annotations

import dataclasses

import pytest

from megatron_ext.errors import ConfigError, UnknownNameError
from megatron_ext.losses import (
    LOSS_REGISTRY,
    AlmLoss,
    DskdLoss,
    DskdProjectors,
    Needs,
    Objective,
    ProjectedKLLoss,
    StrictTopKLoss,
)
from megatron_ext.training.config import LossConfig
from megatron_ext.training.objective import make_objective


def test_options_and_temperature_reach_the_objective():
    loss = LossConfig(objective="strict_topk", options={"top_k": 8, "tail": "renormalise"})
    assert make_objective(loss) == StrictTopKLoss(top_k=8, tail="renormalise", temperature=1.0)
    warm = dataclasses.replace(loss, temperature=1.5)
    assert make_objective(warm) == StrictTopKLoss(top_k=8, tail="renormalise", temperature=1.5)


def test_without_a_temperature_an_objective_keeps_its_own():
    alm = make_objective(LossConfig(objective="alm"))
    assert isinstance(alm, AlmLoss)
    assert alm.temperature == 5.0


def test_a_temperature_means_nothing_without_a_teacher():
    make_objective(LossConfig(objective="next_token", temperature=2.0))


@pytest.mark.parametrize("name", sorted(LOSS_REGISTRY))
def test_every_objective_is_made_without_options(name):
    assert isinstance(make_objective(LossConfig(objective=name)), LOSS_REGISTRY[name])


@pytest.mark.parametrize(
    ("objective", "options", "complaint"),
    [
        pytest.param(
            "projected_kl",
            {"vocab_topkk": 8},
            r"loss\.options\.vocab_topkk: unknown configuration key; .*did you mean 'vocab_topk'\?",
            id="unknown",
        ),
        pytest.param(
            "projected_kl",
            {"vocab_topk": "many"},
            r"loss\.options\.vocab_topk: a value has the wrong type; got 'many'; expected int",
            id="type",
        ),
        pytest.param(
            "gold",
            {"direction": "sideways"},
            r"loss\.options\.direction: .*expected one of forward, reverse, jensen_shannon",
            id="choice",
        ),
        pytest.param("mined", {"mixture": 2.0}, r"loss\.options: .*mixture", id="value"),
        pytest.param(
            "dskd",
            {"projectors": "tails"},
            r"loss\.options\.projectors: .*got 'tails'; expected one of random, heads",
            id="projectors",
        ),
        pytest.param("next_token", {"top_k": 8}, r"loss\.options\.top_k: unknown", id="none"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(objective, options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_objective(LossConfig(objective=objective, options=options))


def test_a_temperature_that_is_given_twice_is_refused():
    loss = LossConfig(objective="gold", options={"temperature": 2.0}, temperature=1.0)
    with pytest.raises(ConfigError, match=r"given twice; got 2\.0"):
        make_objective(loss)


def test_an_unknown_objective_is_refused():
    with pytest.raises(UnknownNameError, match="did you mean 'projected_kl'"):
        make_objective(LossConfig(objective="projected_lk"))


def test_projectors_are_those_that_are_given():
    projectors = DskdProjectors(student_hidden=3, teacher_hidden=5)
    dskd = make_objective(LossConfig(objective="dskd", options={"projectors": "heads"}), projectors)
    assert isinstance(dskd, DskdLoss)
    assert dskd.projectors is projectors


def test_an_objective_needs_what_its_options_make_it_read():
    assert AlmLoss().needs.boundary
    assert not AlmLoss(debias=False).needs.boundary
    assert AlmLoss(debias=False, merge="words").needs.boundary
    hybrid = make_objective(LossConfig(objective="hybrid_kl", options={"min_share": 0.8}))
    assert hybrid.needs == Needs(projection="retokenized", match=True, min_share=0.8)
    assert make_objective(LossConfig(objective="gold")).needs.min_share is None
    assert ProjectedKLLoss().needs == Needs(projection="retokenized", shard=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Added(Objective):
    """An objective of a user's own."""

    name = "added"

    strength: float = 1.0

    def compute(self, inputs):
        raise NotImplementedError


def test_an_objective_that_is_added_has_its_options_and_all_that_it_may_read(monkeypatch):
    monkeypatch.setattr(LOSS_REGISTRY, "_rows", dict(LOSS_REGISTRY._rows))
    LOSS_REGISTRY.register("added", _Added)
    added = make_objective(LossConfig(objective="added", options={"strength": 2.0}))
    assert added == _Added(strength=2.0)
    assert added.needs == Needs(projection="retokenized", shard=True, match=True)
    assert added.target_forms == ("hidden",)


def test_objectives_over_labels_are_known():
    assert make_objective(LossConfig(objective="vocab_kl")).sums_over == "tokens"
    assert (
        make_objective(LossConfig(objective="uld", options={"alignment": "position"})).sums_over
        == "tokens"
    )
    assert make_objective(LossConfig(objective="uld")).sums_over == "chunks"
