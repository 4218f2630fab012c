import dataclasses

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers import TokenizerConfig
from megatron_ext.training.config import (
    DataConfig,
    DistillConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TeacherConfig,
    TrainingConfig,
)

MODEL = ModelConfig(num_layers=4, hidden_size=24, num_attention_heads=6, num_query_groups=2)
TEACHER = TeacherConfig(
    tokenizer=TokenizerConfig(), model=dataclasses.replace(MODEL, num_layers=6), checkpoint="c"
)


def distill_config(**changes):
    values = {
        "run_dir": "runs/a",
        "tokenizer": TokenizerConfig(),
        "student": MODEL,
        "teacher": TEACHER,
        "data": DataConfig(train=("x.txt",)),
        "training": TrainingConfig(train_iters=10),
    }
    return DistillConfig(**values | changes)


def test_what_is_right_is_taken():
    assert distill_config().distils
    assert not distill_config(loss=LossConfig(objective="next_token"), teacher=None).distils


@pytest.mark.parametrize("value", [0, -1], ids=str)
@pytest.mark.parametrize(
    ("config", "name"),
    [
        (MODEL, "num_layers"),
        (MODEL, "hidden_size"),
        (MODEL, "num_attention_heads"),
        (MODEL, "num_query_groups"),
        (MODEL, "ffn_hidden_size"),
        (MODEL, "seq_length"),
        (MODEL, "make_vocab_size_divisible_by"),
        (ParallelConfig(), "tensor_model_parallel_size"),
        (ParallelConfig(), "pipeline_model_parallel_size"),
        (OptimizerConfig(), "lr"),
        (LossConfig(), "temperature"),
        (TrainingConfig(train_iters=1), "train_iters"),
        (TrainingConfig(train_iters=1), "micro_batch_size"),
        (TrainingConfig(train_iters=1), "global_batch_size"),
        (TrainingConfig(train_iters=1), "save_interval"),
        (TrainingConfig(train_iters=1), "keep_checkpoints"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_size_must_be_positive(config, name, value):
    with pytest.raises(ConfigError, match=f"{name} must be positive; got {value}"):
        dataclasses.replace(config, **{name: value})


def test_a_learning_rate_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="lr must be positive; got nan"):
        OptimizerConfig(lr=float("nan"))


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (MODEL, {"hidden_size": 25}, "hidden_size is not a multiple of num_attention_heads"),
        (MODEL, {"num_query_groups": 4}, "num_attention_heads is not a multiple of num_query"),
        (DataConfig(train=("x",)), {"train": ()}, "no training data"),
        (OptimizerConfig(), {"min_lr": 1.0}, "min_lr is above lr; got 1.0; expected at most lr"),
        (OptimizerConfig(), {"clip_grad": -1.0}, "clip_grad must not be negative"),
        (OptimizerConfig(), {"lr_warmup_iters": -1}, "lr_warmup_iters must not be negative"),
        (OptimizerConfig(), {"adam_beta2": 1.0}, "adam_beta2 is no decay; got 1.0"),
        (LossConfig(), {"kd_weight": -0.5}, "kd_weight must not be negative; got -0.5"),
        (
            TrainingConfig(train_iters=1),
            {"micro_batch_size": 3},
            "global_batch_size is not a multiple of micro_batch_size; got global_batch_size 8",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_values_that_contradict_each_other_are_refused(config, changes, words):
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(config, **changes)
    assert words in str(caught.value)


def test_zero_turns_clipping_and_decay_off_and_is_no_error():
    assert OptimizerConfig(clip_grad=0.0, weight_decay=0.0).clip_grad == 0.0


@pytest.mark.parametrize(
    ("student", "parallel", "words"),
    [
        ({"num_layers": 3}, {"pipeline_model_parallel_size": 2}, "student's num_layers"),
        ({}, {"pipeline_model_parallel_size": 4}, "teacher's num_layers"),
        ({}, {"tensor_model_parallel_size": 3}, "student's attention heads"),
        (
            {"num_query_groups": 6, "ffn_hidden_size": 33},
            {"tensor_model_parallel_size": 2},
            "student's ffn_hidden_size",
        ),
    ],
    ids=["student-layers", "teacher-layers", "query-groups", "ffn"],
)
def test_a_model_that_does_not_divide_over_the_layout_is_refused(student, parallel, words):
    with pytest.raises(ConfigError, match=f"the {words} do not divide over") as caught:
        distill_config(
            student=dataclasses.replace(MODEL, **student), parallel=ParallelConfig(**parallel)
        )
    assert "expected a multiple of" in str(caught.value)


def test_an_objective_that_needs_a_teacher_asks_for_one():
    with pytest.raises(ConfigError, match=r"'projected_kl' needs a teacher.*next_token"):
        distill_config(teacher=None)
    with pytest.raises(ConfigError, match="did you mean 'projected_kl'"):
        distill_config(teacher=None, loss=LossConfig(objective="projectd_kl"))


def test_a_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(ConfigError, match="got 10; expected less than train_iters, 10"):
        distill_config(optimizer=OptimizerConfig(lr_warmup_iters=10))
