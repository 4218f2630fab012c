"""Layouts that cannot be are refused before any process waits for another."""

import dataclasses

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.training.config import LossConfig, ParallelConfig, TrainingConfig
from megatron_ext.training.inputs import read_inputs
from tests.training.test_config import distill_config

INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"virtual_pipeline_model_parallel_size": 2}, "needs a pipeline to interleave"),
        ({"sequence_parallel": True}, "tensor-parallel ranks to share a sequence"),
        (OVERLAPPED, "needs use_distributed_optimizer"),
        (
            {"overlap_param_gather": True, "use_distributed_optimizer": True},
            "and overlap_grad_reduce",
        ),
    ],
    ids=["no-pipeline", "no-tensor-parallel", "no-sharded-optimizer", "no-grad-overlap"],
)
def test_an_axis_without_what_it_needs_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**keys)


def test_layers_divide_over_all_chunks_of_the_pipeline():
    with pytest.raises(ConfigError, match="teacher's num_layers do not divide") as error:
        distill_config(parallel=ParallelConfig(**INTERLEAVED))
    assert "6 over 4" in str(error.value)
    assert "virtual_pipeline_model_parallel_size" in str(error.value)


@pytest.mark.parametrize(("global_batch_size", "is_refused"), [(4, False), (6, True)])
def test_an_interleaved_pipeline_takes_microbatches_by_its_stages(
    tmp_path, global_batch_size, is_refused
):
    config = distill_config(
        run_dir=str(tmp_path / "run"),
        student=dataclasses.replace(distill_config().student, num_layers=8),
        loss=LossConfig(objective="next_token"),
        teacher=None,
        parallel=ParallelConfig(**INTERLEAVED),
        training=TrainingConfig(
            train_iters=10, micro_batch_size=2, global_batch_size=global_batch_size
        ),
    )
    # The next thing that is wrong: no tokenizer is named.
    message = "as many microbatches at a time" if is_refused else "no tokenizer is named"
    with pytest.raises(ConfigError, match=message):
        read_inputs(config, world_size=2)


def test_sequence_parallelism_cuts_whole_numbers_of_positions():
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    odd = dataclasses.replace(distill_config().student, seq_length=1023)
    with pytest.raises(ConfigError, match="student's seq_length do not divide"):
        distill_config(parallel=parallel, student=odd)
    training = TrainingConfig(train_iters=10, variable_seq_lengths=True, seq_length_multiple=7)
    with pytest.raises(ConfigError, match="seq_length_multiple"):
        distill_config(parallel=parallel, training=training)


@pytest.mark.parametrize(
    "keys",
    [
        {"recompute_granularity": "full"},
        {"recompute_granularity": "full", "recompute_method": "block"},
        {"recompute_granularity": "selective", "recompute_num_layers": 1},
        {"recompute_method": "uniform", "recompute_num_layers": 1},
    ],
    ids=["no-method", "no-count", "count-of-selective", "no-granularity"],
)
def test_recomputation_that_is_half_said_is_refused(keys):
    with pytest.raises(ConfigError, match="layer by layer with recompute_granularity full"):
        TrainingConfig(train_iters=1, **keys)


def test_what_changes_no_result_may_be_combined():
    distill_config(
        student=dataclasses.replace(distill_config().student, num_layers=8),
        teacher=None,
        loss=LossConfig(objective="next_token"),
        parallel=ParallelConfig(
            **INTERLEAVED,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            use_distributed_optimizer=True,
            **OVERLAPPED,
        ),
        training=TrainingConfig(
            train_iters=10,
            variable_seq_lengths=True,
            recompute_granularity="full",
            recompute_method="block",
            recompute_num_layers=1,
        ),
    )
