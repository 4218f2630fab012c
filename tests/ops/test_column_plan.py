"""The plan that kernels walk says what the projection says, whatever the layout."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.projected_kl import ColumnPlan
from megatron_ext.ops.projected_kl.column_plan import SUMS, Segments
from tests.ops.projected_kl_case import column_plan, paired_projection, random_projection


def shards(vocab, ranks):
    width = -(-vocab // ranks) + 1
    return [
        VocabShard(start=rank * width, stop=(rank + 1) * width, vocab_size=vocab)
        for rank in range(ranks)
    ]


def entries(segments):
    """(target, source, place of the weight) of every entry."""
    offsets, target = segments.offsets.tolist(), segments.target.tolist()
    source, entry = segments.source.tolist(), segments.entry.tolist()
    return {
        (target[i], source[e], entry[e])
        for i in range(len(target))
        for e in range(offsets[i], offsets[i + 1])
    }


def spread(plan, weight, student, columns):
    """Entries {(student token, teacher token): weight} by column, and by row."""
    tokens = {slot: column for column, slot in enumerate(plan.slot.tolist()) if slot >= 0}
    rows = {-2 - code: row for row, code in enumerate(plan.partner.tolist()) if code < -1}
    found = {}
    assert dict(enumerate(plan.residual.tolist())) == rows
    for slot, number, place in entries(plan.by_column):
        found[student.start + rows[number], tokens[slot]] = weight[place].item()
    by_row = {
        (student.start + rows[row], tokens[slot]): weight[place].item()
        for row, slot, place in entries(plan.by_row)
    }
    assert found == by_row
    for row, partner in enumerate(plan.partner.tolist()):
        if partner >= 0:
            found[student.start + row, columns[partner]] = 1.0
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("build", [random_projection, paired_projection])
def test_pairs_and_sums_are_all_entries_once(build, ranks):
    dense = build(53, 41).float()
    crossing = []
    for student, teacher in zip(shards(53, ranks), shards(41, ranks), strict=True):
        plan = column_plan(dense, student, teacher)
        rows = dense[student.start : student.stop]
        truth = {
            (student.start + row, column): rows[row, column].item()
            for row, column in rows.nonzero().tolist()
        }
        weight = rows[rows > 0]
        assert spread(plan, weight, student, list(range(teacher.start, teacher.stop))) == truth
        for slot, home in enumerate(plan.home.tolist()):
            column = plan.slot.tolist().index(slot)
            held = teacher.start <= column < teacher.stop
            assert home == (column - teacher.start if held else -1)
        crossing.append(
            plan.home.new_tensor(
                [c for c, s in enumerate(plan.slot.tolist()) if 0 <= s < plan.crossing]
            )
        )
        assert plan.scratch_width >= len(plan.home) + plan.residual_rows
    assert all(torch.equal(first, crossing[0]) for first in crossing)
    assert (len(crossing[0]) > 0) == (ranks > 1)


def test_every_rank_knows_the_widest_scratch():
    dense = paired_projection(53, 41)
    plans = [column_plan(dense, *pair) for pair in zip(shards(53, 4), shards(41, 4), strict=True)]
    widths = [len(plan.home) + plan.residual_rows for plan in plans]
    assert {plan.scratch_width for plan in plans} == {max(widths)}


@pytest.mark.parametrize("lengths", [[], [0], [1, 0, 3, 5, 2], [SUMS, SUMS + 1, 3 * SUMS]])
def test_blocks_hold_every_sum_once_and_have_room_for_it(lengths):
    target = np.repeat(np.arange(len(lengths)), lengths)
    source = np.arange(len(target))[::-1].copy()
    segments = Segments.of(target, source, source, len(lengths), "cpu")
    offsets = segments.offsets.tolist()
    covered = []
    for first, stop in segments.blocks.tolist():
        assert 0 < stop - first <= SUMS
        for number in range(first, stop):
            length = offsets[number + 1] - offsets[number]
            assert length <= SUMS or stop == first + 1
            assert length == lengths[segments.target[number]]
            part = segments.source[offsets[number] : offsets[number + 1]]
            assert part.tolist() == sorted(part.tolist())
        covered += range(first, stop)
    assert covered == list(range(len(lengths)))
    assert sorted(segments.target.tolist()) == covered


def test_rows_of_another_sum_and_entries_of_no_weight_are_seen():
    student, teacher = shards(3, 1)[0], shards(3, 1)[0]
    dense = torch.tensor([[1.0, 0, 0], [0, 0.5, 0.5], [0, 0, 0]])
    plan = column_plan(dense, student, teacher)
    assert plan.has_unit_rows
    assert plan.partner.tolist() == [0, -2, -1, -1]
    assert not column_plan(dense * 1.1, student, teacher).has_unit_rows
    # A pair must carry everything: 0.9 of a token is a sum of one entry.
    assert column_plan(dense * 0.9, student, teacher).partner[0] < -1
    with_zero = ColumnPlan.of(
        np.array([0, 2, 3, 3]),
        np.array([0, 1, 2], dtype=np.int32),
        np.array([1.0, 0.0, 1.0], dtype=np.float32),
        student_shard=student,
        teacher_shard=teacher,
    )
    assert with_zero.partner.tolist() == [0, 2, -1, -1]
    assert with_zero.slot.tolist() == [-1, -1, -1]


def test_a_pair_whose_halves_are_on_two_ranks_crosses():
    dense = torch.eye(4).flip(0)
    plan = column_plan(
        dense, *[replace(shard, stop=2, start=0) for shard in (shards(4, 2)[0],) * 2]
    )
    assert plan.direct_pairs == 0
    assert plan.crossing == 4
    assert plan.home.tolist() == [0, 1, -1, -1]
