import dataclasses
import multiprocessing
import os
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from megatron_ext import CrossTokenizerCollator, TeacherCTSpec, TokenAligner
from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.data.aligner import PackedSample
from megatron_ext.data.batch import CrossTokenizerBatch
from megatron_ext.errors import ConfigError, DataError
from tests.data.readers import TEXTS, collator, packed, student_tokenizer, teacher_tokenizer

SHORT = [text for text in TEXTS if len(teacher_tokenizer().text_to_ids(text)) < 200]


def flat(batch):
    return {
        name: value.tolist() if torch.is_tensor(value) else value
        for name, value in batch.as_dict().items()
    }


@pytest.mark.parametrize("side", ["student", "sp"])
def test_a_row_is_a_text_as_its_tokenizer_reads_it(side):
    batch = collator(220, 220)([{"text": text, "index": 0} for text in SHORT])
    tokenizer = student_tokenizer() if side == "student" else teacher_tokenizer()
    rows = batch.student if side == "student" else batch.teachers["sp"]
    for row, text in enumerate(SHORT):
        ids = tokenizer.text_to_ids(text)
        length = len(ids) + 1
        assert rows.lengths[row] == length
        assert rows.input_ids[row, :length].tolist() == [tokenizer.bos, *ids]
        assert rows.labels[row, :length].tolist() == [*ids, tokenizer.eod]
        assert (rows.labels[row, length:] == IGNORE_INDEX).all()
        assert rows.loss_mask[row].tolist() == [1.0] * length + [0.0] * (220 - length)
        assert rows.position_ids[row, :length].tolist() == list(range(length))
    assert rows.byte_count == sum(len(text.encode()) for text in SHORT)
    assert batch.dropped_bytes == 0
    assert batch.token_count == int(batch.student.loss_mask.sum())


def test_chunks_are_those_of_the_aligner_and_a_last_one_for_the_ends():
    batch = collator(220, 220)(SHORT).alignments["sp"]
    aligner = TokenAligner(student_tokenizer(), teacher_tokenizer())
    count = 0
    for row, text in enumerate(SHORT):
        alignment = aligner.align(text)
        end = alignment.chunk_count
        for ids, expected in (
            (batch.student_chunk_id[row], alignment.student_chunk_id),
            (batch.teacher_chunk_id[row], alignment.teacher_chunk_id),
        ):
            numbered = np.where(expected == NO_CHUNK, NO_CHUNK, expected + count)
            assert ids[: len(expected) + 1].tolist() == [*numbered, count + end]
            assert (ids[len(expected) + 1 :] == NO_CHUNK).all()
        count += end + 1
    assert batch.chunk_count == count


def test_a_teacher_with_the_same_tokenizer_shares_the_tensors():
    batch = collator()(TEXTS[:4])
    for name in ("same", "own"):
        assert batch.teachers[name] is batch.student
        ids = batch.alignments[name].student_chunk_id
        assert batch.alignments[name].teacher_chunk_id is ids
        is_label = batch.student.labels != IGNORE_INDEX
        assert ids[is_label].tolist() == list(range(batch.token_count))
        assert (ids[~is_label] == NO_CHUNK).all()


def test_a_text_that_is_too_long_is_cut_where_both_models_can_be_and_counted():
    text = TEXTS[-2]
    batch = collator(40, 40)([text])
    student = batch.student
    ids = student.labels[0, : student.lengths[0]].tolist()
    its = batch.teachers["sp"].labels[0, : batch.teachers["sp"].lengths[0]].tolist()
    taken = len(text.encode()) - batch.dropped_bytes
    assert ids == student_tokenizer().text_to_ids(text)[: len(ids)]
    assert its == teacher_tokenizer().text_to_ids(text)[: len(its)]
    assert student_tokenizer().byte_ends(ids)[-1] == taken == student.byte_count
    assert teacher_tokenizer().byte_ends(its)[-1] == taken
    assert 0 < batch.dropped_bytes < len(text.encode())
    assert batch.alignments["sp"].student_chunk_id[0, len(ids) - 1] != NO_CHUNK


