"""Streams of different texts: what is equal in them is aligned, what differs is reported."""

import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.alignment.text_alignment import (
    BridgedAlignment,
    Segments,
    align_segments,
    bridge_texts,
)
from megatron_ext.constants import NO_CHUNK
from tests.alignment.brute_force import assert_spans_of_chunks, brute_force_segments, chunks_of
from tests.alignment.byte_end_strategies import byte_ends, ends_of

VIETNAMESE = "Tiếng Việt rất đẹp, và tôi học nó mỗi ngày ở trường."


def ranges_of(segments, student, teacher):
    """The bytes of each pair of ranges."""
    pairs = zip(segments.student.tolist(), segments.teacher.tolist(), strict=True)
    return [(student[a:b].decode(), teacher[x:y].decode()) for (a, b), (x, y) in pairs]


@pytest.mark.parametrize(
    ("student", "teacher", "differences"),
    [
        pytest.param("the same", "the same", [], id="nothing"),
        pytest.param("a caf\u00e9 here", "a cafe\u0301 here", [("é", "e\u0301")], id="composed"),
        pytest.param("one line here\n", "one line here", [("\n", "")], id="shorter"),
        pytest.param("", "all of it", [("", "all of it")], id="empty"),
        pytest.param("Hello World", "hello world", [("H", "h"), ("W", "w")], id="case"),
        pytest.param("abc", "xyz", [("abc", "xyz")], id="unlike"),
        pytest.param("क़लम और काग़ज़", "क\u093cलम और काग\u093cज\u093c", None, id="nukta"),
    ],
)
def test_what_differs_is_reported_in_whole_characters(student, teacher, differences):
    sides = student.encode(), teacher.encode()
    bridge = bridge_texts(*sides)
    found = ranges_of(bridge.differences, *sides)
    assert differences is None or found == differences
    assert bridge.student_residual_bytes == sum(len(own.encode()) for own, _ in found)
    assert bridge.teacher_residual_bytes == sum(len(other.encode()) for _, other in found)
    assert all(own == other for own, other in ranges_of(bridge.equal, *sides))


def test_every_character_that_normalisation_leaves_alone_is_equal():
    decomposed = unicodedata.normalize("NFD", VIETNAMESE)
    sides = VIETNAMESE.encode(), decomposed.encode()
    bridge = bridge_texts(*sides)
    changed = sum(len(c.encode()) for c in VIETNAMESE if unicodedata.normalize("NFD", c) != c)
    assert bridge.student_residual_bytes == changed > 0
    for own, other in ranges_of(bridge.differences, *sides):
        assert unicodedata.normalize("NFD", own) == other


@given(
    base=st.text(st.sampled_from("abcdé \nक日"), max_size=200),
    edits=st.lists(st.tuples(st.floats(0, 1), st.text(max_size=3)), max_size=5),
)
@settings(deadline=None)
def test_equal_ranges_are_equal_and_ascend(base, edits):
    changed = base
    for place, inserted in edits:
        at = int(place * len(changed))
        changed = changed[:at] + inserted + changed[at + 1 :]
    sides = base.encode(), changed.encode()
    bridge = bridge_texts(*sides)
    assert all(own == other for own, other in ranges_of(bridge.equal, *sides))
    for ranges in (bridge.equal.student, bridge.equal.teacher):
        flat = ranges.reshape(-1)
        assert (np.diff(flat) >= 0).all()
    if base == changed:
        assert bridge.student_residual_bytes == bridge.teacher_residual_bytes == 0


def test_long_texts_with_many_edits_lose_no_more_than_the_edits():
    generator = np.random.default_rng(0)
    letters = generator.integers(97, 123, size=60_000).astype(np.uint8)
    changed = letters.copy()
    places = np.sort(generator.choice(60_000, 200, replace=False))
    changed[places] = ord("#")
    bridge = bridge_texts(letters.tobytes(), changed.tobytes())
    assert 200 <= bridge.student_residual_bytes <= 240
    unlike = generator.integers(97, 123, size=60_000).astype(np.uint8)
    assert bridge_texts(letters.tobytes(), unlike.tobytes()).student_residual_bytes > 59_500


def test_repeated_lines_are_bridged_around_what_one_side_lacks():
    lines = b"one line\n" * 3000
    bridge = bridge_texts(lines + b"an odd one\n" + lines, lines + lines)
    assert bridge.student_residual_bytes == len(b"an odd one\n")
    assert bridge.teacher_residual_bytes == 0


