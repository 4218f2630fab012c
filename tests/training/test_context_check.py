"""What cannot be made of parts of sequences is refused at the start, by name."""

import dataclasses

import pytest

from megatron_ext.distributed.layout import Layout
from megatron_ext.errors import ConfigError
from megatron_ext.training.config import ParallelConfig
from tests.training.test_loss_configuration import TEACHER, check, config_of

CUT = {"context_parallel_size": 2}


def loss(objective, **options):
    return {"loss": {"objective": objective, "options": options}}


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


def test_ranks_that_share_sequences_are_of_one_replica():
    layout = Layout(tensor_model_parallel_size=2, context_parallel_size=2)
    assert layout.replicas(8) == 2
    with pytest.raises(ConfigError, match=r"multiple of 6 .* x context_parallel_size 3"):
        dataclasses.replace(layout, context_parallel_size=3).replicas(8)
    with pytest.raises(ConfigError, match="context_parallel_size must be positive"):
        ParallelConfig(context_parallel_size=0)


@pytest.mark.parametrize(
    ("context", "tensor", "is_cut", "expected"),
    [(1, 2, True, 1), (2, 2, False, 4), (2, 2, True, 4), (2, 4, True, 8), (2, 3, True, 12)],
)
def test_rows_divide_over_slices_and_sequence_parallel_ranks(context, tensor, is_cut, expected):
    layout = Layout(
        context_parallel_size=context, tensor_model_parallel_size=tensor, sequence_parallel=is_cut
    )
    assert layout.sequence_multiple == expected
