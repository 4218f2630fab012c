"""One conversation's tokens and labels, cut and put beside others."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.data.sft_samples import SFTSample, laid_out
from tests.preprocessing.chat_of_bytes import BEGIN, EOD, STOP, TRAINED, ChatOfBytes, conversation

X = IGNORE_INDEX
PAD = 7
"""An id that conversations hold too, trained and untrained."""


def sample(ids, trained=None):
    array = np.array(ids, np.int64)
    return SFTSample(array, np.where(trained, array, X) if trained else array.copy())


SAMPLES = st.lists(
    st.lists(st.tuples(st.integers(5, 9), st.booleans()), min_size=1, max_size=12).map(
        lambda pairs: sample([i for i, _ in pairs], [t for _, t in pairs])
    ),
    max_size=6,
)


def test_a_position_predicts_the_target_of_the_next_token_and_the_last_predicts_nothing():
    made = sample([5, 6, 7], [True, False, True])
    assert made.labels.tolist() == [X, 7, X]
    assert made.trained_count == 1
    assert sample([5]).labels.tolist() == [X]
    assert sample([5]).trained_count == 0


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (("a", "b"), [BEGIN, 97, STOP, 98 + TRAINED, STOP + TRAINED, EOD]),
        (("a", "b", "c"), [BEGIN, 97, STOP, 98 + TRAINED, STOP + TRAINED, 99, STOP, EOD]),
    ],
    ids=["answer-last", "question-last"],
)
def test_the_end_of_document_is_trained_behind_an_answer_only(turns, expected):
    made = SFTSample.of(ChatOfBytes(), conversation(*turns), {}, eod=EOD)
    assert made.ids.tolist() == expected
    trained = {i for i in expected if i >= TRAINED} | ({EOD} if len(turns) == 2 else set())
    assert made.target.tolist() == [i if i in trained else X for i in expected]


def test_the_end_of_document_is_not_put_behind_itself():
    made = SFTSample.of(ChatOfBytes(), conversation("a", "b"), {}, eod=STOP + TRAINED)
    assert made.ids.tolist() == [BEGIN, 97, STOP, 98 + TRAINED, STOP + TRAINED]


@given(
    pairs=st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=12),
    length=st.integers(1, 12),
    side=st.sampled_from(["left", "right"]),
    bos=st.sampled_from([None, 1]),
)
@settings(max_examples=100, deadline=None)
def test_a_cut_conversation_is_an_end_of_the_whole(pairs, length, side, bos):
    whole = sample([i for i, _ in pairs], [t for _, t in pairs])
    cut = whole.truncated(length, side, bos=bos)
    both = list(zip(whole.ids.tolist(), whole.target.tolist(), strict=True))
    found = list(zip(cut.ids.tolist(), cut.target.tolist(), strict=True))
    assert len(cut) == min(len(whole), length)
    if side == "right" or len(whole) <= length:
        assert found == both[: len(cut)]
        return
    has_bos = bos is not None and whole.ids[0] == bos
    if has_bos:
        assert found.pop(0) == both[0]
    expected = both[len(both) - len(found) :]
    assert found[:1] == [(token, X) for token, _ in expected[:1]]
    assert found[1:] == expected[1:]


def test_truncation_changes_nothing_that_fits_and_no_argument():
    made = sample([1, 5, 6])
    for side in ("left", "right"):
        assert made.truncated(3, side, bos=1) is made
        made.truncated(2, side, bos=1)
    assert (made.ids.tolist(), made.target.tolist()) == ([1, 5, 6], [1, 5, 6])


def test_two_conversations_stand_side_by_side():
    arrays = laid_out([sample([5, PAD, 6]), sample([8, 9], [False, True])], 8, multiple=1, pad=PAD)
    assert arrays["tokens"].tolist() == [5, PAD, 6, 8, 9, PAD, PAD, PAD]
    # A token that is the padding's is trained; the 8 is not predicted from the 6.
    assert arrays["labels"].tolist() == [PAD, 6, X, 9, X, X, X, X]
    assert arrays["loss_mask"].tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    assert arrays["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert arrays["cu_seqlens"].tolist() == [0, 3, 5, 8, 8, 8, 8, 8, 8]
    assert arrays["max_seqlen"] == 3


def test_each_conversation_is_padded_to_what_context_parallelism_cuts():
    arrays = laid_out([sample([5, 6, 8]), sample([8, 9])], 12, multiple=4, pad=PAD)
    assert arrays["tokens"].tolist() == [5, 6, 8, PAD, 8, 9, *[PAD] * 6]
    assert arrays["labels"].tolist() == [6, 8, X, X, 9, *[X] * 7]
    assert arrays["position_ids"].tolist() == [0, 1, 2, 3] * 3
    assert arrays["cu_seqlens"].tolist() == [0, 4, 8, *[12] * 10]


def test_a_sample_of_nothing_trains_nothing():
    arrays = laid_out([], 4, multiple=1, pad=PAD)
    assert arrays["tokens"].tolist() == [PAD] * 4
    assert arrays["labels"].tolist() == [X] * 4
    assert arrays["cu_seqlens"].tolist() == [0, 4, 4, 4, 4]
    assert arrays["max_seqlen"] == 4


@given(samples=SAMPLES, multiple=st.sampled_from([1, 2, 4]))
@settings(max_examples=100, deadline=None)
def test_ids_masks_and_positions_survive(samples, multiple):
    length = 72
    arrays = laid_out(samples, length, multiple=multiple, pad=PAD)
    bounds = arrays["cu_seqlens"]
    assert len(bounds) == length + 1
    assert bounds[0] == 0
    assert (np.diff(bounds) >= 0).all()
    assert (bounds % multiple == 0).all()
    is_token = np.zeros(length, np.bool_)
    for made, start, stop in zip(samples, bounds, bounds[1:], strict=False):
        end = start + len(made)
        assert 0 <= stop - end < multiple
        assert arrays["tokens"][start:end].tolist() == made.ids.tolist()
        assert arrays["labels"][start : end - 1].tolist() == made.target[1:].tolist()
        assert arrays["labels"][end - 1] == X
        assert arrays["position_ids"][start:stop].tolist() == list(range(stop - start))
        is_token[start:end] = True
    assert (arrays["tokens"][~is_token] == PAD).all()
    assert (arrays["labels"][~is_token] == X).all()
    assert np.array_equal(arrays["loss_mask"] == 1, arrays["labels"] != X)
    assert arrays["loss_mask"].sum() == sum(made.trained_count for made in samples)
    assert arrays["max_seqlen"] == np.diff(bounds).max()
