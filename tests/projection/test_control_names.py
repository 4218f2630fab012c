"""How alike the names of control tokens are."""

import pytest

from megatron_ext.projection.nearest_tokens import most_similar


def test_similarity_counts_matching_characters_and_common_words():
    # Of 12 and 9 characters 8 match, in order; of the words {end, turn} and {end} one is common.
    found = most_similar("<end_of_turn", {7: "<end_turn"}, min_similarity=0.1, most=1)
    assert found == pytest.approx({7: 0.6 * 2 * 9 / 21 + 0.4 * 2 / 2})
    assert most_similar("<A>", {0: "<a>"}, min_similarity=0.1, most=1) == pytest.approx({0: 0.6})


def test_equal_names_of_words_are_wholly_similar():
    found = most_similar("<|image|>", {3: "<|image|>"}, min_similarity=1.0, most=4)
    assert found == pytest.approx({3: 1.0})


def test_the_most_similar_come_first_and_of_equals_the_lowest_id():
    names = {9: "<end>", 4: "<end>", 2: "<ends>", 1: "(pad)"}
    found = most_similar("<end>", names, min_similarity=0.5, most=2)
    assert list(found) == [4, 2]


def test_numbered_names_count_once():
    names = {i: f"<unused{i}>" for i in range(6000)}
    found = most_similar("<|reserved_7|>", {**names, 9000: "<reserved>"}, min_similarity=0, most=9)
    assert sorted(found) == [0, 9000]


def test_names_below_the_threshold_are_left_out():
    assert most_similar("<pad>", {0: "[[QQ]]"}, min_similarity=0.3, most=4) == {}
