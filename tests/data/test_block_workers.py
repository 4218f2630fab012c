"""A worker that dies costs nothing but the time to start it again."""

import os
import signal

import pytest

from megatron_ext import ArrowTextDataset
from megatron_ext.data.packed_batches import PackedBatches
from megatron_ext.data.packed_dataset import BlockWorkers, PackedTextDataset
from megatron_ext.data.reading_order import Position
from megatron_ext.data.row_streams import RowStreams
from megatron_ext.errors import DataError, TokenizerError
from tests.data.readers import collator, student_ids, write_corpus

STREAMS = (0, 1)
TAKEN = 24


class DyingDataset(PackedTextDataset):
    """One on which every worker dies, as by a lack of memory."""

    def __getitem__(self, key):
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def dataset(folder, kind=PackedTextDataset):
    documents = ArrowTextDataset(write_corpus(folder), cache_dir=folder / "index")
    return kind(documents, collator(96, 110), block_bytes=200, run_documents=1, refuse_bad=False)


def streams(source, **options):
    if options.get("num_workers"):
        options["multiprocessing_context"] = "fork"
    return RowStreams(source, stream_count=len(STREAMS), streams=STREAMS, **options)


def test_the_samples_behind_a_worker_that_was_killed_are_those_of_none(tmp_path):
    source = dataset(tmp_path)
    without = streams(source)
    expected = [student_ids(without.take(number % 2)) for number in range(TAKEN)]
    reader, found = streams(source, num_workers=2), []
    for number in range(TAKEN):
        if number in (5, 12):
            assert isinstance(reader._blocks, BlockWorkers)
            victim = reader._blocks._blocks._workers[number % 2]
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
            # What was read ahead is used up first: only then is the worker missed.
            reader._ready[number % 2].clear()
            reader.positions[number % 2] = reader.positions[number % 2]
        found.append(student_ids(reader.take(number % 2)))
    assert found == expected
    assert reader.restarts == 2
    reader.close()


def test_a_signal_to_the_whole_group_of_a_run_ends_no_worker_while_it_starts(tmp_path):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    reader = streams(dataset(tmp_path), num_workers=1)
    reader._open()
    assert isinstance(reader._blocks, BlockWorkers)
    (worker,) = reader._blocks._blocks._workers
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.pid, number)
    reader.take(0)
    assert reader.restarts == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    reader.close()


def test_workers_that_die_each_time_end_the_run_with_the_reason(tmp_path):
    reader = streams(dataset(tmp_path, DyingDataset), num_workers=1)
    with pytest.raises(DataError, match=r"die each time .* was ended by SIGKILL, after 3 starts"):
        reader.take(0)
    assert reader.restarts == 3
    batches = PackedBatches(reader.dataset, 1, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(DataError, match="after 3 starts"):
        next(iter(batches))


def test_a_document_is_refused_once_however_often_its_block_is_read(tmp_path):
    source = dataset(tmp_path)
    aligner = source.collator.aligner
    bad = {source.documents.content(number) for number in (1, 4, 6)}

    def align(contents):
        if bad.intersection(contents):
            raise TokenizerError("the text cannot be taken")
        return aligner.align(contents)

    source.collator.aligner = type("Aligner", (), {"align": staticmethod(align)})()
    whole = streams(source)
    refused_after = []
    for number in range(TAKEN):
        whole.take(number % 2)
        refused_after.append(list(whole.refused))
    assert refused_after[-1]
    state = dict.fromkeys(STREAMS, Position())
    found = []
    for number in range(TAKEN):
        resumed = streams(source)
        resumed.load_positions(state)
        resumed.take(number % 2)
        found += resumed.refused
        state = resumed.positions
        assert found == refused_after[number]
