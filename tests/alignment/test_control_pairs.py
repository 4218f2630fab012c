"""Control tokens that stand for the same thing, by role, by name and by place."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.alignment import align_byte_ends
from megatron_ext.alignment.control_pairs import NO_CLASS, ControlClasses, match_control_tokens
from megatron_ext.constants import NO_CHUNK
from tests.alignment.brute_force import assert_swapped
from tests.alignment.byte_end_strategies import ends_of


class Vocabulary:
    """Control tokens by name, and ``a``; roles by id."""

    def __init__(self, names, **roles):
        self.names = [*names, "a"]
        self.vocab_size = len(self.names)
        for role in ("bos", "eos", "unk", "pad"):
            setattr(self, f"{role}_id", roles.get(role))

    def token_bytes(self, token_id):
        return b"a" if self.names[token_id] == "a" else None

    def id_to_token(self, token_id):
        return self.names[token_id]

    def token_to_id(self, token):
        if token not in self.names:
            raise KeyError(token)
        return self.names.index(token)


LLAMA = Vocabulary(["<s>", "</s>", "<pad>", "<img>", ""], bos=0, eos=1, pad=2)
GPT = Vocabulary(["<|endoftext|>", "<img>", "<pad>"], bos=0, eos=0, pad=2)


def same(classes, student_id, teacher_id):
    return classes.student[student_id] == classes.teacher[teacher_id] != NO_CLASS


def test_an_id_with_two_roles_stands_for_each_of_the_other_sides():
    classes = ControlClasses.of(LLAMA, GPT)
    assert same(classes, 0, 0)
    assert same(classes, 1, 0)
    backward = ControlClasses.of(GPT, LLAMA)
    assert same(backward, 0, 0)
    assert same(backward, 0, 1)


def test_a_token_without_a_role_is_paired_by_its_name():
    classes = ControlClasses.of(LLAMA, GPT)
    assert same(classes, 3, 1)
    assert classes.student[3] != classes.student[0]


def test_padding_unused_ids_and_ordinary_tokens_are_never_paired():
    classes = ControlClasses.of(LLAMA, GPT)
    assert classes.student[[2, 4, 5]].tolist() == [NO_CLASS] * 3
    assert classes.teacher[[2, 3]].tolist() == [NO_CLASS] * 2
    unnamed = ControlClasses.of(Vocabulary(["x"], eos=1), Vocabulary(["y"], eos=0))
    assert unnamed.student.tolist() == [NO_CLASS] * 2


def test_a_projection_takes_the_first_role_then_the_name():
    ids = np.arange(3)
    assert match_control_tokens(GPT, LLAMA, ids) == {0: 0, 1: 3, 2: 2}
    assert match_control_tokens(LLAMA, GPT, np.arange(5)) == {0: 0, 1: 0, 2: 2, 3: 1}


BOS, EOS, OTHER = 0, 1, 2
CLASSES = ControlClasses(np.array([0, 1, -1, -1], np.int32), np.array([0, 1, -1, -1], np.int32))
TEXT = 3


def stream(*tokens):
    """Ids and ends: a number of bytes is ordinary text, a name a control token."""
    ids = np.array([TEXT if isinstance(token, int) else token[0] for token in tokens], np.int32)
    widths = [token if isinstance(token, int) else 0 for token in tokens]
    return ids, ends_of(*widths)


B, E, X = (BOS,), (EOS,), (OTHER,)


def aligned(student, teacher):
    student, teacher = stream(*student), stream(*teacher)
    paired = CLASSES.pair(*student, *teacher)
    return align_byte_ends(student[1], teacher[1], paired=paired)


@pytest.mark.parametrize(
    ("student", "teacher", "student_ids", "teacher_ids"),
    [
        pytest.param([B, 2, E], [B, 1, 1, E], [0, 1, 2], [0, 1, 1, 2], id="both ends"),
        pytest.param([B, 2], [2, E], [-1, 0], [0, -1], id="one-sided"),
        pytest.param([2, E, E], [2, E, E], [0, 1, 2], [0, 1, 2], id="two against two"),
        pytest.param([2, E], [2, E, E], [0, 1], [0, 1, -1], id="one against two"),
        pytest.param([2, E, 3], [2, 1, E, 2], [0, -1, 1], [0, 1, -1, 1], id="other places"),
        pytest.param([2, E, B, 3], [2, E, B, 3], [0, 1, 2, 3], [0, 1, 2, 3], id="between"),
        pytest.param([2, E, B, 3], [2, B, 3], [0, -1, 1, 2], [0, 1, 2], id="of two one"),
        pytest.param([2, B, E, 3], [2, E, B, 3], [0, -1, -1, 1], [0, -1, -1, 1], id="crossed"),
        pytest.param([2, X, E, X], [2, E], [0, -1, 1, -1], [0, 1], id="among others"),
        pytest.param([4], [2, E, 2], [0], [0, -1, 0], id="inside a token"),
        pytest.param([B, E], [B, E], [0, 1], [0, 1], id="no text"),
        pytest.param([X, 1], [X, 1], [-1, 0], [-1, 0], id="without a class"),
    ],
)
def test_paired_tokens_are_chunks_of_their_own(student, teacher, student_ids, teacher_ids):
    alignment = aligned(student, teacher)
    assert alignment.student_chunk_id.tolist() == student_ids
    assert alignment.teacher_chunk_id.tolist() == teacher_ids
    assert alignment.is_exact.all()
    for spans, ids in (
        (alignment.student_spans, student_ids),
        (alignment.teacher_spans, teacher_ids),
    ):
        for chunk, (start, stop) in enumerate(spans.tolist()):
            assert ids[start] == ids[stop - 1] == chunk


tokens = st.lists(st.one_of(st.integers(1, 4), st.sampled_from([B, E, X])), max_size=12)


@st.composite
def stream_pairs(draw):
    """Two streams of equal bytes, with control tokens anywhere."""
    sides = [draw(tokens), draw(tokens)]
    sizes = [sum(token for token in side if isinstance(token, int)) for side in sides]
    shorter = sizes.index(min(sizes))
    missing = abs(sizes[0] - sizes[1])
    sides[shorter] = sides[shorter] + [missing] * (missing > 0)
    return sides


def slow_pairs(student, teacher):
    """The n-th of a class at a byte with the n-th; of those, the ones that cross no other."""
    places = []
    for side in (student, teacher):
        ids, ends = stream(*side)
        found = {}
        for at, (token_id, end) in enumerate(zip(ids.tolist(), ends.tolist(), strict=True)):
            if token_id in (BOS, EOS):
                rank = sum(key[:2] == (end, token_id) for key in found)
                found[end, token_id, rank] = at
        places.append(found)
    pairs = [(at, places[1][key]) for key, at in places[0].items() if key in places[1]]
    return sorted(
        (i, j) for i, j in pairs if all((i - k) * (j - n) > 0 for k, n in pairs if (k, n) != (i, j))
    )


@given(stream_pairs())
@settings(deadline=None)
def test_pairs_are_those_of_a_slow_search(pair):
    student_at, teacher_at = CLASSES.pair(*stream(*pair[0]), *stream(*pair[1]))
    assert list(zip(student_at.tolist(), teacher_at.tolist(), strict=True)) == slow_pairs(*pair)


@given(stream_pairs())
@settings(deadline=None)
def test_a_pair_adds_its_chunk_and_changes_no_other(pair):
    alignment = aligned(*pair)
    plain = align_byte_ends(stream(*pair[0])[1], stream(*pair[1])[1])
    pairs = slow_pairs(*pair)
    assert alignment.chunk_count == plain.chunk_count + len(pairs)
    own = [alignment.student_chunk_id[i] for i, _ in pairs]
    assert own == [alignment.teacher_chunk_id[j] for _, j in pairs]
    for ids, before in (
        (alignment.student_chunk_id, plain.student_chunk_id),
        (alignment.teacher_chunk_id, plain.teacher_chunk_id),
    ):
        rest = np.where(np.isin(ids, own), NO_CHUNK, ids)
        kept = np.unique(rest[rest != NO_CHUNK])
        renumbered = np.where(rest == NO_CHUNK, NO_CHUNK, np.searchsorted(kept, rest))
        assert renumbered.tolist() == before.tolist()


@given(stream_pairs())
@settings(deadline=None)
def test_swapping_the_sides_swaps_the_pairs(pair):
    assert_swapped(aligned(*pair), aligned(*reversed(pair)))


def test_a_million_repeated_tokens_pair_at_once():
    count = 1_000_000
    ids = np.full(count, EOS, np.int32)
    ends = np.full(count, 5, np.int64)
    ids[0] = TEXT
    student_at, teacher_at = CLASSES.pair(ids, ends, ids, ends)
    assert np.array_equal(student_at, np.arange(1, count))
    assert np.array_equal(teacher_at, np.arange(1, count))
