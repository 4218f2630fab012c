"""A match cut to one rank's columns: made once, and whether pairs lie on two ranks."""

from dataclasses import replace

import pytest
import torch

from megatron_ext.losses.matched_columns import matched_columns
from megatron_ext.losses.vocabulary_match import VocabularyMatch
from tests.losses.objective_cases import CASES

GROUP = object()
"""Of two ranks; nothing is sent."""


@pytest.mark.parametrize(
    ("pairs", "crosses"),
    [([(0, 2), (1, 0), (20, 13)], False), ([(0, 2), (3, 14)], True), ([(30, 3)], True)],
)
def test_pairs_cross_where_two_ranks_hold_them(pairs, crosses):
    case = CASES["gold"]
    inputs = case.build(case.batch(vocabs=(40, 24)), (0, 0))
    shards = [
        replace(shard, start=width, stop=2 * width, group=GROUP)
        for shard, width in ((inputs.student_shard, 20), (inputs.teacher.shard, 12))
    ]
    own, other = torch.tensor(pairs).t().contiguous()
    match = VocabularyMatch(common_student=own, common_teacher=other)
    inputs = replace(inputs, student_shard=shards[0], match=match)
    teacher = replace(inputs.teacher, shard=shards[1])
    columns = matched_columns(inputs, teacher, objective="gold")
    assert columns.matching.pairs_cross is crosses
    assert matched_columns(inputs, teacher, objective="gold") is columns
    other = replace(inputs, match=replace(match, common_teacher=other.clone()))
    assert matched_columns(other, teacher, objective="gold") is not columns
    if not crosses:
        pairs = columns.matching.pairs(*shards)
        assert pairs.teacher.tolist() == [1, *[-1] * 19]
        assert (pairs.aligned, pairs.end, pairs.first_open) == (0, 1, (1, 0))
