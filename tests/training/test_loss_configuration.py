"""Objectives, teachers, weights and forms of the loss as a configuration names them."""

from dataclasses import dataclass, replace

import pytest
import torch

from megatron_ext.distributed.layout import Layout
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import ConfigError, UnknownNameError
from megatron_ext.losses import (
    LOSS_REGISTRY,
    AlmLoss,
    DskdProjectors,
    GradientMagnitudeWeighting,
    MatchedWeighting,
    Needs,
    Objective,
    ProjectedKLLoss,
    ScheduledWeighting,
    StateProjectors,
    StrictTopKLoss,
)
from megatron_ext.losses.objective import ModelPair
from megatron_ext.training.configuration.config import DistillConfig, LossConfig
from megatron_ext.training.objective import (
    make_objective,
    next_token_beside,
    teacher_objective,
    with_projectors,
)
from megatron_ext.training.run_folder import _check_same_run, config_values
from megatron_ext.training.run_loss import (
    check_loss,
    make_weighting,
    with_linear_form,
    with_vocabulary_layout,
)
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.typed_mapping import build_config
from tests.data.readers import student_tokenizer, teacher_tokenizer

MODEL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
TEACHER = {"tokenizer": {}, "model": MODEL, "checkpoint": "c"}


def config_of(**changes):
    values = {
        "run_dir": "r",
        "tokenizer": {},
        "student": MODEL,
        "data": {"train": ["x"]},
        "training": {"train_iters": 5},
        "teachers": {"big": TEACHER, "small": TEACHER},
    }
    return build_config(DistillConfig, values | changes, ".".join)


def check(config):
    teachers = {
        name: teacher_tokenizer() if teacher.ema_decay is None else student_tokenizer()
        for name, teacher in config.named_teachers.items()
    }
    check_loss(config, student_tokenizer(), teachers)


def objective(name, temperature=None, **options):
    return make_objective(LossConfig(objective=name, options=options, temperature=temperature))


def weighting(loss):
    config = config_of(loss=loss)
    return make_weighting(config.loss, train_iters=config.training.train_iters)


def test_teachers_are_sections_by_name_or_a_list_with_names():
    named = config_of()
    listed = config_of(teachers=[{"name": "big", **TEACHER}, {"name": "small", **TEACHER}])
    assert named == listed
    assert list(named.named_teachers) == ["big", "small"]
    assert list(config_of(teacher=TEACHER, teachers={}).named_teachers) == ["teacher"]


def test_a_written_configuration_is_read_as_it_was():
    config = config_of()
    assert build_config(DistillConfig, config_values(config), ".".join) == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teachers": [{"name": "a", **TEACHER}, {"name": "a", **TEACHER}]}, "no names of their"),
        ({"teachers": [TEACHER]}, "no names of their own; got None"),
        ({"teachers": {"a/b": TEACHER}}, "cannot be called so; got 'a/b'"),
        ({"teachers": {"average": TEACHER}}, "cannot be called so"),
        ({"teachers": {"a": TEACHER | {"weight": -1.0}}}, "teachers.a: a teacher's weight"),
        ({"teachers": {"a": TEACHER | {"weight_precision": "int8"}}}, "teachers.a: torchao rounds"),
        ({"teachers": {"a": TEACHER | {"wait": 1.0}}}, "teachers.a.wait: unknown"),
        ({"teachers": {"a": TEACHER | {"objective": "next_token"}}}, "reads no teacher"),
        ({"teachers": {}}, "needs a teacher"),
        (
            {"parallel": {"pipeline_model_parallel_size": 2}, "student": MODEL | {"num_layers": 4}}
            | {"teachers": {"a": TEACHER | {"model": MODEL | {"num_layers": 3}}}},
            "the teacher a's num_layers do not divide",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_teachers_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ConfigError) as caught:
        config_of(**changes)
    assert words in str(caught.value)


