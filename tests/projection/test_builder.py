"""Rows of a projection: which teacher tokens stand for a student token."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_ext
from megatron_ext.errors import ProjectionError, UnknownNameError
from megatron_ext.projection import SparseProjection
from tests.projection.greedy_tokenizer import GreedyTokenizer, every_byte


def row(projection, student_id):
    """Teacher ids and shares of one row."""
    entries = slice(*projection.indptr[student_id : student_id + 2])
    return dict(
        zip(projection.indices[entries].tolist(), projection.values[entries].tolist(), strict=True)
    )


def id_for(token, tokens):
    """The id that a ``GreedyTokenizer`` of ``tokens`` emits, else the lowest with these bytes."""
    is_text = token.decode(errors="ignore").encode() == token
    return max(i for i, t in enumerate(tokens) if t == token) if is_text else tokens.index(token)


def built(student, teacher, **options):
    """The projection of vocabularies of these tokens."""
    pair = GreedyTokenizer(student), GreedyTokenizer(teacher)
    return SparseProjection.from_tokenizers(*pair, **options)


def only_row(token, teacher_tokens):
    """The row of a student vocabulary of one token."""
    return row(built([token], teacher_tokens), 0)


def id_of(tokenizer, token):
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == token)


@pytest.fixture(scope="module")
def demo(tekken, sentencepiece):
    return SparseProjection.from_tokenizers(tekken, sentencepiece)


# What a row holds.


def test_a_number_is_spelled_by_its_digits_with_decaying_shares():
    shares = only_row(b"201", [b"0", b"1", b"2"])
    assert shares == pytest.approx({2: 0.9 / 0.999, 0: 0.09 / 0.999, 1: 0.009 / 0.999}, rel=1e-6)


def test_a_token_that_the_teacher_has_is_one_exact_entry():
    assert only_row(b"20", [b"2", b"0", b"20"]) == {2: 1.0}


def test_a_piece_that_comes_twice_is_one_entry_with_both_shares():
    shares = only_row(b"aba", [b"a", b"b"])
    assert shares == pytest.approx({0: 0.909 / 0.999, 1: 0.09 / 0.999}, rel=1e-6)


def test_one_piece_repeated_fills_a_row_that_is_not_exact():
    projection = built([b"====", b"=="], [b"=="])
    assert row(projection, 0) == row(projection, 1) == {0: 1.0}
    assert projection.is_exact_row.tolist() == [False, True]


def test_pieces_past_top_k_are_cut_before_the_row_is_normalised():
    projection = built([b"abc"], [b"a", b"b", b"c"], top_k=2)
    assert row(projection, 0) == pytest.approx({0: 10 / 11, 1: 1 / 11}, rel=1e-6)


def test_more_pieces_than_top_k_may_count():
    student, teacher = GreedyTokenizer([b"abb"]), GreedyTokenizer([b"a", b"b"])
    one, both = (
        SparseProjection.from_tokenizers(student, teacher, top_k=2, pieces=pieces)
        for pieces in (2, 3)
    )
    assert row(one, 0) == pytest.approx({0: 10 / 11, 1: 1 / 11}, rel=1e-6)
    assert row(both, 0) == pytest.approx({0: 1 / 1.11, 1: 0.11 / 1.11}, rel=1e-6)


def test_a_piece_whose_share_float32_cannot_hold_has_no_entry():
    letters = [bytes([byte]) for byte in range(ord("!"), ord("!") + 60)]
    student, teacher = GreedyTokenizer([b"".join(letters)]), GreedyTokenizer(letters)
    projection = SparseProjection.from_tokenizers(student, teacher, top_k=60)
    assert 30 < projection.entry_count < 60
    assert (projection.values > 0).all()


def test_of_ids_with_equal_bytes_the_one_that_the_teacher_emits_is_chosen():
    assert only_row(b"a", [b"b", b"a", b"a"]) == {2: 1.0}


def test_of_ids_with_equal_bytes_that_the_teacher_never_emits_the_lowest_is_chosen():
    assert only_row(b"\xe4", [b"b", b"\xe4", b"\xe4"]) == {1: 1.0}


def test_of_ids_with_equal_bytes_only_the_one_that_the_student_emits_is_exact():
    projection = built([b"A", b"B", b"A"], [b"B", b"A"])
    assert [row(projection, i) for i in range(3)] == [{1: 1.0}, {0: 1.0}, {1: 1.0}]
    assert projection.is_exact_row.tolist() == [False, True, True]
    assert projection.partition().common_student.tolist() == [1, 2]


@pytest.mark.parametrize("method", ["exact", "retokenized"])
def test_the_exact_method_leaves_tokens_that_the_teacher_lacks_empty(method):
    projection = built([b"a", b"ab"], [b"a", b"b"], method=method)
    assert projection.empty_rows.tolist() == ([1] if method == "exact" else [])
    assert row(projection, 0) == {0: 1.0}


def test_the_first_piece_alone_is_one_entry_that_is_not_exact():
    student, teacher = GreedyTokenizer([b"201", b"20", b"x"]), GreedyTokenizer([b"2", b"0", b"20"])
    projection = SparseProjection.from_tokenizers(student, teacher, method="first_piece")
    assert [row(projection, i) for i in range(3)] == [{}, {2: 1.0}, {}]
    teacher = GreedyTokenizer([b"2", b"0", b"1"])
    projection = SparseProjection.from_tokenizers(student, teacher, method="first_piece")
    assert [row(projection, i) for i in range(3)] == [{0: 1.0}, {0: 1.0}, {}]
    assert not projection.is_exact_row.any()


@pytest.mark.parametrize(
    ("decay", "shares"),
    [
        pytest.param(1, [1 / 3, 1 / 3, 1 / 3], id="all alike"),
        pytest.param(0.5, [4 / 7, 2 / 7, 1 / 7], id="halves"),
        pytest.param(1e-9, [1, 1e-9, 1e-18], id="almost the first alone"),
    ],
)
def test_shares_fall_by_the_decay(decay, shares):
    projection = built([b"abc"], [b"a", b"b", b"c"], decay=decay)
    assert row(projection, 0) == pytest.approx(dict(enumerate(shares)), rel=1e-6)


def test_a_reverse_pass_adds_the_tokens_that_the_student_lacks():
    student = GreedyTokenizer([b"ab", b"c", b"d", b"e"])
    teacher = GreedyTokenizer([b"a", b"b", b"abc", b"d", b"ed", b"ab?"])
    reverse = SparseProjection.from_tokenizers(student, teacher, reverse_pass=True, top_k=9)
    # ab: spelled a, b; and the first piece of abc. c: the second piece of abc. d stays exact.
    assert row(reverse, 0) == pytest.approx({0: 10 / 21, 1: 1 / 21, 2: 10 / 21}, rel=1e-6)
    assert [row(reverse, i) for i in (1, 2, 3)] == [{2: 1.0}, {3: 1.0}, {4: 1.0}]
    assert reverse.is_exact_row.tolist() == [False, False, True, False]
    forward = SparseProjection.from_tokenizers(student, teacher)
    assert [row(forward, i) for i in (1, 2, 3)] == [{}, {3: 1.0}, {}]


def test_a_reverse_pass_keeps_the_largest_shares():
    reverse = built([b"ab"], [b"a", b"b", b"abab", b"abababab"], reverse_pass=True, top_k=2)
    assert row(reverse, 0) == {2: 0.5, 3: 0.5}


# Dummy prefixes and bytes that are no text.


@pytest.mark.parametrize(
    ("token", "pieces"),
    [
        pytest.param(b"theory", [b"the", b"ory"], id="without a space"),
        pytest.param(b" theory", [b" the", b"ory"], id="with a space"),
        pytest.param(b"  the", [b" ", b" the"], id="with two spaces"),
    ],
)
def test_a_dummy_prefix_is_in_no_row(token, pieces):
    tokens = [b" ", b"\n", b" the", b"the", b"ory", b"a"]
    projection = SparseProjection.from_tokenizers(
        GreedyTokenizer([token]), GreedyTokenizer(tokens, dummy_prefix=True)
    )
    expected = {tokens.index(pieces[0]): 10 / 11, tokens.index(pieces[1]): 1 / 11}
    assert row(projection, 0) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("token", "pieces"),
    [
        pytest.param(b"\xe4\xbd", [b"\xe4\xbd"], id="the teacher has it"),
        pytest.param(b"\xe4\xbd\xa0\xe5", [b"\xe4\xbd\xa0", b"\xe5"], id="whole and part"),
        pytest.param(b" \xf0\x9f", [b" ", b"\xf0", b"\x9f"], id="space and part"),
        pytest.param(b"\xbd\xbf", [b"\xbd", b"\xbf"], id="continuation bytes"),
    ],
)
def test_part_of_a_character_is_spelled_by_its_bytes(token, pieces):
    tokens = [*every_byte(), b"\xe4\xbd", b"\xe4\xbd\xa0", "\ufffd".encode()]
    projection = SparseProjection.from_tokenizers(GreedyTokenizer([token]), GreedyTokenizer(tokens))
    shares = row(projection, 0)
    by_share = sorted(shares, key=shares.__getitem__, reverse=True)
    assert [tokens[i] for i in by_share] == pieces


def test_bytes_that_the_teacher_cannot_spell_leave_a_row_empty():
    projection = SparseProjection.from_tokenizers(
        GreedyTokenizer([b"\xe4a", b"ab", b""]), GreedyTokenizer(["<unk>", b"a"], unk="<unk>")
    )
    assert projection.empty_rows.tolist() == [0, 1, 2]


# Control tokens.


def test_a_control_token_that_the_teacher_inserts_stands_for_nothing():
    class Separating(GreedyTokenizer):
        def text_to_ids(self, text):
            separator = self.token_to_id("<sep>")
            return [i for token_id in super().text_to_ids(text) for i in (token_id, separator)]

    projection = SparseProjection.from_tokenizers(
        GreedyTokenizer([b"ab"]), Separating(["<sep>", b"a", b"b"])
    )
    assert row(projection, 0) == pytest.approx({1: 10 / 11, 2: 1 / 11}, rel=1e-6)


def test_control_tokens_match_by_role_then_by_name():
    student = GreedyTokenizer(["<|start|>", "</s>", "[INST]", "<mine>", b"a"], bos="<|start|>")
    teacher = GreedyTokenizer([b"a", "[INST]", "</s>", "<bos>"], bos="<bos>")
    projection = SparseProjection.from_tokenizers(student, teacher)
    assert [row(projection, i) for i in range(5)] == [{3: 1.0}, {2: 1.0}, {1: 1.0}, {}, {0: 1.0}]
    assert projection.is_exact_row.tolist() == [True, True, True, False, True]


def test_a_role_of_id_zero_is_a_role():
    student = GreedyTokenizer(["<s>"], bos="<s>")
    teacher = GreedyTokenizer(["<bos>", "<s>"], bos="<bos>")
    assert row(SparseProjection.from_tokenizers(student, teacher), 0) == {0: 1.0}


def test_an_end_token_that_also_pads_is_an_end_token():
    student = GreedyTokenizer(["<end>"], eos="<end>", pad="<end>")
    teacher = GreedyTokenizer(["<pad>", "<eos>"], eos="<eos>", pad="<pad>")
    assert row(SparseProjection.from_tokenizers(student, teacher), 0) == {1: 1.0}


def test_a_control_token_is_not_text_of_the_same_name():
    student = GreedyTokenizer(["[INST]", b"[INST]"])
    teacher = GreedyTokenizer([b"[INST]"])
    projection = SparseProjection.from_tokenizers(student, teacher)
    assert row(projection, 0) == {}
    assert row(projection, 1) == {0: 1.0}


def test_a_control_token_without_a_match_stands_for_those_of_similar_names():
    student = GreedyTokenizer(["<|eot_id|>", "<|image_start|>", "<s>", "zzz"], bos="<s>")
    names = ["<bos>", "<|eot|>", "<image_start>", "<image_end>", "<unused0>", "<unused1>"]
    teacher = GreedyTokenizer(names, bos="<bos>")
    projection = SparseProjection.from_tokenizers(student, teacher, control_similarity=0.5)
    assert [set(row(projection, i)) for i in range(4)] == [{1}, {2, 3}, {0}, set()]
    assert row(projection, 1)[2] > row(projection, 1)[3]
    assert projection.is_exact_row.tolist() == [False, False, True, False]
    without = SparseProjection.from_tokenizers(student, teacher)
    assert [row(without, i) for i in range(4)] == [{}, {}, {0: 1.0}, {}]
    one = SparseProjection.from_tokenizers(
        student, teacher, method="first_piece", control_similarity=0.5
    )
    assert row(one, 1) == {2: 1.0}


# Any vocabulary.

vocabularies = st.lists(st.binary(min_size=1, max_size=6) | st.text(max_size=4).map(str.encode))


@given(vocabularies, vocabularies, st.booleans())
@settings(deadline=None)
def test_every_row_is_spelled_by_tokens_of_a_teacher_that_has_every_byte(
    student_tokens, more, dummy_prefix
):
    tokens = [*every_byte(), *(token for token in more if token)]
    teacher = GreedyTokenizer(tokens, dummy_prefix=dummy_prefix)
    projection = SparseProjection.from_tokenizers(GreedyTokenizer(student_tokens), teacher)
    for student_id, token in enumerate(student_tokens):
        shares = row(projection, student_id)
        assert bool(shares) == bool(token)
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-6) or not token
        assert all(tokens[i] in token for i in shares)
        is_its_id = student_id == id_for(token, student_tokens)
        assert projection.is_exact_row[student_id] == (token in tokens and is_its_id)
        if shares:
            assert token.startswith(tokens[max(shares, key=shares.__getitem__)])


@given(
    st.lists(st.binary(max_size=5) | st.sampled_from(["<s>", "<a>", "<end>", "<|end|>"])),
    st.lists(st.binary(min_size=1, max_size=3) | st.sampled_from(["<s>", "<b>", "<|end|>"])),
    st.sampled_from(["exact", "retokenized", "first_piece"]),
    st.booleans(),
    st.sampled_from([None, 0.3]),
    st.integers(1, 5),
)
@settings(deadline=None)
def test_rows_of_every_builder_are_a_projection_of_related_tokens(
    student_tokens, teacher_tokens, method, reverse_pass, control_similarity, top_k
):
    student, teacher = GreedyTokenizer(student_tokens), GreedyTokenizer(teacher_tokens)
    projection = SparseProjection.from_tokenizers(
        student,
        teacher,
        method=method,
        reverse_pass=reverse_pass and method != "first_piece",
        control_similarity=control_similarity,
        top_k=top_k,
    )
    for student_id, token in enumerate(student_tokens):
        shares = row(projection, student_id)
        assert len(shares) <= (1 if method == "first_piece" else top_k)
        assert not shares or sum(shares.values()) == pytest.approx(1.0, abs=1e-6)
        for other in (teacher_tokens[i] for i in shares):
            assert isinstance(token, str) == isinstance(other, str)
            assert isinstance(token, str) or other in token or token in other
        if projection.is_exact_row[student_id]:
            assert [teacher_tokens[i] for i in shares] == [token]
    partition = projection.partition()
    ordinary = [
        i for i in partition.common_student.tolist() if isinstance(student_tokens[i], bytes)
    ]
    shared = {t for t in student_tokens if isinstance(t, bytes)} & set(teacher_tokens)
    assert {student_tokens[i] for i in ordinary} == shared
    assert len(ordinary) == len(shared)


# The demo pair.


def test_every_row_of_the_demo_pair_sums_to_one_or_is_a_control_token(demo, tekken):
    sums = np.add.reduceat(np.append(demo.values, np.float32(0)), demo.indptr[:-1])
    filled = np.diff(demo.indptr) > 0
    np.testing.assert_allclose(sums[filled], 1.0, rtol=0, atol=1e-6)
    assert demo.shape == (131_072, 32_768)
    assert all(tekken.token_bytes(i) is None for i in demo.empty_rows.tolist())


def test_exact_rows_of_the_demo_pair_are_equal_bytes(demo, tekken, sentencepiece):
    columns = demo.indices[demo.indptr[:-1][demo.is_exact_row]]
    for student_id, teacher_id in zip(
        np.flatnonzero(demo.is_exact_row).tolist(), columns.tolist(), strict=True
    ):
        assert tekken.token_bytes(student_id) == sentencepiece.token_bytes(teacher_id)


def test_other_rows_of_the_demo_pair_start_with_what_the_teacher_predicts_first(
    demo, tekken, sentencepiece
):
    for student_id in np.flatnonzero(~demo.is_exact_row & (np.diff(demo.indptr) > 0))[::7].tolist():
        shares = row(demo, student_id)
        first = sentencepiece.token_bytes(max(shares, key=shares.__getitem__))
        assert tekken.token_bytes(student_id).startswith(first)


def test_no_row_of_the_demo_pair_holds_a_piece_that_is_not_in_its_token(
    demo, tekken, sentencepiece
):
    rows = np.repeat(np.arange(demo.shape[0]), np.diff(demo.indptr))
    pieces = [sentencepiece.token_bytes(i) for i in range(sentencepiece.vocab_size)]
    for student_id, teacher_id in zip(rows.tolist(), demo.indices.tolist(), strict=True):
        token = tekken.token_bytes(student_id)
        assert token is None or pieces[teacher_id] in token


def test_newlines_and_spaces_of_the_demo_pair_are_those_that_the_teacher_emits(
    demo, tekken, sentencepiece
):
    for token, piece in ((b"\n", "<0x0A>"), (b"A", "A"), (b" ", "▁"), (b" the", "▁the")):
        assert row(demo, id_of(tekken, token)) == {sentencepiece.token_to_id(piece): 1.0}


def test_a_part_of_a_character_of_the_demo_pair_is_spelled_by_byte_pieces(
    demo, tekken, sentencepiece
):
    def is_part(token):
        return token is not None and len(token) > 1 and token.decode(errors="ignore") == ""

    parts = [i for i in range(tekken.vocab_size) if is_part(tekken.token_bytes(i))]
    assert len(parts) > 100
    for student_id in parts:
        token, shares = tekken.token_bytes(student_id), row(demo, student_id)
        pieces = {sentencepiece.id_to_token(i) for i in shares}
        assert pieces == {f"<0x{byte:02X}>" for byte in token[:4]}


def test_the_demo_pair_projects_the_other_way_round_too(tekken, sentencepiece):
    reverse = SparseProjection.from_tokenizers(sentencepiece, tekken)
    assert reverse.shape == (32_768, 131_072)
    for token in (b"\xe4", b"7", b"the", b" the"):
        assert row(reverse, id_of(sentencepiece, token)) == {id_of(tekken, token): 1.0}


# What a build says of itself, and refuses.


def test_metadata_says_pair_method_and_options():
    student, teacher = GreedyTokenizer([b"a"]), GreedyTokenizer([b"a", b"b"])
    metadata = SparseProjection.from_tokenizers(student, teacher, top_k=3).metadata
    assert metadata["method"] == "retokenized"
    assert json.loads(metadata["options"]) == {
        "top_k": 3,
        "pieces": None,
        "decay": 0.1,
        "reverse_pass": False,
        "control_similarity": None,
    }
    assert metadata["builder"] == f"megatron-ext {megatron_ext.__version__}"
    assert metadata["student_fingerprint"] == student.fingerprint()
    assert metadata["teacher_fingerprint"] == teacher.fingerprint()
    assert (metadata["student_vocab_size"], metadata["teacher_vocab_size"]) == ("1", "2")


def test_an_unknown_method_lists_the_choices():
    tokenizer = GreedyTokenizer([b"a"])
    with pytest.raises(UnknownNameError, match="expected one of exact, retokenized, first_piece"):
        SparseProjection.from_tokenizers(tokenizer, tokenizer, method="retokenised")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"top_k": 0}, "top_k leaves no entry in a row; got 0", id="top_k"),
        pytest.param({"top_k": 2.0}, "top_k leaves no entry in a row; got 2.0", id="fraction"),
        pytest.param({"pieces": 0}, "pieces: no piece of a spelling counts", id="no pieces"),
        pytest.param({"decay": 0}, "decay: .* got 0; expected above 0", id="no decay"),
        pytest.param({"decay": 1.5}, "decay: .* at most 1", id="growth"),
        pytest.param({"decay": float("nan")}, "decay: .* got nan", id="nan"),
        pytest.param({"control_similarity": 0}, "control_similarity: .* got 0", id="similarity"),
        pytest.param({"control_similarity": 2}, "control_similarity: .* got 2", id="more than 1"),
        pytest.param(
            {"method": "first_piece", "reverse_pass": True}, "use the method retok", id="both"
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    tokenizer = GreedyTokenizer([b"a"])
    with pytest.raises(ProjectionError, match=message):
        SparseProjection.from_tokenizers(tokenizer, tokenizer, **options)
