import json
from collections import Counter
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from megatron_ext import ArrowTextDataset
from megatron_ext.constants import IGNORE_INDEX, NO_CHUNK
from megatron_ext.data.packed_batches import PackedBatches, ResumableSampler
from megatron_ext.data.packed_dataset import PackedTextDataset
from megatron_ext.errors import ConfigError, DataError
from tests.data.readers import TEXTS, collator, packed, student_tokenizer, teacher_tokenizer


def samples_of(dataset, epoch=0):
    blocks = range(dataset.block_count(epoch))
    return [sample for block in blocks for sample in dataset[epoch, block].samples]


def tokens_of(batch):
    return batch.student.input_ids.tolist()


def test_every_byte_of_the_corpus_is_in_one_sample_of_an_epoch(tmp_path):
    dataset = packed(tmp_path, collator(120, 130))
    long = TEXTS[-2].encode()
    for side in (0, 1):
        pieces = pieces_of(samples_of(dataset), side)
        parts = sorted(pieces - Counter(text.encode() for text in TEXTS), key=long.index)
        whole = pieces - Counter(parts)
        assert whole == Counter(text.encode() for text in TEXTS if text.encode() != long)
        assert len(parts) > 2
        assert b"".join(parts) == long
    assert all(dataset[0, block].dropped_bytes == 0 for block in range(dataset.block_count(0)))


def pieces_of(samples, side):
    """The bytes of every piece, as its tokens say them."""
    tokenizer = teacher_tokenizer() if side else student_tokenizer()
    pieces = [piece for sample in samples for piece in sample.pieces]
    ids = [piece.teachers[0].ids if side else piece.student_ids for piece in pieces]
    texts = [b"".join(tokenizer.token_bytes(i) or b"" for i in row.tolist()) for row in ids]
    # The first piece of a text has the teacher's dummy prefix.
    starts = {text.encode()[:8] for text in TEXTS}
    return Counter(
        text[1:] if side and text[:1] == b" " and text[1:9] in starts else text for text in texts
    )


def test_whole_documents_have_the_ids_of_their_tokenizers(tmp_path):
    samples = samples_of(packed(tmp_path, collator(400, 400)))
    pieces = [piece for sample in samples for piece in sample.pieces]
    expected = sorted(
        (student_tokenizer().text_to_ids(text), teacher_tokenizer().text_to_ids(text))
        for text in TEXTS
    )
    assert expected == sorted(
        (piece.student_ids.tolist(), piece.teachers[0].ids.tolist()) for piece in pieces
    )


def test_nothing_goes_over_the_end_of_a_document(tmp_path):
    reader = collator(220, 240, segment_multiple=4)
    samples = samples_of(packed(tmp_path, reader))[:4]
    batch = reader(samples)
    alignment = batch.alignments["sp"]
    assert max(len(sample.pieces) for sample in samples) > 2
    segments = [
        _segments(side, chunk_id)
        for side, chunk_id in (
            (batch.student, alignment.student_chunk_id),
            (batch.teachers["sp"], alignment.teacher_chunk_id),
        )
    ]
    pieces = [piece for sample in samples for piece in sample.pieces]
    assert len(segments[0]) == len(segments[1]) == len(pieces)
    for piece, own, its in zip(pieces, *segments, strict=True):
        for (inputs, labels, positions, _), tokenizer, ids in (
            (own, student_tokenizer(), piece.student_ids.tolist()),
            (its, teacher_tokenizer(), piece.teachers[0].ids.tolist()),
        ):
            assert labels == [*ids, tokenizer.eod][: len(labels)]
            assert inputs == [tokenizer.bos, *ids][: len(labels)]
            assert positions == list(range(len(labels)))
            assert len(labels) == len(ids) + piece.is_end
        assert own[3] == its[3]
        assert own[3] == set(range(min(own[3]), max(own[3]) + 1))