def test_a_teacher_has_the_objective_and_options_of_the_loss_but_for_its_own():
    teachers = {
        "a": TEACHER | {"options": {"exact_token_match_only": True}, "temperature": 3.0},
        "b": TEACHER | {"objective": "strict_topk", "options": {"top_k": 8}},
    }
    loss = {"options": {"vocab_topk": 16}, "temperature": 2.0}
    config = config_of(teachers=teachers, loss=loss)

    def objective_of(name, **loss):
        alone = config_of(teachers={name: TEACHER}, loss=loss)
        return teacher_objective(TeacherPlan.of(alone, name))

    assert teacher_objective(TeacherPlan.of(config, "a")) == objective_of(
        "a", options={"vocab_topk": 16, "exact_token_match_only": True}, temperature=3
    )
    assert teacher_objective(TeacherPlan.of(config, "b")) == objective_of(
        "b", objective="strict_topk", options={"top_k": 8}, temperature=2.0
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"loss": {"teacher_mode": "averaged_logits"}},
            "averaged logits need teachers with the student's tokenizer; got another vocabulary; "
            "take another loss.teacher_mode",
        ),
        (
            {"loss": {"teacher_mode": "select_teacher", "teacher_weights": "entropy"}},
            "loss.teacher_mode: dynamic weights",
        ),
        (
            {"loss": {"weighting": "matched", "weighting_options": {"decoy": 0.5}}},
            "loss.weighting_options.decoy: unknown",
        ),
        (
            {"loss": {"weighting": "matched", "weighting_options": {"decay": 2.0}}},
            "expected in [0, 1)",
        ),
        ({"loss": {"weighting_options": {"kd": 2.0}}}, "loss.weighting_options.kd: no such option"),
        (
            {"teachers": {"a": TEACHER | {"options": {"top_kk": 3}}}},
            "teachers.a.options.top_kk: unknown",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_what_does_not_go_together_is_refused_before_a_model_is_built(changes, words):
    with pytest.raises(ConfigError) as caught:
        check(config_of(**changes))
    assert words in str(caught.value)


def test_a_weighting_has_the_weights_of_the_loss_and_its_own_options():
    loss = {
        "weighting": "scheduled",
        "kd_weight": 2.0,
        "weighting_options": {"kd_schedule": "linear"},
    }
    assert weighting(loss) == ScheduledWeighting(kd=2.0, ce=1.0, kd_schedule="linear", steps=5)
    matched = {"weighting": "matched", "ce_weight": 0.5, "weighting_options": {"decay": 0.5}}
    assert weighting(matched) == MatchedWeighting(ce=0.5, decay=0.5)
    pulled = weighting({"weighting": "gradient_magnitude"})
    assert pulled == GradientMagnitudeWeighting()


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"tokenizer": {"model": "moved"}}, None),
        ({"projection": "moved"}, None),
        ({"checkpoint": "moved/c"}, None),
        ({"checkpoint": "d"}, "teachers.small.checkpoint"),
        ({"weight": 2.0}, "teachers.small.weight"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_run_goes_on_with_the_same_teachers_wherever_they_are(changes, refused, tmp_path):
    before = config_values(config_of())
    now = config_values(config_of(teachers={"big": TEACHER, "small": TEACHER | changes}))
    if refused is None:
        _check_same_run(before, now, tmp_path)
        return
    with pytest.raises(ConfigError, match=f"another {refused}"):
        _check_same_run(before, now, tmp_path)


def test_options_and_temperature_reach_the_objective():
    options = {"top_k": 8, "tail": "renormalise"}
    expected = StrictTopKLoss(**options, temperature=1.0)
    assert objective("strict_topk", **options) == expected
    assert objective("strict_topk", 1.5, **options) == replace(expected, temperature=1.5)
    # Without one an objective keeps its own, and without a teacher it means nothing.
    assert objective("alm").temperature == 5.0
    objective("next_token", 2.0)


@pytest.mark.parametrize("name", sorted(LOSS_REGISTRY))
def test_every_objective_is_made_without_options(name):
    assert isinstance(objective(name), LOSS_REGISTRY[name])


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
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
def test_a_wrong_option_is_refused_by_its_name(name, options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        objective(name, **options)


def test_cross_entropy_is_computed_as_what_it_stands_beside():
    def beside(*options, objective="alm"):
        losses = [LossConfig(objective=objective, options={"implementation": x}) for x in options]
        return next_token_beside(losses[0], map(make_objective, losses)).implementation

    assert beside("torch") == beside("torch", "torch") == beside("torch", objective="next_token")
    assert beside("torch") == "torch"
    assert beside("torch", "triton") == "auto"
    of_states = LossConfig(objective="hidden_mse")
    assert next_token_beside(of_states, [make_objective(of_states)]).implementation == "auto"


def test_a_temperature_given_twice_and_an_unknown_objective_are_refused():
    loss = LossConfig(objective="gold", options={"temperature": 2.0}, temperature=1.0)
    with pytest.raises(ConfigError, match=r"given twice; got 2\.0"):
        make_objective(loss)
    with pytest.raises(UnknownNameError, match="did you mean 'projected_kl'"):
        objective("projected_lk")


def _pair(student_hidden, teacher_hidden):
    shard = VocabShard(start=0, stop=4, vocab_size=4, group=None)
    return ModelPair(
        student_hidden=student_hidden,
        teacher_hidden=teacher_hidden,
        student_layers=2,
        teacher_layers=2,
        seed=1,
        student_shard=shard,
        teacher_shard=shard,
        student_head=torch.zeros(4, student_hidden),
    )


@pytest.mark.parametrize(
    ("name", "kind"), [("dskd", DskdProjectors), ("hidden_cosine", StateProjectors)]
)
def test_projectors_take_the_place_of_a_stand_in(name, kind):
    plan = TeacherPlan.of(config_of(loss={"objective": name}), "big")
    stand_in = teacher_objective(plan)
    made, projectors = with_projectors(stand_in, plan, _pair(3, 5))
    assert made.projectors is projectors is not stand_in.projectors
    assert isinstance(projectors, kind)
    assert {tuple(sorted(weight.shape)) for weight in projectors.parameters()} == {(3, 5)}


def test_states_of_other_widths_are_refused_without_a_projection():
    loss = {"objective": "hidden_mse", "options": {"projectors": "none"}}
    plan = TeacherPlan.of(config_of(loss=loss), "big")
    with pytest.raises(ConfigError, match=r"loss\.options\.projectors: states of other widths"):
        with_projectors(teacher_objective(plan), plan, _pair(3, 5))
    _, projectors = with_projectors(teacher_objective(plan), plan, _pair(3, 3))
    assert not list(projectors.parameters())


def test_an_objective_needs_what_its_options_make_it_read():
    assert AlmLoss().needs.boundary
    assert not AlmLoss(debias=False).needs.boundary
    assert AlmLoss(debias=False, merge="words").needs.boundary
    hybrid = objective("hybrid_kl", min_share=0.8)
    assert hybrid.needs == Needs(projection="retokenized", match=True, min_share=0.8)
    assert objective("gold").needs.min_share is None
    assert ProjectedKLLoss().needs == Needs(projection="retokenized", shard=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Added(Objective):
    """An objective of a user's own."""

    name = "added"

    strength: float = 1.0

    def compute(self, inputs):
        raise NotImplementedError


def test_an_objective_that_is_added_has_its_options_and_all_that_it_may_read(monkeypatch):
    monkeypatch.setattr(LOSS_REGISTRY, "_rows", dict(LOSS_REGISTRY._rows))
    LOSS_REGISTRY.register("added", _Added)
    added = objective("added", strength=2.0)
    assert added == _Added(strength=2.0)
    assert added.needs == Needs(projection="retokenized", shard=True, match=True)
    assert added.target_forms == ("hidden",)


def test_objectives_over_labels_are_known():
    assert objective("vocab_kl").sums_over == "tokens"
    assert objective("uld", alignment="position").sums_over == "tokens"
    assert objective("uld").sums_over == "chunks"


CUT = {"context_parallel_size": 2}


def loss(name, **options):
    return {"loss": {"objective": name, "options": options}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (loss("alm", merge="words"), "loss.options: the objective needs whole sequences so"),
        (
            loss("alm", merge="likely_boundaries"),
            "of alm: merge, of chunks that can lie on two ranks",
        ),
        (loss("uld", alignment="position"), "of uld: alignment position"),
        (loss("projected_kl", numerics="nemo"), "of projected_kl: numerics nemo"),
        (
            {
                "teachers": {
                    "big": TEACHER,
                    "own": TEACHER | {"objective": "alm", "options": {"merge": "words"}},
                }
            },
            "teachers.own.options: the objective needs whole",
        ),
    ],
    ids=["words", "boundaries", "position", "nemo", "one-of-two"],
)
def test_a_loss_that_needs_whole_sequences_is_refused(changes, words):
    check(config_of(**changes))
    with pytest.raises(ConfigError, match="context") as error:
        check(config_of(parallel=CUT, **changes))
    assert words in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        loss("alm"),
        loss("partition_kl"),
        loss("uld"),
        {"loss": {"objective": "projected_kl", "learned_projection": True}},
        {
            "loss": {"objective": "projected_kl"},
            "training": {"train_iters": 5, "vocabulary_layout": "co_sharded"},
            "teachers": {"one": TEACHER},
        },
    ],
    ids=["alm", "partition_kl", "uld", "learned", "layout"],
)
def test_every_other_loss_goes(changes):
    check(config_of(parallel=CUT, **changes))


