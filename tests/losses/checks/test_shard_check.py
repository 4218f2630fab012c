from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses import LOSS_REGISTRY
from megatron_ext.losses.checks import check_shard
from tests.losses.check_ranks import errors_of_shards
from tests.losses.microbatch import Microbatch
from tests.process_group import run_ranks


def test_shards_that_differ_or_leave_tokens_out_are_an_error_on_every_rank() -> None:
    first, second = run_ranks(2, errors_of_shards)
    assert (first["right"], first["padded"]) == (None, None)
    assert first["right, host alone"] is None
    for name in ("gap", "other widths", "both the first", "other vocabularies"):
        assert first[name] == second[name] is not None
    assert "do not cover the vocabulary; got 2 of 9 columns" in first["gap"]
    assert (
        "rank 1 has columns 12 to 24 of 20 tokens; expected columns 10 to 20"
        in (first["other widths"])
    )
    assert "rank 1 has columns 0 to 10" in first["both the first"]
    assert "10 to 20 of 19 tokens" in first["other vocabularies"]
    # Without asking the others, a rank knows its own place and the size of the group.
    assert first["gap, host alone"] is not None
    assert first["both the first, host alone"] is None
    assert "is not that of rank 1" in second["both the first, host alone"]


def test_one_rank_alone_holds_every_column() -> None:
    check_shard(VocabShard(start=0, stop=24, vocab_size=20), side="student")
    with pytest.raises(LossError, match=r"student's vocabulary shards do not cover.*1 of 18 col"):
        check_shard(VocabShard(start=0, stop=18, vocab_size=20), side="student")
    with pytest.raises(LossError, match="not that of rank 0; got columns 4 to 24"):
        check_shard(VocabShard(start=4, stop=24, vocab_size=20), side="student")


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_objectives_check_the_shards_of_both_models(side: str) -> None:
    inputs = Microbatch.random().inputs()
    assert inputs.teacher is not None
    small = VocabShard(start=0, stop=37 if side == "student" else 23, vocab_size=64)
    if side == "student":
        inputs = replace(inputs, student_shard=small)
    else:
        inputs = replace(inputs, teacher=replace(inputs.teacher, shard=small))
    with pytest.raises(LossError, match=f"{side}'s vocabulary shards do not cover"):
        LOSS_REGISTRY["projected_kl"]()(inputs)
