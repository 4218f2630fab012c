"""What holds of every alignment of real tokenizers: DESIGN.md, over arbitrary Unicode."""

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.alignment import align_byte_ends
from megatron_ext.constants import NO_CHUNK
from tests.alignment.shared_text import ALL_TEXT

any_text = settings(deadline=None)
texts = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(
            [
                *("\u0301", "\u0323\u0301", "e\u0301", "\u0915\u093c", "\u200d", "\ufe0f"),
                *("👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪", "1️⃣"),
                *("مرحبا بالعالم", "\u202eשלום\u202c", "\u2067עולם\u2069"),
                *("\x00", "\x00\x00", "\ufeff", "\ufffd", "\U0010ffff", "▁", "Ġ", "<0x0A>"),
                *("  ", "\r\n", "\t", "\u00a0", "\u2028", "</s>", "[INST]", "日本語", "201"),
            ]
        ),
    ),
    max_size=8,
).map("".join)


@given(text=texts, side=st.sampled_from([0, 1]), data=st.data())
@any_text
def test_control_tokens_of_one_side_anywhere_desynchronise_nothing(aligner, text, side, data):
    # SentencePiece reads this as a space, so that its ids decode to another text.
    text = text.replace("▁", "")
    tokenizers = aligner.student_tokenizer, aligner.teacher_tokenizer
    ids = [np.array(tokenizer.text_to_ids(text), np.int32) for tokenizer in tokenizers]
    plain = chunk_ids_of(aligner.align_ids(*ids))
    tokenizer = tokenizers[side]
    # SentencePiece begins the text behind a control token with a space of its own, for which it
    # would take that of the token there.
    has_space = [tokenizer.token_bytes(int(token)).startswith(b" ") for token in ids[side]]
    last = len(has_space)
    free = [place for place in range(last + 1) if place in (0, last) or not has_space[place]]
    places = data.draw(st.lists(st.sampled_from(free), max_size=4).map(sorted))
    control = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.token_to_id("[INST]")]
    inserted = [data.draw(st.sampled_from(control)) for _ in places]
    own = np.insert(np.zeros(len(ids[side]), bool), places, True)
    ids[side] = np.insert(ids[side], places, inserted)
    framed = chunk_ids_of(aligner.align_ids(*ids))
    assert (framed[side][own] == NO_CHUNK).all()
    assert np.array_equal(framed[side][~own], plain[side])
    assert np.array_equal(framed[1 - side], plain[1 - side])


def chunk_ids_of(alignment):
    return alignment.student_chunk_id, alignment.teacher_chunk_id


@given(batch=st.lists(texts, min_size=1, max_size=3), more=st.integers(1, 9))
@settings(deadline=None, max_examples=25)
def test_padding_changes_no_chunk(aligner, batch, more):
    exact = aligner.align_batch(batch)
    lengths = exact.student_chunk_id.shape[1], exact.teacher_chunk_id.shape[1]
    padded = aligner.align_batch(
        batch, student_length=lengths[0] + more, teacher_length=lengths[1] + more
    )
    assert padded.chunk_count == exact.chunk_count
    for side, length in (("student", lengths[0]), ("teacher", lengths[1])):
        ids = getattr(padded, f"{side}_chunk_id")
        assert ids[:, :length].equal(getattr(exact, f"{side}_chunk_id"))
        assert (ids[:, length:] == NO_CHUNK).all()


@given(text=texts, lengths=st.tuples(st.integers(1, 20), st.integers(1, 20)))
@any_text
def test_a_cut_text_is_a_prefix_of_both_sides_at_one_byte(aligner, text, lengths):
    whole = aligner.align_each([text])[0]
    cut = aligner.align_each([text], student_length=lengths[0], teacher_length=lengths[1])[0]
    stops = []
    for side, full, length in (
        (cut.student, whole.student, lengths[0]),
        (cut.teacher, whole.teacher, lengths[1]),
    ):
        assert len(side.ids) <= length
        assert np.array_equal(side.ids, full.ids[: len(side.ids)])
        stops.append(int(side.ends[-1]) if len(side.ends) else 0)
    assert stops[0] == stops[1]
    count = cut.alignment.chunk_count
    assert np.array_equal(cut.alignment.student_spans, whole.alignment.student_spans[:count])


def test_a_line_of_megabytes_costs_no_more_a_token_than_a_short_one():
    generator = np.random.default_rng(0)
    length = 10_000_000 if ALL_TEXT else 2_000_000
    sides = [np.unique(generator.integers(1, length + 1, size=3 * length // 20)) for _ in range(2)]
    sides = [np.append(side[side < length], length) for side in sides]
    short = [side[: length // 70] for side in sides]
    assert align_byte_ends(*sides).chunk_count > length // 100
    assert time_of(sides) < 10 * 4 * time_of(short)


def time_of(sides):
    """The quickest of several, in seconds of the thread alone."""
    times = []
    for _ in range(3):
        start = time.thread_time()
        align_byte_ends(*sides)
        times.append(time.thread_time() - start)
    return min(times)