ONE = {"teacher": TEACHER, "teachers": {}, "loss": {"objective": "projected_kl"}}


@pytest.mark.parametrize(
    ("changes", "on_gpu", "layout"),
    [
        (ONE, True, "co_sharded"),
        (ONE, False, "original"),
        (ONE | {"parallel": {"tensor_model_parallel_size": 2}}, False, "co_sharded"),
        (ONE | loss("uld"), True, "original"),
        ({}, True, "original"),
        (ONE | {"loss": {"objective": "projected_kl", "linear": True}}, True, "co_sharded"),
        (ONE | {"teacher": TEACHER | {"library": "huggingface"}}, True, "original"),
        (ONE | {"training": {"train_iters": 5, "vocabulary_layout": "original"}}, True, "original"),
    ],
    ids=[
        "gpu",
        "cpu",
        "cpu, tp 2",
        "no projection",
        "several",
        "linear",
        "transformers",
        "asked for",
    ],
)
def test_heads_are_laid_out_where_it_pays_and_they_can_be(changes, on_gpu, layout):
    settled = with_vocabulary_layout(config_of(**changes), on_gpu=on_gpu)
    assert settled.training.vocabulary_layout == layout


LARGE = {"training": {"train_iters": 5, "micro_batch_size": 8}}


@pytest.mark.parametrize(
    ("changes", "on_gpu", "tile_rows"),
    [
        (ONE | LARGE, False, 262),
        (
            ONE | LARGE | {"loss": {"objective": "projected_kl", "linear_tile_rows": 100}},
            False,
            100,
        ),
        (ONE | LARGE, True, None),
        (ONE | LARGE | {"student": MODEL | {"seq_length": 8}}, False, None),
        (ONE | LARGE | loss("alm"), False, 262),
        (ONE | LARGE | loss("dskd"), False, None),
        (ONE | LARGE | {"loss": {"objective": "projected_kl", "linear": False}}, False, None),
        (ONE | LARGE | {"teacher": None, "loss": {"objective": "next_token"}}, False, None),
        (
            ONE | LARGE | {"loss": {"objective": "gold", "weighting": "gradient_magnitude"}},
            False,
            None,
        ),
    ],
    ids=[
        "cpu",
        "fewer rows",
        "gpu",
        "small",
        "rows behind chunks",
        "no linear form",
        "not asked for",
        "no teacher",
        "excluded",
    ],
)
def test_a_cpu_takes_tiles_of_large_logits(changes, on_gpu, tile_rows):
    config = config_of(**changes)
    settled = with_linear_form(config, on_gpu=on_gpu, vocab_size=128_000)
    assert settled.loss.linear is (tile_rows is not None)
    assert settled.loss.linear_tile_rows == (tile_rows or config.loss.linear_tile_rows)
    assert with_linear_form(settled, on_gpu=on_gpu, vocab_size=128_000) == settled


def test_ranks_that_share_sequences_are_of_one_replica():
    layout = Layout(tensor_model_parallel_size=2, context_parallel_size=2)
    assert layout.replicas(8) == 2
    with pytest.raises(ConfigError, match=r"multiple of 6 .* x context_parallel_size 3"):
        replace(layout, context_parallel_size=3).replicas(8)


@pytest.mark.parametrize(
    ("context", "tensor", "is_cut", "expected"),
    [(1, 2, True, 1), (2, 2, False, 4), (2, 2, True, 4), (2, 4, True, 8), (2, 3, True, 12)],
)
def test_rows_divide_over_slices_and_sequence_parallel_ranks(context, tensor, is_cut, expected):
    layout = Layout(
        context_parallel_size=context, tensor_model_parallel_size=tensor, sequence_parallel=is_cut
    )
    assert layout.sequence_multiple == expected
