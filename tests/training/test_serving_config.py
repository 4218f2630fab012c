"""What a configuration says of where teachers are is refused where it does not go together."""

import dataclasses

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.training.config import LossConfig
from megatron_ext.training.objective import make_objective
from megatron_ext.training.run_folder import config_values
from megatron_ext.training.teacher_config import ServingConfig
from megatron_ext.training.teachers.target_checks import check_targets
from tests.training.test_config import TEACHER, distill_config


def teacher(serving=None, **fields):
    return dataclasses.replace(TEACHER, serving=ServingConfig(**serving or {}), **fields)


@pytest.mark.parametrize(
    ("fields", "serving", "words"),
    [
        ({"placement": "own_ranks"}, {}, "got placement own_ranks without serving.ranks"),
        ({}, {"ranks": 2}, "got placement student_ranks with serving.ranks"),
        ({"placement": "server"}, {}, "got placement server without serving.address"),
        ({"placement": "process"}, {"address": ("a:1",)}, "got placement process with serving.add"),
        (
            {"placement": "process"},
            {"token_file": "f"},
            "got placement process with serving.token_file",
        ),
        (
            {"placement": "server"},
            {"address": ("node7:7000",)},
            "node7:7000: a teacher's server on another machine needs TLS",
        ),
        (
            {"placement": "process"},
            {"tensor_model_parallel_size": 2},
            "a teacher process has the whole model; got serving.tensor_model_parallel_size 2",
        ),
        ({}, {"pipeline_model_parallel_size": 2}, "student's ranks has the student's layout"),
        (
            {"placement": "own_ranks", "library": "huggingface"},
            {"ranks": 2, "tensor_model_parallel_size": 2},
            "the library huggingface runs whole models",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_placements_that_make_no_sense(fields, serving, words):
    with pytest.raises(ConfigError) as caught:
        teacher(serving, **fields)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ranks": 3, "tensor_model_parallel_size": 2}, "do not divide into whole replicas of it"),
        ({"ranks": 0}, "ranks must be positive; got 0"),
        ({"prefetch": -1}, "prefetch must not be negative; got -1"),
        ({"address": ("7000",)}, "an address cannot be used; got 7000; expected HOST:PORT"),
        ({"targets": "label", "target_precision": "bf16"}, "sent in fp32; got bf16"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_settings_that_cannot_be_used(values, words):
    with pytest.raises(ConfigError) as caught:
        ServingConfig(**values)
    assert words in str(caught.value)


def test_a_teacher_elsewhere_divides_over_its_own_layout_and_not_the_students():
    own = {"ranks": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    config = distill_config(teacher=teacher(own, placement="own_ranks"))
    assert config.teacher_ranks == {"teacher": 4}
    assert config_values(config)["teacher"]["serving"]["ranks"] == 4
    with pytest.raises(
        ConfigError, match=r"teacher's num_layers do not divide over serving\.pipeline"
    ):
        distill_config(
            teacher=teacher({"ranks": 4, "pipeline_model_parallel_size": 4}, placement="own_ranks")
        )
    # Six layers do not divide over the student's four stages, and need not.
    parallel = dataclasses.replace(config.parallel, pipeline_model_parallel_size=4)
    assert distill_config(teacher=teacher(own, placement="own_ranks"), parallel=parallel)
    with pytest.raises(ConfigError, match="the teacher's num_layers do not divide over pipeline"):
        distill_config(parallel=parallel)


def test_a_run_that_does_not_distil_gives_its_teacher_no_ranks():
    its = teacher({"ranks": 2}, placement="own_ranks")
    config = distill_config(teacher=its, loss=LossConfig(objective="next_token"))
    assert config.teacher_ranks == {}


def test_an_objective_that_needs_more_than_is_sent():
    config = distill_config(teacher=teacher(placement="process"))
    form = TargetForm.of("topk", precision=None, top_k=4, hidden_size=8, vocab_size=100)
    with pytest.raises(ConfigError, match=r"teacher\.serving\.targets: .*of a remote teacher"):
        check_targets(config, "teacher", make_objective(config.loss), form, key="serving.targets")
