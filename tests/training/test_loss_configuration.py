"""Teachers, weights and forms of the loss as a configuration names them."""

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.losses import GradientMagnitudeWeighting, MatchedWeighting, ScheduledWeighting
from megatron_ext.training.config import DistillConfig
from megatron_ext.training.objective import teacher_objective
from megatron_ext.training.run_folder import _check_same_run, config_values
from megatron_ext.training.run_loss import check_loss, make_weighting
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


def check(config, **tokenizers):
    teachers = {name: teacher_tokenizer() for name in config.named_teachers}
    check_loss(config, student_tokenizer(), teachers | tokenizers)


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
    ("loss", "words"),
    [
        ({"teacher_mode": "averaged_logits"}, "averaged logits need teachers with the student's"),
        (
            {"teacher_mode": "select_teacher", "teacher_weights": "entropy"},
            "loss.teacher_mode: dynamic weights",
        ),
        (
            {"weighting": "matched", "weighting_options": {"decoy": 0.5}},
            "loss.weighting_options.decoy: unknown",
        ),
        ({"weighting": "matched", "weighting_options": {"decay": 2.0}}, "expected in [0, 1)"),
        ({"weighting_options": {"kd": 2.0}}, "loss.weighting_options.kd: no such option"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_what_does_not_go_together_is_refused_before_a_model_is_built(loss, words):
    with pytest.raises(ConfigError) as caught:
        check(config_of(loss=loss))
    assert words in str(caught.value)


def test_an_option_of_a_teacher_is_refused_where_it_is():
    teachers = {"a": TEACHER | {"options": {"top_kk": 3}}}
    with pytest.raises(ConfigError, match=r"teachers\.a\.options\.top_kk: unknown"):
        check(config_of(teachers=teachers))


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