def test_rows_are_filled_up_to_multiples():
    teacher = TeacherCTSpec(
        name="sp",
        tokenizer=teacher_tokenizer(),
        max_length=70,
        pad_id=7,
        make_sequence_length_divisible_by=32,
    )
    batch = CrossTokenizerCollator(
        student_tokenizer(), 60, [teacher], make_sequence_length_divisible_by=16
    )(TEXTS[:2])
    assert batch.student.input_ids.shape == (2, 64)
    assert batch.teachers["sp"].input_ids.shape == (2, 96)
    assert batch.teachers["sp"].input_ids[0, -1] == 7
    assert batch.student.input_ids[0, -1] == student_tokenizer().pad


class Leaderless:
    """A tokenizer without BOS and end of document, as some byte-level ones are."""

    bos = eod = pad = None

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


def test_without_a_leading_token_the_first_chunk_is_dropped_on_both_sides():
    text = "Some words to read."
    student = Leaderless(student_tokenizer())
    batch = CrossTokenizerCollator(
        student, 30, [TeacherCTSpec(name="sp", tokenizer=teacher_tokenizer())]
    )([text])
    ids = student_tokenizer().text_to_ids(text)
    alignment = TokenAligner(student_tokenizer(), teacher_tokenizer()).align(text)
    count = alignment.chunk_count - 1
    assert batch.student.input_ids[0, : len(ids) - 1].tolist() == ids[:-1]
    assert batch.student.labels[0, : len(ids)].tolist() == [*ids[1:], IGNORE_INDEX]
    assert batch.alignments["sp"].chunk_count == count
    expected = [chunk - 1 for chunk in alignment.student_chunk_id[1:]]
    assert batch.alignments["sp"].student_chunk_id[0, : len(ids) - 1].tolist() == expected
    assert batch.alignments["sp"].teacher_chunk_id[0].max() == count - 1


def test_a_batch_is_the_same_from_a_copy_and_from_workers():
    own = collator()
    expected = flat(own(TEXTS[:6]))
    assert flat(pickle.loads(pickle.dumps(own))(TEXTS[:6])) == expected
    loader = DataLoader(TEXTS[:6], batch_size=6, collate_fn=own, num_workers=1)
    assert [flat(batch) for batch in loader] == [expected]


@pytest.mark.skipif("MEGATRON_EXT_ALL_TEXT" not in os.environ, reason="a new process takes long")
def test_a_batch_is_the_same_from_a_spawned_worker():
    own = collator()
    loader = DataLoader(
        TEXTS[:6],
        batch_size=6,
        collate_fn=own,
        num_workers=1,
        multiprocessing_context=multiprocessing.get_context("spawn"),
    )
    assert [flat(batch) for batch in loader] == [flat(own(TEXTS[:6]))]


def test_a_record_without_a_text_is_refused():
    with pytest.raises(DataError, match=r"keys \['body'\].*text_key"):
        collator()([{"body": "x"}])
    assert collator(text_key="body")([{"body": "x"}]).student.byte_count == 1


def test_one_text_is_not_a_batch_of_its_characters():
    with pytest.raises(DataError, match="a batch is one text"):
        collator()("text")
    assert collator()(["text"]).student.byte_count == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "name cannot be used"),
        ({"max_length": 0}, "max_length cannot be used; got 0"),
        ({"weight": float("nan")}, "weight cannot be used; got nan"),
        ({"weight": -1.0}, "weight cannot be used"),
        ({"pad_id": -1}, "pad_id cannot be used"),
        ({"make_sequence_length_divisible_by": 0}, "divisible_by cannot be used"),
        ({"projection": "file"}, "needs no projection"),
    ],
)
def test_a_teacher_that_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        TeacherCTSpec(**{"name": "a"} | options)


def test_lengths_and_names_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="two teachers have one name; got 'a'"):
        CrossTokenizerCollator(
            student_tokenizer(), 8, [TeacherCTSpec(name="a"), TeacherCTSpec(name="a")]
        )
    with pytest.raises(ConfigError, match="no room for a token of a text; got 1 positions"):
        CrossTokenizerCollator(student_tokenizer(), 1)
    with pytest.raises(ConfigError, match="student_length is not a number; got dict"):
        CrossTokenizerCollator(student_tokenizer(), {"a": teacher_tokenizer()})
    with pytest.raises(ConfigError, match="got str; expected TeacherCTSpec; pass"):
        CrossTokenizerCollator(student_tokenizer(), 8, {"a": teacher_tokenizer()})