def _segments(side, chunk_id):
    """Inputs, labels, positions and chunks of each segment that has labels."""
    found = []
    columns = (side.input_ids, side.labels, side.position_ids, chunk_id)
    for start, stop in pairwise(side.cu_seqlens.tolist()):
        inputs, labels, positions, chunks = (c.flatten()[start:stop].tolist() for c in columns)
        count = sum(label != IGNORE_INDEX for label in labels)
        assert all(label != IGNORE_INDEX for label in labels[:count])
        assert (stop - start) % 4 == 0
        if count:
            found.append(
                (inputs[:count], labels[:count], positions[:count], {*chunks} - {NO_CHUNK})
            )
    return found


def test_batches_do_not_depend_on_workers(tmp_path):
    dataset = packed(tmp_path)
    runs = [
        [tokens_of(batch) for batch in PackedBatches(dataset, 4, epochs=2, num_workers=workers)]
        for workers in (0, 1, 2)
    ]
    assert len(runs[0]) > 6
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("handed_out", [1, 5, 9])
def test_a_resumed_run_reads_on_exactly(handed_out, workers, tmp_path):
    dataset = packed(tmp_path)
    expected = [tokens_of(batch) for batch in islice(PackedBatches(dataset, 3), 12)]
    stopped = PackedBatches(dataset, 3, num_workers=workers)
    before = [tokens_of(batch) for batch in islice(stopped, handed_out)]
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = PackedBatches(dataset, 3)
    resumed.load_state_dict(state)
    after = [tokens_of(batch) for batch in islice(resumed, 12 - handed_out)]
    assert before + after == expected


def test_ranks_share_an_epoch_without_loss_or_repetition(tmp_path):
    dataset = packed(tmp_path)
    one = [row for batch in PackedBatches(dataset, 5, epochs=1) for row in tokens_of(batch)]
    ranks = [
        [
            row
            for batch in PackedBatches(
                dataset, 2, rank=rank, world_size=3, epochs=1, ends_unevenly=True
            )
            for row in tokens_of(batch)
        ]
        for rank in range(3)
    ]
    assert all(ranks)
    assert sorted(row for rank in ranks for row in rank) == sorted(one)


def test_epochs_that_would_end_at_different_batches_are_refused(tmp_path):
    dataset = packed(tmp_path)
    with pytest.raises(ConfigError, match=r"end at different batches; got epochs=1 on 2 ranks"):
        PackedBatches(dataset, 2, world_size=2, epochs=1)
    endless = [iter(PackedBatches(dataset, 7, rank=rank, world_size=2)) for rank in (0, 1)]
    for _ in range(6):
        assert [len(next(batches).student.input_ids) for batches in endless] == [7, 7]


