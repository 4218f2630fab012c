"""Rankings of chunks that are not 1:1, counted block by block."""

from collections import Counter

import numpy as np

from megatron_ext.alignment.audit import document as module
from megatron_ext.alignment.audit.document import Example, Offenders, pair_hashes


def example_of(keys):
    return lambda j: Example((), (), str(keys[j]), "", "", "corpus:1")


def fed(blocks):
    """Offenders of blocks of keys, each of which has its own size."""
    found = Offenders.none()
    for keys in blocks:
        array = np.array(keys, np.uint64)
        found.add(array, (array % np.uint64(7) + np.uint64(3)).astype(np.int64), example_of(keys))
    return found


def blocks_of_keys():
    rng = np.random.default_rng(3)
    return [rng.zipf(1.3, 400).clip(max=2000).tolist() for _ in range(30)]


def test_the_leaders_of_all_blocks_are_ranked_with_their_counts_and_examples():
    blocks = blocks_of_keys()
    counts = Counter(key for block in blocks for key in block)
    found = fed(blocks)
    assert found.are_exact
    tokens = {key: n * (key % 7 + 3) for key, n in counts.items()}
    best = sorted(tokens, key=lambda key: (-tokens[key], key))[: module.LISTED]
    listed = found.by_tokens()
    assert [int(one.example.text) for one in listed] == best
    assert [(one.count, one.tokens) for one in listed] == [(counts[k], tokens[k]) for k in best]
    longest = sorted(counts, key=lambda key: (-(key % 7 + 3), -counts[key], key))
    listed = found.by_size()
    assert [int(one.example.text) for one in listed] == longest[: module.LISTED]


def test_what_is_forgotten_makes_counts_bounds_but_not_of_the_leaders(monkeypatch):
    blocks = blocks_of_keys()
    exact = fed(blocks).by_tokens()[:5]
    monkeypatch.setattr(module, "MOST_TRACKED", 200)
    bounded = fed(blocks)
    assert not bounded.are_exact
    assert len(bounded._hashes) <= 200
    assert bounded.by_tokens()[:5] == exact


def test_no_chunk_is_no_offender():
    found = Offenders.none()
    found.add(np.zeros(0, np.uint64), np.zeros(0, np.int64), example_of([]))
    assert found.by_tokens() == found.by_size() == []


def test_the_hash_tells_the_ids_of_both_sides_and_their_order():
    ids = np.array([5, 6, 7, 5, 6, 6, 5, 0, 5], np.int32)
    spans = np.array([[0, 2], [3, 5], [5, 7], [0, 3], [7, 9], [8, 9], [1, 2]], np.int32)
    same = np.repeat([[0, 1]], len(spans), axis=0).astype(np.int32)
    hashes = pair_hashes(ids, spans, ids, same)
    assert hashes[0] == hashes[1]
    assert len(set(hashes.tolist())) == len(spans) - 1
    swapped = pair_hashes(ids, same, ids, spans)
    # The span of one token is the same on both sides.
    assert np.flatnonzero(hashes == swapped).tolist() == [5]
    assert pair_hashes(ids, spans, ids, same).tolist() == hashes.tolist()
