"""A configuration that cannot be is refused before any process waits for another."""

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.tokenizers import TokenizerConfig
from megatron_ext.training.configuration.config import (
    DataConfig,
    DistillConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TeacherConfig,
    TrainingConfig,
)
from megatron_ext.training.configuration.teachers import ServingConfig
from megatron_ext.training.inputs import read_inputs
from megatron_ext.training.run_folder import config_values
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.teachers.target_checks import check_targets
from tests.training.tiny_run import CP2, LINEAR_ATTENTION, PP2, TP2, changed

MODEL = ModelConfig(num_layers=4, hidden_size=24, num_attention_heads=6, num_query_groups=2)
TEACHER = TeacherConfig(
    tokenizer=TokenizerConfig(), model=changed(MODEL, num_layers=6), checkpoint="c"
)
TRAINING = TrainingConfig(train_iters=10)
RUN = DistillConfig(
    run_dir="runs/a",
    tokenizer=TokenizerConfig(),
    student=MODEL,
    teacher=TEACHER,
    data=DataConfig(train=("x.txt",)),
    training=TRAINING,
)
PLAIN = changed(RUN, teacher=None, loss={"objective": "next_token"}, student={"num_layers": 8})
"""Without a teacher, and layers for two chunks on two stages."""

VP2 = {"virtual_pipeline_model_parallel_size": 2}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
FULL = {"recompute_granularity": "full"}
HALF_SAID = "layer by layer with recompute_granularity full"


