"""A run's own data, from its configuration; and what each context-parallel rank reads of it."""

import json
from types import SimpleNamespace

import pytest
import torch

from megatron_ext import ArrowTextDataset
from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.data.aligner import PackedSample
from megatron_ext.data.global_batches import Replica
from megatron_ext.data.packed_dataset import RefusedDocument
from megatron_ext.distributed.context_parallel import ContextRank
from megatron_ext.errors import TokenizerError
from megatron_ext.training.configuration.config import DataConfig
from megatron_ext.training.faults import log_left_out, log_refused
from megatron_ext.training.microbatch import Microbatch
from megatron_ext.training.run_data import RunData, summary
from megatron_ext.training.run_folder import QUARANTINE_FILE
from tests.data.readers import student_tokenizer, teacher_tokenizer
from tests.training.tiny_run import changed, student_run, write_corpus

CPU = torch.device("cpu")
WHOLE = Replica(0, 1, 2)


def run_data(folder, *, size=1, length=60, **data):
    """Of rows of 41 positions, of the teacher's ``length``, that divide over ``size`` ranks."""
    config = student_run(folder, "run", global_batch_size=8, context_parallel_size=size)
    config = changed(config, data=DataConfig(train=(str(write_corpus(folder)),), **data))
    return RunData.read(config, student_tokenizer(), {"teacher": (teacher_tokenizer(), length)})


def microbatches(data):
    taken = data.batches(WHOLE).take()
    return [Microbatch.of(data.collator(rows), {}).to(CPU) for rows in taken]


def test_rows_of_one_text_need_no_mask_and_packed_rows_do(tmp_path):
    for batch in microbatches(run_data(tmp_path)):
        assert batch.student.attention_mask is None
        assert batch.teachers["teacher"].attention_mask is None
    packed = microbatches(run_data(tmp_path, packing=True))
    masked = [b.student for b in packed if b.student.attention_mask is not None]
    assert masked
    for side in masked:
        expected = _slow_mask(side.position_ids)
        seen = side.labels[:, :] != IGNORE_INDEX
        rows = torch.nonzero(seen)
        for row, position in rows.tolist():
            assert torch.equal(side.attention_mask[row, 0, position], expected[row, position])


def _slow_mask(position_ids):
    """[B, T, T] what each position does not see: what is not of its own text up to itself."""
    rows, length = position_ids.shape
    hidden = torch.ones(rows, length, length, dtype=torch.bool)
    for row in range(rows):
        for position in range(length):
            first = position - int(position_ids[row, position])
            hidden[row, position, first : position + 1] = False
    return hidden


def test_a_packed_run_has_fewer_rows_an_epoch(tmp_path):
    rows = [
        sum(len(source.dataset[0, block].samples) for block in range(source.dataset.block_count(0)))
        for packing in (False, True)
        for source in run_data(tmp_path, packing=packing).sources
    ]
    assert rows[1] < rows[0]


def test_held_out_labels_are_the_text(tmp_path):
    data = run_data(tmp_path, validation=(str(write_corpus(tmp_path)),))
    found = []
    bytes_of_labels = 0
    for microbatch_rows in data.held_out.global_batches(WHOLE):
        for rows in microbatch_rows:
            batch = Microbatch.of(data.held_out.dataset.collator(rows), {})
            labels = batch.student.labels
            found += labels[labels != IGNORE_INDEX].tolist()
            bytes_of_labels += batch.student.byte_count
    texts = [json.loads(line)["text"] for line in (tmp_path / "train.jsonl").open()]
    spelled = b"".join(student_tokenizer().token_bytes(i) or b"" for i in found)
    assert spelled == "".join(texts).encode()
    assert bytes_of_labels == len(spelled)


def test_replicas_share_the_held_out_rows(tmp_path):
    data = run_data(tmp_path, validation=(str(write_corpus(tmp_path)),))
    whole = [sum(map(len, part)) for part in data.held_out.global_batches(Replica(0, 1, 2))]
    parts = [
        [sum(map(len, part)) for part in data.held_out.global_batches(Replica(rank, 4, 2))]
        for rank in range(4)
    ]
    assert [sum(counts) for counts in zip(*parts, strict=True)] == whole
    assert {count for part in parts for count in part} == {2}