@given(text=st.text(max_size=40))
@settings(deadline=None)
def test_streams_of_equal_bytes_align_bridged_as_ever(aligner, text):
    student = [aligner.student_tokenizer.bos_id, *aligner.student_tokenizer.text_to_ids(text)]
    teacher = [aligner.teacher_tokenizer.bos_id, *aligner.teacher_tokenizer.text_to_ids(text)]
    plain = aligner.align_ids(student, teacher)
    bridged = aligner.align_ids(student, teacher, bridge=True)
    assert isinstance(bridged, BridgedAlignment)
    assert bridged.bridge.student_residual_bytes == 0
    assert np.array_equal(plain.student_chunk_id, bridged.student_chunk_id)
    assert np.array_equal(plain.teacher_chunk_id, bridged.teacher_chunk_id)
    assert np.array_equal(plain.student_spans, bridged.student_spans)


def test_chunks_of_different_texts_spell_the_same_bytes(aligner):
    decomposed = unicodedata.normalize("NFD", VIETNAMESE)
    alignment = aligner.align_texts(VIETNAMESE, decomposed)
    assert alignment.chunk_count == 5
    spelled = []
    for tokenizer, text, ids in (
        (aligner.student_tokenizer, VIETNAMESE, alignment.student_chunk_id),
        (aligner.teacher_tokenizer, decomposed, alignment.teacher_chunk_id),
    ):
        ends = tokenizer.encode_with_byte_ends(text)[1]
        begins = np.append(0, ends[:-1])
        spelled.append(
            [
                b"".join(text.encode()[begins[t] : ends[t]] for t in np.flatnonzero(ids == chunk))
                for chunk in range(alignment.chunk_count)
            ]
        )
    assert spelled[0] == spelled[1]


def test_paired_control_tokens_survive_a_difference(aligner):
    sides = []
    for tokenizer, text in (
        (aligner.student_tokenizer, "caf\u00e9 one"),
        (aligner.teacher_tokenizer, "cafe\u0301 one"),
    ):
        sides.append([tokenizer.bos_id, *tokenizer.text_to_ids(text), tokenizer.eos_id])
    alignment = aligner.align_ids(*sides, bridge=True)
    assert alignment.student_chunk_id[0] == alignment.teacher_chunk_id[0] == 0
    last = alignment.chunk_count - 1
    assert alignment.student_chunk_id[-1] == alignment.teacher_chunk_id[-1] == last
    assert NO_CHUNK in alignment.student_chunk_id
    assert alignment.bridge.student_residual_bytes == 2
    assert alignment.bridge.teacher_residual_bytes == 3


def segments_of(*pairs):
    rows = np.array(pairs, np.int64).reshape(-1, 2, 2)
    return Segments(rows[:, 0], rows[:, 1])


@st.composite
def cases(draw):
    """Byte ends of both sides, and ranges of equal lengths with anything between."""
    pairs, at = [], [0, 0]
    for length in draw(st.lists(st.integers(1, 6), max_size=4)):
        at = [place + draw(st.integers(0, 3)) for place in at]
        pairs.append([[place, place + length] for place in at])
        at = [place + length for place in at]
    totals = [place + draw(st.integers(0, 3)) for place in at]
    return *(draw(byte_ends(total)) for total in totals), pairs


@given(cases())
@settings(deadline=None)
def test_chunks_are_the_groups_of_tokens_inside_the_ranges(case):
    student, teacher, pairs = case
    alignment = align_segments(student, teacher, segments_of(*pairs))
    assert chunks_of(alignment) == brute_force_segments(student, teacher, pairs)
    assert len(alignment.student_chunk_id) == len(student)
    assert len(alignment.teacher_chunk_id) == len(teacher)
    assert_spans_of_chunks(alignment)


CASES = {
    "a header": ((3, 2, 2), (2, 2), [[[3, 7], [0, 4]]], ([-1, 0, 1], [0, 1])),
    "straddles": ((4, 2), (1, 2, 2), [[[3, 6], [0, 3]]], ([-1, 0], [-1, 0, -1])),
    "wholes": ((2, 3), (2, 7), [[[0, 2], [0, 2]], [[2, 5], [2, 9]]], ([0, 1], [0, 1])),
    "no whole": ((2, 1, 2), (2, 7), [[[2, 5], [2, 9]]], ([-1, -1, -1], [-1, -1])),
    "inserted": ((2, 2), (2, 3, 2), [[[0, 2], [0, 2]], [[2, 4], [5, 7]]], ([0, 1], [0, -1, 1])),
    "nothing corresponds": ((2,), (2,), [], ([-1], [-1])),
}


@pytest.mark.parametrize(("student", "teacher", "pairs", "ids"), CASES.values(), ids=CASES)
def test_what_is_outside_of_ranges_is_in_no_chunk(student, teacher, pairs, ids):
    alignment = align_segments(ends_of(*student), ends_of(*teacher), segments_of(*pairs))
    assert (alignment.student_chunk_id.tolist(), alignment.teacher_chunk_id.tolist()) == ids
