"""A run's own data: texts, conversations, packing, blends and workers, from its configuration."""

import dataclasses
import json

import pytest
import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.data.global_batches import Replica
from megatron_ext.errors import TokenizerError
from megatron_ext.training.config import DataConfig
from megatron_ext.training.microbatch import Microbatch
from megatron_ext.training.run_data import RunData
from tests.data.readers import student_tokenizer, teacher_tokenizer
from tests.training.tiny_run import student_run, write_corpus

WHOLE = Replica(0, 1, 2)


def run_data(folder, **data):
    settings = {"train": (str(write_corpus(folder)),)}
    config = dataclasses.replace(
        student_run(folder, "run", global_batch_size=8), data=DataConfig(**settings | data)
    )
    teachers = {"teacher": (teacher_tokenizer(), 60)}
    return RunData.read(config, student_tokenizer(), teachers)


def microbatches(data):
    return [Microbatch.of(data.collator(rows), {}) for rows in data.batches(WHOLE).take()]


def test_rows_of_one_text_need_no_mask_and_packed_rows_do(tmp_path):
    for batch in microbatches(run_data(tmp_path)):
        assert batch.student.attention_mask is None
        assert batch.teachers["teacher"].attention_mask is None
    packed = microbatches(run_data(tmp_path, packing=True))
    masked = [b.student for b in packed if b.student.attention_mask is not None]
    assert masked
    for side in masked:
        assert side.attention_mask is not None
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
    assert data.held_out is not None
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
    assert data.held_out is not None
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
