"""The audit of a pair against a recount chunk by chunk."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from megatron_ext.alignment import ChunkCounts, align_byte_ends
from megatron_ext.alignment.audit import AuditDocument, PairAudit, document, pair_audit
from megatron_ext.errors import DataError
from tests.alignment.audit.piece_tokenizer import PieceTokenizer

TEXTS = [
    "The house costs $2017 and 12 cents.\n\tx = my_name[3] + 日本語の🤷‍♀️",
    "Привет, мир! नमस्ते 42",
    "   ",
    "",
    "def f(self):\n    return self.__class__.__name__ == 'naïve'  # 1000\n",
]


def audit(student, teacher, texts, **document):
    found = PairAudit(student, teacher)
    found.add(AuditDocument(text, "corpus", **document) for text in texts)
    return found.report()


def recounted(student, teacher, texts):
    """Counts of all chunks, and how often each pair of ids that is not 1:1 occurs."""
    counts, offenders = ChunkCounts(), Counter()
    for text in texts:
        ids, ends = zip(*(t.encode_with_byte_ends(text) for t in (student, teacher)), strict=True)
        alignment = align_byte_ends(*ends)
        counts += ChunkCounts.of(alignment)
        for (a, b), (c, d) in zip(
            alignment.student_spans.tolist(), alignment.teacher_spans.tolist(), strict=True
        ):
            if b - a > 1 or d - c > 1:
                offenders[tuple(ids[0][a:b].tolist()), tuple(ids[1][c:d].tolist())] += 1
    return counts, offenders


@pytest.mark.parametrize("batch_characters", [1, 1 << 21], ids=["batches of one", "one batch"])
def test_counts_are_those_of_a_recount(tekken, sentencepiece, monkeypatch, batch_characters):
    monkeypatch.setattr(pair_audit, "BATCH_CHARACTERS", batch_characters)
    report = audit(tekken, sentencepiece, TEXTS * 2)
    counts, offenders = recounted(tekken, sentencepiece, TEXTS * 2)
    assert report.total.counts == counts
    assert report.documents == 8
    assert report.byte_count == report.total.byte_count == 2 * sum(len(t.encode()) for t in TEXTS)
    assert report.student.tokens == report.total.student_tokens + counts.student_unaligned
    assert report.teacher.tokens == report.total.teacher_tokens + counts.teacher_unaligned
    assert report.repeats == sum(
        count
        for (own, its), count in offenders.items()
        if len(own) == 1 and len(its) > 1 and len({*its}) == 1
    )
    for rows in (report.scripts, report.classes):
        assert sum(row.counts.one_to_one for row in rows) == counts.one_to_one
        assert sum(row.counts.chunks for row in rows) == counts.chunks
        assert sum(row.byte_count for row in rows) == report.byte_count
    listed = {
        (
            tuple(p.token_id for p in one.example.student),
            tuple(p.token_id for p in one.example.teacher),
        ): one.count
        for one in report.most_tokens
    }
    assert len(listed) == min(25, len(offenders))
    assert all(offenders[ids] == count for ids, count in listed.items())
    tokens = sorted((n * (len(a) + len(b)) for (a, b), n in offenders.items()), reverse=True)
    assert [one.tokens for one in report.most_tokens] == tokens[:25]


def test_every_number_of_a_small_pair():
    student = PieceTokenizer("a", " ", "2", "17", "日", "bc", refused="!")
    teacher = PieceTokenizer("a", " 2", "1", "7", b"\xe6", b"\x97\xa5", "b", "c", "7日")
    report = audit(student, teacher, ["a 217日bc", "bc", "a!", "z"])
    total = report.total
    assert total.counts == ChunkCounts(one_to_one=2, one_to_many=2, many_to_one=1, many_to_many=1)
    assert (total.student_tokens, total.teacher_tokens, total.byte_count) == (8, 9, 13)
    assert (total.one_to_one_bytes, total.many_to_many_bytes) == (2, 5)
    assert (report.student.tokens, report.teacher.tokens) == (8, 9)
    assert (report.student.unknown_tokens, report.student.unknown_bytes) == (1, 1)
    assert (report.student.longest_chunk, report.teacher.longest_chunk) == (2, 2)
    assert report.longest_chunk_bytes == 5
    assert report.student.bytes_per_token == 13 / 8
    assert (report.documents, report.refused_documents) == (3, 1)
    assert report.refused[0].place == "corpus:1"
    assert "holds !" in report.refused[0].problem
    assert {row.name: row.counts.chunks for row in report.classes} == {
        "digits-3": 1,
        "letters": 4,
        "mixed": 1,
    }
    assert {row.name: row.counts.chunks for row in report.scripts} == {
        "Latin": 4,
        "Common": 1,
        "Han": 1,
    }
    by_text = {one.example.text: one for one in report.most_tokens}
    assert by_text["bc"].count == 2
    assert by_text["bc"].tokens == 6
    assert [piece.text for piece in by_text["bc"].example.teacher] == ["b", "c"]
    assert by_text["17日"].example.before == "a 2"
    assert by_text["17日"].example.after == "bc"


def test_a_part_of_a_character_has_the_class_and_script_of_the_whole():
    student = PieceTokenizer(b"\xe6", b"\x97", b"\xa5", "x")
    teacher = PieceTokenizer(b"\xe6", b"\x97\xa5", "x")
    report = audit(student, teacher, ["x日"])
    assert {row.name: row.counts.chunks for row in report.scripts} == {"Han": 2, "Latin": 1}
    assert [piece.text for piece in report.most_tokens[0].example.teacher] == ["<97 a5>"]
    assert [piece.text for piece in report.most_tokens[0].example.student] == ["<97>", "<a5>"]


def test_a_document_that_one_side_has_no_token_for_joins_no_other():
    student = PieceTokenizer("a", " ", "b", skips=True)
    teacher = PieceTokenizer("a", " ", "b")
    report = audit(student, teacher, ["a", "  ", "b"])
    assert report.total.counts == ChunkCounts(one_to_one=2, teacher_unaligned=2)
    assert report.total.byte_count == 2
    assert report.byte_count == 4


def test_text_that_no_token_covers_is_no_audit(tekken):
    with pytest.raises(DataError, match="no text to audit"):
        audit(tekken, tekken, ["", ""])


def test_tokens_that_repeat_one_of_the_teachers_are_counted():
    student = PieceTokenizer("aa", "aaa", "ab", "a", "b", "bb")
    teacher = PieceTokenizer("a", "b", "bb")
    # Two and three copies; ``ab`` is none, nor are single tokens, nor what both have.
    assert audit(student, teacher, ["aa", "aaab", "abb", "bb"]).repeats == 2
    assert audit(teacher, student, ["aa", "aaab", "abb", "bb"]).repeats == 0


def test_the_same_tokenizer_is_one_to_one_and_needs_no_projection(tekken):
    report = audit(tekken, tekken, TEXTS)
    assert report.total.counts.one_to_one == report.total.counts.chunks > 0
    assert report.most_tokens == []
    assert report.recommendation.objective == "vocab_kl"


def test_control_tokens_are_unaligned_and_in_no_row(tekken, monkeypatch):
    encode = tekken.encode_with_byte_ends

    class WithBos:
        def __getattr__(self, name):
            return getattr(tekken, name)

        def text_to_flat_ids(self, texts):
            rows = [self.encode_with_byte_ends(text)[0] for text in texts]
            return np.concatenate(rows), np.cumsum([0, *map(len, rows)])

        def encode_with_byte_ends(self, text):
            ids, ends = encode(text)
            return np.insert(ids, 0, tekken.bos_id), np.insert(ends, 0, 0)

    report = audit(WithBos(), tekken, ["a b", "c"])
    assert report.total.counts == ChunkCounts(one_to_one=3, student_unaligned=2)


def test_a_long_document_is_audited_in_pieces_cut_in_front_of_lines(monkeypatch):
    monkeypatch.setattr(document, "PIECE_CHARACTERS", 10)
    text = "ab cd\n  ef gh\n\nij kl mn op\nqr st uv wx\nyz yz\n" * 3
    whole = AuditDocument(text, "corpus", line=5, is_whole_file=True)
    pieces = list(whole.pieces())
    assert "".join(piece.text for piece in pieces) == text
    assert len(pieces) > 3
    assert all(not piece.text[0].isspace() for piece in pieces)
    assert [piece.begins_document for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    at = 0
    for piece in pieces:
        assert piece.place(3) == whole.place(at + 3)
        at += len(piece.text)
    report = audit(PieceTokenizer(*"abc"), PieceTokenizer(*"abc"), [text])
    assert report.documents == 1
    assert report.byte_count == len(text)
    assert list(AuditDocument("a b" * 30, "corpus").pieces()) == [
        AuditDocument("a b" * 30, "corpus")
    ]


def test_an_example_names_the_line(tekken):
    student, teacher = PieceTokenizer("ab", "\n", "x"), PieceTokenizer("a", "b", "\n", "x")
    in_file = audit(student, teacher, ["x\nx\nab"], is_whole_file=True, line=3)
    assert in_file.most_tokens[0].example.place == "corpus:5"
    in_record = audit(student, teacher, ["x\nx\nab"], line=3)
    assert in_record.most_tokens[0].example.place == "corpus:3"


def test_bounds_of_chunks_are_those_of_their_bytes(tekken, sentencepiece):
    """Longest chunk in bytes, recounted from the byte ends alone."""
    longest = 0
    for text in filter(None, TEXTS):
        ends = [set(t.encode_with_byte_ends(text)[1].tolist()) for t in (tekken, sentencepiece)]
        common = sorted({0, *(ends[0] & ends[1])})
        longest = max([longest, *(b - a for a, b in pairwise(common))])
    assert audit(tekken, sentencepiece, TEXTS).longest_chunk_bytes == longest