@pytest.mark.parametrize("multiple", [1, 16, 50, 1000])
def test_rows_lose_padding_and_nothing_else(multiple):
    texts = TEXTS[:3]
    whole, short = collator(220, 230)(texts), collator(220, 230, row_multiple=multiple)(texts)
    for full, cut, most in (
        (whole.student, short.student, 220),
        (whole.teachers["sp"], short.teachers["sp"], 230),
    ):
        longest = int(full.lengths.max())
        length = min(-(-longest // multiple) * multiple, most)
        assert cut.input_ids.shape == (3, length)
        for name in ("input_ids", "labels", "loss_mask"):
            assert torch.equal(getattr(cut, name), getattr(full, name)[:, :length])
        assert (full.labels[:, length:] == IGNORE_INDEX).all()
        assert torch.equal(cut.lengths, full.lengths)
    for name, alignment in whole.alignments.items():
        its = short.alignments[name]
        assert its.chunk_count == alignment.chunk_count > 0
        for ids, cut_ids in (
            (alignment.student_chunk_id, its.student_chunk_id),
            (alignment.teacher_chunk_id, its.teacher_chunk_id),
        ):
            assert torch.equal(cut_ids, ids[:, : cut_ids.shape[1]])
        # Spans count positions of all rows, so that they are of the shorter rows too.
        first = its.student_spans[:, 0]
        assert torch.equal(its.student_chunk_id.flatten()[first], torch.arange(len(first)))
    assert short.teachers["same"] is short.student
    assert short.token_count == whole.token_count


def test_rows_without_a_text_are_as_short_as_rows_may_be():
    batch = collator(64, 80, row_multiple=8)([PackedSample(()), PackedSample(())])
    assert batch.student.input_ids.shape == (2, 8)
    assert batch.teachers["sp"].input_ids.shape == (2, 8)


def test_a_multiple_below_one_is_refused():
    with pytest.raises(ConfigError, match="row_multiple of the student is too small"):
        collator(row_multiple=0)


def same(one, other):
    """Whether two records hold equal tensors and values."""
    if torch.is_tensor(one):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return one == other


@pytest.mark.parametrize("length", [40, 220])
def test_a_mapping_of_tensors_makes_the_batch_again(length):
    batch = collator(length, length, filled_multiple=8)(TEXTS)
    tensors = batch.tensors()
    assert {len(tensor) for tensor in tensors.values()} == {len(TEXTS)}
    assert same(CrossTokenizerBatch.of_tensors(tensors), batch)
    assert same(collator(length, length, filled_multiple=8).tensors(TEXTS), tensors)


def test_packed_rows_survive_as_a_mapping(tmp_path):
    dataset = packed(tmp_path)
    samples = dataset[0, 0].samples
    batch = dataset.collator(samples)
    assert len(batch.student.cu_seqlens) > 2 * len(samples) + 1
    assert same(CrossTokenizerBatch.of_tensors(batch.tensors()), batch)


def test_rows_cut_out_of_a_mapping_are_the_batch_of_these_rows():
    tensors = collator(220, 220).tensors(SHORT)
    rows = CrossTokenizerBatch.of_tensors({name: part[2:5] for name, part in tensors.items()})
    expected = collator(220, 220)(SHORT[2:5])
    assert same(rows.alignments, expected.alignments)
    assert same(rows.teachers["sp"].labels, expected.teachers["sp"].labels)
    assert rows.token_count == expected.token_count


def test_a_mapping_that_is_no_batch_is_refused():
    tensors = collator().tensors(TEXTS[:2])
    del tensors["teachers.sp.shift_labels"]
    with pytest.raises(DataError, match=r"expected.*'teachers.sp.shift_labels'"):
        CrossTokenizerBatch.of_tensors(tensors)
