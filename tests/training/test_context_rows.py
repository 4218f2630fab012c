"""What each context-parallel rank reads of a microbatch; the parts together are all of it."""

import dataclasses

import pytest
import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.data.aligner import PackedSample
from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.training.config import DataConfig
from megatron_ext.training.microbatch import Microbatch
from megatron_ext.training.run_data import RunData
from tests.data.readers import student_tokenizer, teacher_tokenizer
from tests.training.test_run_data import WHOLE
from tests.training.tiny_run import student_run, write_corpus

LENGTHS = (41, 53)


def run_data(folder, *, packing, size):
    """Rows of 41 and 53 positions, which are filled up to divide over ``size`` ranks."""
    config = dataclasses.replace(
        student_run(folder, "run", global_batch_size=8, context_parallel_size=size),
        data=DataConfig(train=(str(write_corpus(folder)),), packing=packing),
    )
    return RunData.read(config, student_tokenizer(), {"teacher": (teacher_tokenizer(), LENGTHS[1])})


def batches(data):
    """One more than a run has: of a row without a text."""
    blank = [PackedSample(())] * 2
    return [data.collator(rows) for rows in [*data.batches(WHOLE).take(), blank]]


@pytest.mark.parametrize("packing", [False, True], ids=["alone", "packed"])
@pytest.mark.parametrize("size", [2, 3])
def test_filled_rows_hold_the_texts_of_plain_ones(tmp_path, size, packing):
    plain = batches(run_data(tmp_path, packing=packing, size=1))
    filled = batches(run_data(tmp_path, packing=packing, size=size))
    for one, other in zip(plain, filled, strict=True):
        assert one.token_count == other.token_count
        sides = [
            (one.student, other.student, LENGTHS[0]),
            (one.teachers["teacher"], other.teachers["teacher"], LENGTHS[1]),
        ]
        for before, after, length in sides:
            total = after.input_ids.shape[1]
            assert before.input_ids.shape[1] == length
            assert total == -(-length // (2 * size)) * 2 * size > length
            assert torch.equal(after.input_ids[:, :length], before.input_ids)
            assert torch.equal(after.labels[:, :length], before.labels)
            assert (after.labels[:, length:] == IGNORE_INDEX).all()
            # Learned positions have no more than the model's.
            assert int(after.position_ids.max()) < length
        ours, theirs = one.alignments["teacher"], other.alignments["teacher"]
        assert torch.equal(theirs.student_chunk_id[:, : LENGTHS[0]], ours.student_chunk_id)
        assert torch.equal(theirs.teacher_chunk_id[:, : LENGTHS[1]], ours.teacher_chunk_id)


@pytest.mark.parametrize("packing", [False, True], ids=["alone", "packed"])
def test_parts_of_all_ranks_are_the_rows(tmp_path, packing):
    size = 3
    masked = 0
    for sides in batches(run_data(tmp_path, packing=packing, size=size)):
        whole = Microbatch.of(sides, {})
        ranks = [ContextRank(rank=rank, size=size) for rank in range(size)]
        parts = [Microbatch.of(sides, {}, context=rank) for rank in ranks]
        for part in parts:
            assert part.token_count == whole.token_count
            assert part.chunk_counts == whole.chunk_counts
            assert part.row_length == whole.row_length == whole.student.tokens.shape[1]
            assert torch.equal(part.whole_labels, whole.student.labels)
            labels = part.whole_labels_of("teacher")
            assert torch.equal(labels, whole.teachers["teacher"].labels)
        pairs = [
            (whole.student, [part.student for part in parts]),
            (whole.teachers["teacher"], [part.teachers["teacher"] for part in parts]),
        ]
        for one, cut in pairs:
            masked += one.attention_mask is not None
            _check_parts(one, cut, ranks)
    assert (masked > 0) == packing


def _check_parts(whole, parts, ranks):
    length = whole.tokens.shape[1]
    places = torch.arange(length)[None]
    held = torch.cat([rank.cut(places)[0] for rank in ranks])
    assert torch.equal(held.sort().values, places[0])
    for rank, part in zip(ranks, parts, strict=True):
        own = rank.cut(places)[0]
        assert len(own) * rank.size == length
        assert torch.equal(part.tokens, whole.tokens[:, own])
        assert torch.equal(part.labels, whole.labels[:, own])
        assert torch.equal(part.position_ids, whole.position_ids[:, own])
        assert part.byte_count == whole.byte_count
        if whole.attention_mask is None:
            assert part.attention_mask is None
        else:
            assert part.attention_mask is not None
            assert torch.equal(part.attention_mask, whole.attention_mask[:, :, own])


def test_parts_move_to_a_device_and_whole_rows_are_sent_once(tmp_path):
    data = run_data(tmp_path, packing=True, size=2)
    sides = batches(data)[0]
    part = Microbatch.of(sides, {}, context=ContextRank(rank=1, size=2))
    moved = part.to(torch.device("cpu"))
    assert torch.equal(moved.student.tokens, part.student.tokens)
    assert moved.student.tokens.shape[1] * 2 == moved.sides.student.input_ids.shape[1]
    whole = Microbatch.of(sides, {}).to(torch.device("cpu"))
    assert whole.student.tokens is whole.sides.student.input_ids