@pytest.mark.parametrize("bad_documents", ["stop", "skip"])
def test_a_document_that_no_tokenizer_takes(tmp_path, bad_documents):
    data = run_data(tmp_path, bad_documents=bad_documents)
    (source,) = data.sources
    aligner = source.dataset.collator.aligner
    real, bad = aligner.align, source.dataset.documents.content(3)

    def align(contents):
        if bad in contents:
            raise TokenizerError("the text cannot be taken")
        return real(contents)

    source.dataset.collator.aligner = type("Aligner", (), {"align": staticmethod(align)})()
    blocks = range(source.dataset.block_count(0))
    if bad_documents == "stop":
        with pytest.raises(TokenizerError, match=r"train\.jsonl:4: the text cannot be taken"):
            [source.dataset[0, block] for block in blocks]
        return
    refused = [d for block in blocks for d in source.dataset[0, block].refused]
    texts = [json.loads(line)["text"] for line in (tmp_path / "train.jsonl").open()]
    expected = {f"{tmp_path}/train.jsonl:{n}" for n, t in enumerate(texts, 1) if t == bad}
    assert {document.place for document in refused} == expected


LENGTHS = (41, 53)


def context_data(folder, *, packing, size):
    return run_data(folder, packing=packing, size=size, length=LENGTHS[1])


def batches(data):
    """One more than a run has: of a row without a text."""
    blank = [PackedSample(())] * 2
    return [data.collator(rows) for rows in [*data.batches(WHOLE).take(), blank]]


@pytest.mark.parametrize("packing", [False, True], ids=["alone", "packed"])
@pytest.mark.parametrize("size", [2, 3])
def test_filled_rows_hold_the_texts_of_plain_ones(tmp_path, size, packing):
    plain = batches(context_data(tmp_path, packing=packing, size=1))
    filled = batches(context_data(tmp_path, packing=packing, size=size))
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
    for sides in batches(context_data(tmp_path, packing=packing, size=size)):
        whole = Microbatch.of(sides, {}).to(CPU)
        ranks = [ContextRank(rank=rank, size=size) for rank in range(size)]
        parts = [Microbatch.of(sides, {}, context=rank).to(CPU) for rank in ranks]
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
            assert torch.equal(part.attention_mask, whole.attention_mask[:, :, own])


def test_parts_move_to_a_device_and_whole_rows_are_sent_once(tmp_path):
    data = context_data(tmp_path, packing=True, size=2)
    sides = batches(data)[0]
    part = Microbatch.of(sides, {}, context=ContextRank(rank=1, size=2))
    moved = part.to(CPU)
    assert torch.equal(moved.student.tokens, part.student.tokens)
    assert moved.student.tokens.shape[1] * 2 == moved.sides.student.input_ids.shape[1]
    whole = Microbatch.of(sides, {}).to(CPU)
    assert whole.student.tokens is whole.sides.student.input_ids


def test_the_record_of_the_data_has_the_places_of_what_was_left_out(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "good"}\n{"text": broken\n{"text": ""}\n')
    found = summary([SimpleNamespace(documents=ArrowTextDataset(path))])
    assert (found["documents"], found["empty_rows"], found["bad_rows"]) == (1, 1, 1)
    assert [place.split(": ")[0] for place in found["left_out"]] == [f"{path}:2", f"{path}:3"]


def test_bad_rows_are_in_the_quarantine_once_however_often_a_run_starts(tmp_path):
    path, log = tmp_path / "some.jsonl", tmp_path / QUARANTINE_FILE
    # Empty rows are not bad, and take no place of those that are.
    path.write_text('{"text": "good"}\n' + '{"text": ""}\n' * 12 + "broken\n" * 12)
    dataset = SimpleNamespace(documents=ArrowTextDataset(path))
    refused = RefusedDocument("held_out.jsonl:3", "too long")
    held_out = SimpleNamespace(dataset=dataset, refused=[refused])
    sources = [SimpleNamespace(dataset=dataset)]
    data = RunData(collator=None, sources=sources, held_out=held_out, config=None)
    log_left_out(tmp_path, data.left_out())
    at_start = log.read_text()
    assert [json.loads(line)["place"] for line in at_start.splitlines()] == [
        *(f"{path}:{row}" for row in range(14, 24)),
        "data.train",
        *(f"{path}:{row}" for row in range(14, 24)),
        "data.validation",
        "held_out.jsonl:3",
    ]
    assert '"reason": "2 more rows cannot be read"' in at_start
    log_refused(tmp_path, RefusedDocument("a:1", "é"), iteration=3)
    both = log.read_text()
    for _ in range(2):
        log_left_out(tmp_path, data.left_out())
        assert log.read_text() == both
    log_left_out(tmp_path, [])
    assert log.read_text() == both.removeprefix(at_start)
