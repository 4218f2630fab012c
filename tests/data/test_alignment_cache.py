import os
import pickle
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from megatron_ext.alignment import token_aligner
from megatron_ext.alignment.text_tokens import TextTokenizer
from megatron_ext.data.aligner import TextAligner
from megatron_ext.data.alignment_cache import MemoryStore, RecordStore, from_records, to_record
from megatron_ext.data.packed_batches import PackedBatches
from megatron_ext.errors import DataError
from tests.data.readers import TEXTS, collator, packed, student_tokenizer, teacher_tokenizer


def plain(text):
    teachers = [
        part.tolist()
        for teacher in text.teachers
        for part in (teacher.ids, teacher.student_marks, teacher.teacher_marks)
    ]
    return [text.student_ids.tolist(), text.student_widths.tolist(), *teachers]


@cache
def aligner():
    return TextAligner(student_tokenizer(), [teacher_tokenizer(), student_tokenizer()])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=4))
def test_a_record_is_the_text_again(texts):
    aligned = aligner().align([*texts, "\0", "", "x" + " " * 300])
    again = from_records([to_record(text) for text in aligned], 2)
    assert list(map(plain, again)) == list(map(plain, aligned))


def test_a_record_has_the_size_that_is_stated():
    text = TextAligner(student_tokenizer(), [teacher_tokenizer()]).align(["".join(TEXTS)])[0]
    student, teacher = text.token_counts
    # The teacher's vocabulary has 32,768 ids, which take two bytes.
    stated = 6 * student + 3 * teacher
    assert len(to_record(text)) == pytest.approx(stated, abs=40)


@pytest.fixture
def calls(monkeypatch):
    """Every tokenization and alignment of this process."""
    made = []
    encode, align = TextTokenizer.encode, token_aligner.align_byte_ends

    def counted_encode(self, *given):
        made.append("encode")
        return encode(self, *given)

    def counted_align(*given, **options):
        made.append("align")
        return align(*given, **options)

    monkeypatch.setattr(TextTokenizer, "encode", counted_encode)
    monkeypatch.setattr(token_aligner, "align_byte_ends", counted_align)
    return made


def test_a_second_epoch_neither_tokenizes_nor_aligns(tmp_path, calls):
    expected = collator()(TEXTS).as_dict()
    calls.clear()
    first = collator(cache_dir=tmp_path)(TEXTS).as_dict()
    assert calls == ["encode", "encode", "align"]
    calls.clear()
    second = collator(cache_dir=tmp_path)(TEXTS).as_dict()
    assert calls == []
    for name, value in expected.items():
        assert np.array_equal(np.asarray(first[name]), np.asarray(value)), name
        assert np.array_equal(np.asarray(second[name]), np.asarray(value)), name


def test_what_workers_kept_is_there_for_others_and_the_next_epoch(tmp_path, calls):
    dataset = packed(tmp_path, collator(cache_dir=tmp_path / "cache"))
    batches = PackedBatches(dataset, 4, epochs=2, num_workers=2)
    expected = [batch.student.input_ids.tolist() for batch in batches]
    calls.clear()
    again = PackedBatches(dataset, 4, epochs=2)
    assert [batch.student.input_ids.tolist() for batch in again] == expected
    assert calls == []
    names = {path.suffix for path in (tmp_path / "cache").glob("*/*")}
    assert names == {".records", ".rows"}


def test_another_tokenizer_or_text_is_not_taken_from_the_cache(tmp_path, calls):
    reader = collator(cache_dir=tmp_path)
    reader(TEXTS[:3])
    calls.clear()
    reader([*TEXTS[:3], TEXTS[3]])
    assert calls == ["encode", "encode", "align"]
    calls.clear()
    type(reader)(student_tokenizer(), 64, cache_dir=tmp_path)(TEXTS[:3])
    assert calls == ["encode"]


@pytest.mark.parametrize("lost", [1, 31, 32, 40])
def test_a_write_that_was_interrupted_is_as_if_it_never_began(lost, tmp_path):
    store = RecordStore(tmp_path, max_bytes=1 << 20)
    keys = [bytes([n]) * 16 for n in range(3)]
    for key in keys:
        store.add(key, key * 5)
    (rows,) = tmp_path.glob("*.rows")
    os.truncate(rows, rows.stat().st_size - lost)
    fresh = RecordStore(tmp_path, max_bytes=1 << 20)
    fresh.refresh()
    kept = 3 - -(-lost // 32)
    assert [fresh.get(key) for key in keys] == [key * 5 for key in keys[:kept]] + [None] * (
        3 - kept
    )
    fresh.add(keys[2], b"again")
    store.refresh()
    assert store.get(keys[2]) == b"again"


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_record_that_is_damaged_is_not_there(damage, tmp_path):
    store = RecordStore(tmp_path, max_bytes=1 << 20)
    store.add(b"k" * 16, b"first")
    store.add(b"l" * 16, b"second")
    (records,) = tmp_path.glob("*.records")
    if damage == "gone":
        records.unlink()
    else:
        records.write_bytes(b"first" + (b"sec" if damage == "cut" else b"SECOND"))
    fresh = RecordStore(tmp_path, max_bytes=1 << 20)
    fresh.refresh()
    assert fresh.get(b"k" * 16) == (None if damage == "gone" else b"first")
    assert fresh.get(b"l" * 16) is None


def test_nothing_is_added_to_a_store_that_is_full(tmp_path):
    store = RecordStore(tmp_path, max_bytes=10)
    store.add(b"k" * 16, b"12345678")
    store.add(b"l" * 16, b"123")
    assert store.get(b"k" * 16) == b"12345678"
    assert store.get(b"l" * 16) is None


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cache of alignments cannot be made.*set cache_dir"):
        collator(cache_dir=tmp_path / "file")


def test_workers_of_a_plain_loader_share_the_cache(tmp_path, calls):
    reader = collator(cache_dir=tmp_path)
    loader = DataLoader(TEXTS, batch_size=4, collate_fn=reader, num_workers=2)
    assert len(list(loader)) == 6
    calls.clear()
    reader(TEXTS)
    assert calls == []


def test_what_was_used_last_stays():
    store = MemoryStore(10)
    store.add(b"a", b"1234")
    store.add(b"b", b"5678")
    assert store.get(b"a") == b"1234"
    store.add(b"c", b"90")
    assert [store.get(key) for key in (b"a", b"b", b"c")] == [b"1234", b"5678", b"90"]
    store.add(b"d", b"x")
    assert store.get(b"a") is None
    assert [store.get(key) for key in (b"b", b"c", b"d")] == [b"5678", b"90", b"x"]


def test_a_copy_is_empty():
    store = MemoryStore(10)
    store.add(b"a", b"1")
    assert pickle.loads(pickle.dumps(store)).get(b"a") is None


@pytest.mark.parametrize(
    ("size", "added", "kept"),
    [
        (10, [("a", b"12345678"), ("a", b"123456789"), ("b", b"x")], [b"123456789", b"x"]),
        (3, [("a", b"1"), ("b", b"1234")], [b"1", None]),
    ],
    ids=["a record takes the place of its predecessor", "larger than the store"],
)
def test_a_store_has_room_for(size, added, kept):
    store = MemoryStore(size)
    for key, value in added:
        store.add(key.encode(), value)
    assert [store.get(b"a"), store.get(b"b")] == kept