def test_epochs_have_other_orders_and_seeds_too(tmp_path):
    dataset, other = packed(tmp_path), packed(tmp_path, seed=7)
    orders = [
        [n for b in range(d.block_count(epoch)) for n in d.order.documents(epoch, b).tolist()]
        for d, epoch in ((dataset, 0), (dataset, 1), (other, 0))
    ]
    assert all(sorted(order) == list(range(len(TEXTS))) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    in_order = packed(tmp_path, shuffle=False).order
    blocks = range(in_order.block_count(0))
    assert [n for b in blocks for n in in_order.documents(3, b).tolist()] == [*range(len(TEXTS))]


UNCUT = " достаточно"
"""One token of the student, five of the teacher."""


def test_a_stretch_that_cannot_be_cut_is_dropped_and_counted(tmp_path):
    (tmp_path / "a.txt").write_text(f"one two{UNCUT} and more")
    reader = collator(3, 3, append_eod=False)
    dataset = PackedTextDataset(ArrowTextDataset(tmp_path / "a.txt"), reader)
    batches = PackedBatches(dataset, 8, epochs=1)
    pieces = pieces_of(samples_of(dataset), 0)
    assert pieces == {b"one two": 1, b" and more": 1}
    assert sum(batch.student.byte_count for batch in batches) == len("one two and more")
    assert batches.dropped_bytes == len(UNCUT.encode())


def test_a_corpus_of_which_nothing_fits_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text(UNCUT)
    reader = collator(3, 3, append_eod=False)
    dataset = PackedTextDataset(ArrowTextDataset(tmp_path / "a.txt"), reader)
    for epochs in (None, 1):
        with pytest.raises(DataError, match=r"no text fits the models' .*; got 21 bytes of text"):
            next(iter(PackedBatches(dataset, 1, epochs=epochs)))


def test_a_state_of_another_run_is_refused(tmp_path):
    dataset = packed(tmp_path)
    state = PackedBatches(dataset, 2).state_dict()
    for name, value in (("seed", 1), ("world_size", 2), ("documents", "x"), ("lengths", [1])):
        with pytest.raises(ConfigError, match=f"another {name}"):
            PackedBatches(dataset, 2).load_state_dict(state | {name: value})
    with pytest.raises(ConfigError, match="fewer blocks of documents than ranks; got 1 for 2"):
        PackedBatches(packed(tmp_path, block_bytes=1 << 20), 2, world_size=2)
    with pytest.raises(ConfigError, match="there is no such rank; got 2; expected 0 to 1"):
        PackedBatches(dataset, 2, rank=2, world_size=2)


@given(size=st.integers(1, 30), world_size=st.integers(1, 5), epochs=st.integers(1, 4))
def test_ranks_deal_out_epochs_without_loss_and_end_together(size, world_size, epochs):
    ranks = [
        list(ResumableSampler(size, rank=rank, world_size=world_size, epochs=epochs))
        for rank in range(world_size)
    ]
    whole = list(ResumableSampler(size, epochs=epochs))
    endless = iter(ResumableSampler(size))
    more = list(islice(endless, len(whole) + -len(whole) % world_size))
    assert more[: len(whole)] == whole
    assert [more[rank::world_size] for rank in range(world_size)] == ranks
    assert {len(items) for items in ranks} == {len(more) // world_size}
    for epoch in range(epochs):
        assert sorted(whole[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(used=st.integers(0, 70), world_size=st.integers(1, 4))
def test_a_state_goes_on_exactly(used, world_size):
    options = {"seed": 3, "rank": world_size - 1, "world_size": world_size}
    expected = list(islice(ResumableSampler(23, **options), used + 40))
    stopped, resumed = ResumableSampler(23, **options), ResumableSampler(23, **options)
    stopped.advance(used)
    resumed.load_state_dict(stopped.state_dict())
    assert list(islice(resumed, 40)) == expected[used:]


def test_a_state_goes_on_with_other_ranks():
    whole = list(ResumableSampler(10, epochs=3))
    stopped = ResumableSampler(10, world_size=2)
    stopped.advance(6)
    rest = []
    for rank in range(3):
        sampler = ResumableSampler(10, rank=rank, world_size=3, epochs=3)
        sampler.load_state_dict(stopped.state_dict())
        assert len(sampler) == len(list(sampler))
        rest += list(sampler)
    assert sorted(rest) == sorted(whole[12:])
    stopped.advance(1)
    with pytest.raises(ConfigError, match="do not divide among the ranks; got 14 items"):
        ResumableSampler(10, world_size=3).load_state_dict(stopped.state_dict())


def test_a_loader_that_reads_ahead_is_resumed_by_what_was_used():
    data = list(range(40))
    sampler = ResumableSampler(40, epochs=1)
    expected = list(sampler)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2)
    used = []
    for batch in islice(loader, 3):
        used += batch.tolist()
        sampler.advance(len(batch))
    assert used == expected[:12]
    assert list(sampler) == expected[12:]


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="size is too small; got 0"):
        ResumableSampler(0)
    with pytest.raises(ConfigError, match="no such rank; got 1; expected 0 to 0"):
        ResumableSampler(1, rank=1)
    with pytest.raises(ConfigError, match="another seed; got 1234; expected 5"):
        ResumableSampler(4, seed=5).load_state_dict(ResumableSampler(4).state_dict())
    with pytest.raises(TypeError, match="no length"):
        len(ResumableSampler(4))
