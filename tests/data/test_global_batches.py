"""Global batches are the same under every layout, go on exactly, and follow the blend."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest

from megatron_ext import ArrowTextDataset
from megatron_ext.data.global_batches import (
    DataFaults,
    GlobalBatches,
    Place,
    ReadAhead,
    Replica,
    WeightedDataset,
)
from megatron_ext.data.packed_dataset import PackedTextDataset
from megatron_ext.data.reading_order import Blend, Source, read_blend
from megatron_ext.data.row_streams import stream_count
from megatron_ext.errors import ConfigError, DataError
from tests.data.readers import collator, student_ids, write_corpus
from tests.training.test_run_data import WHOLE, run_data

ROWS = 8

UNCUT = " достаточно"
"""One token of the student, five of the teacher."""


def dataset(folder, **options):
    documents = ArrowTextDataset(write_corpus(folder), cache_dir=folder / "index")
    shape = {"block_bytes": 200, "run_documents": 1}
    return PackedTextDataset(documents, collator(96, 110), **shape | options)


def batches(sources, rank=0, size=1, micro=2, **options):
    replica = Replica(rank, size, micro)
    return GlobalBatches(sources, global_batch_size=ROWS, replica=replica, seed=5, **options)


def one(folder, **options):
    return [WeightedDataset(1.0, dataset(folder, **options))]


def flat(batch):
    return list(chain.from_iterable(batch))


def rows(reader, iterations):
    return [[[student_ids(s) for s in micro] for micro in reader.take()] for _ in range(iterations)]


@pytest.mark.parametrize(("size", "micro"), [(2, 1), (4, 2), (2, 4), (8, 1)])
def test_replicas_share_the_rows_of_one(tmp_path, size, micro):
    sources = one(tmp_path)
    whole = [flat(batch) for batch in rows(batches(sources, micro=1), 6)]
    parts = [rows(batches(sources, rank, size, micro), 6) for rank in range(size)]
    for iteration, expected in enumerate(whole):
        microbatches = len(parts[0][iteration])
        dealt = [
            row for index in range(microbatches) for part in parts for row in part[iteration][index]
        ]
        assert dealt == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_under_another_layout(tmp_path, workers):
    sources = one(tmp_path)
    expected = [flat(batch) for batch in rows(batches(sources), 7)]
    before = [batches(sources, rank, 2, num_workers=workers) for rank in range(2)]
    for reader in before:
        rows(reader, 3)
    state = before[0].state([reader.positions() for reader in before])
    after = [batches(sources, rank, 4, 1) for rank in range(4)]
    for reader in after:
        reader.load_state(state)
    dealt = [rows(reader, 4) for reader in after]
    for iteration in range(4):
        found = [row for index in range(2) for part in dealt for row in part[iteration][index]]
        assert found == expected[3 + iteration]


def test_every_sample_comes_once_an_epoch(tmp_path):
    sources = one(tmp_path)
    data = sources[0].dataset
    blocks = [data[0, block] for block in range(data.block_count(0))]
    expected = Counter(tuple(student_ids(sample)) for block in blocks for sample in block.samples)
    reader = batches(sources)
    streams = reader._streams[0]
    found = Counter()
    for stream in streams.positions:
        while True:
            sample = streams.take(stream)
            if streams.positions[stream].epoch > 0:
                break
            found[tuple(student_ids(sample))] += 1
    assert found == expected


def test_rows_without_packing_hold_one_text(tmp_path):
    reader = batches(one(tmp_path, pack=False))
    samples = [sample for micro in reader.take() for sample in micro]
    assert [len(sample.pieces) for sample in samples] == [1] * ROWS


def test_the_blend_is_never_off_by_more_than_a_row(tmp_path):
    blend = Blend((0.7, 0.2, 0.1), seed=1)
    counts = [0, 0, 0]
    by_row = np.zeros((ROWS, 3))
    for iteration in range(200):
        chosen, counts = blend.sources(iteration, counts, ROWS)
        by_row[np.arange(ROWS), chosen] += 1
        shares = np.array(blend.weights) * (iteration + 1) * ROWS
        assert (abs(np.array(counts) - shares) <= 1).all()
    # No row of the batch is one source's alone.
    assert (by_row[:, 1] > 15).all()


def test_sources_are_read_by_their_weights(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    first, second = (dataset(folder) for folder in folders)
    sources = [WeightedDataset(3.0, first), WeightedDataset(1.0, second)]
    whole = [flat(batch) for batch in rows(batches(sources, micro=1), 5)]
    parts = [rows(batches(sources, rank, 2, 1), 5) for rank in range(2)]
    for iteration, expected in enumerate(whole):
        dealt = [row for i in range(4) for part in parts for row in part[iteration][i]]
        assert dealt == expected
    assert batches(sources)._blend.weights == (3.0, 1.0)


def test_weights_and_paths_are_read_as_megatron_writes_them():
    assert read_blend(["a", "b"], where="data.train") == [Source(1.0, ("a", "b"))]
    assert read_blend(["0.3", "a", "2", "b"], where="data.train") == [
        Source(0.3, ("a",)),
        Source(2.0, ("b",)),
    ]
    for entries in (["0.3", "a", "b"], ["a", "0.3"], ["-1", "a"], ["nan", "a"]):
        with pytest.raises(ConfigError, match=r"data\.train"):
            read_blend(entries, where="data.train")


def test_a_state_of_other_data_is_refused(tmp_path):
    reader = batches(one(tmp_path))
    state = reader.state([reader.positions()])
    other = tmp_path / "other"
    other.mkdir()
    path = write_corpus(other)
    path.write_text(path.read_text().replace("learns", "teaches"))
    documents = ArrowTextDataset(path, cache_dir=other / "index")
    changed = PackedTextDataset(documents, collator(96, 110), block_bytes=200, run_documents=1)
    with pytest.raises(ConfigError, match="other data"):
        batches([WeightedDataset(1.0, changed)]).load_state(state)


def test_text_that_fits_no_row_ends_in_an_error(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(UNCUT)
    documents = ArrowTextDataset(path, cache_dir=tmp_path / "index")
    narrow = PackedTextDataset(
        documents, collator(3, 3, append_eod=False), block_bytes=10, run_documents=1
    )
    with pytest.raises(DataError, match="fits"):
        batches([WeightedDataset(1.0, narrow)]).take()


@pytest.mark.parametrize(
    ("blocks", "rows", "expected"), [(1, 8, 1), (9, 8, 4), (16, 8, 8), (100, 6, 6), (7, 9, 3)]
)
def test_streams_divide_a_global_batch(blocks, rows, expected):
    assert stream_count(blocks, rows) == expected


Ids = list[list[int]]


def first_ids(microbatches):
    samples = [sample for rows in microbatches for sample in rows]
    return [[int(number) for number in sample.pieces[0].student_ids] for sample in samples]


def state(batches):
    found = batches.state([batches.positions()])
    return found


def test_what_is_taken_and_the_state_behind_it_do_not_depend_on_the_depth(tmp_path):
    data = run_data(tmp_path)
    plain = data.batches(WHOLE)
    ahead = ReadAhead(data.batches(WHOLE), first_ids, depth=2, total=4)
    assert state(ahead) == state(plain)
    for iteration in range(1, 5):
        assert ahead.take() == first_ids(plain.take())
        assert ahead.iteration == iteration
        assert state(ahead) == state(plain)
        coming = [number for number, _ in ahead.ahead()]
        # Nothing is read that the run does not train on.
        assert coming == [n for n in (iteration + 1, iteration + 2) if n <= 4]


def test_a_run_that_is_resumed_takes_what_was_only_read_ahead(tmp_path):
    data = run_data(tmp_path)
    first = ReadAhead(data.batches(WHOLE), first_ids, depth=2)
    first.take()
    saved = state(first)
    expected = [first.take(), first.take()]
    again = ReadAhead(data.batches(WHOLE), first_ids, depth=1)
    again.take()
    again.load_state(saved)
    assert [again.take(), again.take()] == expected
    assert again.iteration == 3


class _Broken:
    """Global batches of which the third cannot be read; each counts what it met."""

    def __init__(self):
        self.iteration = 0

    def place(self):
        return Place(self.iteration, [], [])

    def take(self):
        if self.iteration == 2:
            raise DataError("a document cannot be read")
        self.iteration += 1
        return []

    def faults_since_asked(self):
        return DataFaults([self.iteration], 10 * self.iteration, 100 * self.iteration)


def test_counts_and_errors_are_those_of_the_batch_that_is_taken():
    broken = _Broken()
    ahead = ReadAhead(broken, lambda rows: rows, depth=3)
    for iteration in (1, 2):
        ahead.take()
        assert ahead.faults_since_asked() == ([iteration], 10 * iteration, 100 * iteration)
        assert ahead.faults_since_asked() == ((), 0, 0)
    with pytest.raises(DataError, match="a document cannot be read"):
        ahead.take()
