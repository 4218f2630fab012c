from __future__ import annotations

import pickle

from megatron_ext.training.cross_tokenizer.cache.memory_store import MemoryStore


def test_what_was_used_last_stays() -> None:
    store = MemoryStore(10)
    store.add(b"a", b"1234")
    store.add(b"b", b"5678")
    assert store.get(b"a") == b"1234"
    store.add(b"c", b"90")
    assert [store.get(key) for key in (b"a", b"b", b"c")] == [b"1234", b"5678", b"90"]
    store.add(b"d", b"x")

    assert store.get(b"a") is None
    assert [store.get(key) for key in (b"b", b"c", b"d")] == [b"5678", b"90", b"x"]


def test_a_record_takes_the_place_of_its_predecessor() -> None:
    store = MemoryStore(10)
    store.add(b"a", b"12345678")
    store.add(b"a", b"123456789")
    store.add(b"b", b"x")

    assert store.get(b"a") == b"123456789"
    assert store.get(b"b") == b"x"


def test_a_record_that_is_larger_than_the_store_is_not_kept() -> None:
    store = MemoryStore(3)
    store.add(b"a", b"1")
    store.add(b"b", b"1234")

    assert store.get(b"b") is None
    assert store.get(b"a") == b"1"


def test_a_copy_is_empty() -> None:
    store = MemoryStore(10)
    store.add(b"a", b"1")

    assert pickle.loads(pickle.dumps(store)).get(b"a") is None