def refusal(config, changes):
    with pytest.raises(ConfigError) as caught:
        changed(config, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_right_is_taken():
    assert RUN.distils
    assert not PLAIN.distils
    # Zero turns clipping and decay off.
    assert OptimizerConfig(clip_grad=0.0, weight_decay=0.0).clip_grad == 0.0


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
        (ParallelConfig(), "context_parallel_size"),
        (OptimizerConfig(), "lr"),
        (LossConfig(), "temperature"),
        (TRAINING, "train_iters"),
        (TRAINING, "micro_batch_size"),
        (TRAINING, "global_batch_size"),
        (TRAINING, "save_interval"),
        (TRAINING, "keep_checkpoints"),
        (ServingConfig(), "ranks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_size_must_be_positive(config, name, value):
    assert f"{name} must be positive; got {value}" in refusal(config, {name: value})


def elsewhere(placement, words, serving=None, **fields):
    """A row of the table: a teacher in another place."""
    changes = {"placement": placement, "serving": serving or {}, **fields}
    return TEACHER, changes, words


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (MODEL, {"hidden_size": 25}, "hidden_size is not a multiple of num_attention_heads"),
        (MODEL, {"num_query_groups": 4}, "num_attention_heads is not a multiple of num_query"),
        (DataConfig(train=("x",)), {"train": ()}, "no training data"),
        (OptimizerConfig(), {"lr": float("nan")}, "lr must be positive; got nan"),
        (OptimizerConfig(), {"min_lr": 1.0}, "min_lr is above lr; got 1.0; expected at most lr"),
        (OptimizerConfig(), {"clip_grad": -1.0}, "clip_grad must not be negative"),
        (OptimizerConfig(), {"lr_warmup_iters": -1}, "lr_warmup_iters must not be negative"),
        (OptimizerConfig(), {"adam_beta2": 1.0}, "adam_beta2 is not a decay; got 1.0"),
        (LossConfig(), {"kd_weight": -0.5}, "kd_weight must not be negative; got -0.5"),
        (
            TRAINING,
            {"micro_batch_size": 3},
            "global_batch_size is not a multiple of micro_batch_size; got global_batch_size 8",
        ),
        (TRAINING, FULL, HALF_SAID),
        (TRAINING, FULL | {"recompute_method": "block"}, HALF_SAID),
        (TRAINING, {"recompute_granularity": "selective", "recompute_num_layers": 1}, HALF_SAID),
        (TRAINING, {"recompute_method": "uniform", "recompute_num_layers": 1}, HALF_SAID),
        (ParallelConfig(), VP2, "needs a pipeline to interleave"),
        (ParallelConfig(), {"sequence_parallel": True}, "tensor-parallel ranks to share a seq"),
        (ParallelConfig(), OVERLAPPED, "needs use_distributed_optimizer"),
        (
            ParallelConfig(),
            {"overlap_param_gather": True, "use_distributed_optimizer": True},
            "and overlap_grad_reduce",
        ),
        elsewhere("own_ranks", "got placement own_ranks without serving.ranks"),
        elsewhere("student_ranks", "got placement student_ranks with serving.ranks", {"ranks": 2}),
        elsewhere("server", "got placement server without serving.address"),
        elsewhere("process", "got placement process with serving.add", {"address": ("a:1",)}),
        elsewhere("process", "got placement process with serving.token_file", {"token_file": "f"}),
        elsewhere(
            "server",
            "node7:7000: a teacher's server on another machine needs TLS",
            {"address": ("node7:7000",)},
        ),
        elsewhere(
            "process",
            "a teacher process has the whole model; got serving.tensor_model_parallel_size 2",
            TP2,
        ),
        elsewhere("student_ranks", "student's ranks has the student's layout", PP2),
        elsewhere(
            "own_ranks",
            "the library huggingface runs whole models",
            {"ranks": 2, **TP2},
            library="huggingface",
        ),
        (ServingConfig(), {"ranks": 3, **TP2}, "do not divide into whole replicas of it"),
        (ServingConfig(), {"prefetch": -1}, "prefetch must not be negative; got -1"),
        (
            ServingConfig(),
            {"address": ("7000",)},
            "an address cannot be used; got 7000; expected HOST:PORT",
        ),
        (
            ServingConfig(),
            {"targets": "label", "target_precision": "bf16"},
            "sent in fp32; got bf16",
        ),
        (RUN, {"parallel": PP2 | VP2}, "got 6 over 4; expected a multiple of 4"),
        (RUN, {"teacher": None}, "add one, or set loss.objective to next_token"),
        (
            RUN,
            {"teacher": None, "loss": {"objective": "projectd_kl"}},
            "did you mean 'projected_kl'",
        ),
        (RUN, {"run_dir": ""}, "run_dir is empty"),
        (RUN, {"optimizer": {"lr_warmup_iters": 10}}, "got 10; expected less than train_iters, 10"),
        (
            PLAIN,
            {"student": {"seq_length": 1023}, "parallel": {**TP2, "sequence_parallel": True}},
            "student's seq_length do not divide",
        ),
        (
            PLAIN,
            {
                "training": {"variable_seq_lengths": True, "seq_length_multiple": 7},
                "parallel": {**TP2, "sequence_parallel": True},
            },
            "seq_length_multiple",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_values_that_contradict_each_other_are_refused(config, changes, words):
    assert words in refusal(config, changes)


@pytest.mark.parametrize(
    ("student", "parallel", "words"),
    [
        ({"num_layers": 3}, PP2, "student's num_layers"),
        ({}, {"pipeline_model_parallel_size": 4}, "teacher's num_layers"),
        ({}, {"tensor_model_parallel_size": 3}, "student's attention heads"),
        ({"num_query_groups": 6, "ffn_hidden_size": 33}, TP2, "student's ffn_hidden_size"),
        ({}, PP2 | VP2, "teacher's num_layers"),
        (LINEAR_ATTENTION, CP2 | TP2, "student's linear_num_key_heads"),
    ],
    ids=["student-layers", "teacher-layers", "query-groups", "ffn", "chunks", "linear"],
)
def test_a_model_that_does_not_divide_over_the_layout_is_refused(student, parallel, words):
    message = refusal(RUN, {"student": student, "parallel": parallel})
    assert f"the {words} do not divide over" in message
    assert "expected a multiple of" in message
    assert all(key in message for key in parallel)


@pytest.mark.parametrize(("global_batch_size", "is_refused"), [(4, False), (6, True)])
def test_an_interleaved_pipeline_takes_microbatches_by_its_stages(
    tmp_path, global_batch_size, is_refused
):
    training = {"micro_batch_size": 2, "global_batch_size": global_batch_size}
    config = changed(PLAIN, run_dir=str(tmp_path / "run"), parallel=PP2 | VP2, training=training)
    # The next thing that is wrong: no tokenizer is named.
    message = "as many microbatches at a time" if is_refused else "no tokenizer is named"
    with pytest.raises(ConfigError, match=message):
        read_inputs(config, world_size=2)


def test_what_changes_no_result_may_be_combined():
    sharded = {"sequence_parallel": True, "use_distributed_optimizer": True}
    training = FULL | {"recompute_method": "block", "recompute_num_layers": 1}
    changed(
        PLAIN,
        parallel=PP2 | VP2 | TP2 | OVERLAPPED | sharded,
        training=training | {"variable_seq_lengths": True},
    )


def test_a_teacher_elsewhere_divides_over_its_own_layout_and_not_the_students():
    own = {"ranks": 4, **TP2, **PP2}
    config = changed(RUN, teacher={"placement": "own_ranks", "serving": own})
    assert config.teacher_ranks == {"teacher": 4}
    assert config_values(config)["teacher"]["serving"]["ranks"] == 4
    four = {"pipeline_model_parallel_size": 4}
    serving = {"ranks": 4, **four}
    message = refusal(RUN, {"teacher": {"placement": "own_ranks", "serving": serving}})
    assert "teacher's num_layers do not divide over serving.pipeline" in message
    # Six layers do not divide over the student's four stages, and need not.
    changed(config, parallel=four)
    # A run that does not distil gives its teacher no ranks.
    assert changed(config, loss={"objective": "next_token"}).teacher_ranks == {}


def test_an_objective_that_needs_more_than_is_sent():
    config = changed(RUN, teacher={"placement": "process"})
    form = TargetForm.of("topk", precision=None, top_k=4, hidden_size=8, vocab_size=100)
    with pytest.raises(ConfigError, match=r"teacher\.serving\.targets: .*of a remote teacher"):
        check_targets(config, TeacherPlan.of(config, "teacher"), form, key="serving.targets")
