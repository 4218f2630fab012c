"""Published tokenizers over published texts: every chunk there is, and no other.

The truth is computed here with sets: from the bytes of each token where these spell the text, and
for tokenizers that normalise from the offsets into the original text that they report.
"""

import json
from functools import cache
from itertools import accumulate, permutations

import numpy as np
import pytest

from megatron_ext.alignment import TokenAligner
from megatron_ext.alignment.audit import AuditDocument, PairAudit
from megatron_ext.errors import TokenizerError
from tests.alignment.shared_text import (
    ALL_TEXT,
    LIBRARY_OF,
    SHARED,
    needs_shared,
    published,
    published_texts,
)

pytestmark = needs_shared

BYTES_OF_EACH = 6_000 if ALL_TEXT else 400
PAIRS = list(permutations(sorted(LIBRARY_OF), 2))
SAMPLE = [
    ("llama3_2", "qwen3"),
    ("t5_small", "bert_uncased"),
    ("llama2_sp", "openai_tiktoken/r50k_base.tiktoken"),
    ("sp_tiny/kyoto_ja_unigram_8000.model", "gpt2"),
]


def true_chunks(sides, pieces):
    """Pairs of token tuples: what stands between one byte where both sides end and the next.

    ``pieces`` are the bytes of the tokens. What has bytes and covers none is a part of the
    character that the next token covers; where both sides have the same parts, they are the chunks.
    """
    chunks = [[[], []] for _ in set(sides[0]) & set(sides[1]) - {0}]
    for side, tokens in enumerate(covering_chunks(sides)):
        for token, chunk in tokens:
            chunks[chunk][side].append(token)
    found = []
    for chunk in chunks:
        whole = [
            with_parts(own, ends, rows)
            for own, ends, rows in zip(chunk, sides, pieces, strict=True)
        ]
        rows = [[own[i] for i in tokens] for own, tokens in zip(pieces, whole, strict=True)]
        has_parts = all(len(own) > len(all_) for own, all_ in zip(whole, chunk, strict=True))
        if has_parts and b"".join(rows[0]) == b"".join(rows[1]):
            found += by_common_sums(whole, rows)
        else:
            found.append(tuple(map(tuple, whole)))
    return found


def with_parts(tokens, ends, pieces):
    """A chunk's tokens, and before each those that are parts of its character."""
    found = []
    for token in tokens:
        first = token
        begin = ends[token - 1] if token else 0
        while first and ends[first - 1] == (ends[first - 2] if first > 1 else 0) == begin:
            first -= 1
        found += [i for i in range(first, token) if pieces[i] not in (b"", b" ")] + [token]
    return found


def by_common_sums(sides, pieces):
    """The tokens of a chunk [2] between one number of bytes that both have spelled and the next."""
    sums = [list(accumulate(map(len, rows))) for rows in pieces]
    chunks, begins = [], [0, 0]
    for total in sorted(set(sums[0]) & set(sums[1])):
        stops = [own.index(total) + 1 for own in sums]
        chunks.append(tuple(tuple(sides[i][begins[i] : stops[i]]) for i in (0, 1)))
        begins = stops
    return chunks


def covering_chunks(sides):
    """For each side its tokens that cover bytes, with the number of the chunk."""
    common = sorted(set(sides[0]) & set(sides[1]) - {0})
    place = {byte: index for index, byte in enumerate(common)}
    for ends in sides:
        tokens = []
        chunk = begin = 0
        for token, end in enumerate(ends):
            if end > begin and chunk < len(common):
                tokens.append((token, chunk))
            if end in place and end > begin:
                chunk = place[end] + 1
            begin = end
        yield tokens


def true_ends(pieces, text, ends):
    """Byte ends from the bytes of the tokens where these are the text's; else from offsets."""
    prefix = len(b"".join(pieces)) - len(text.encode())
    if b"".join(pieces) != b" " * prefix + text.encode() or prefix > 1:
        return ends.tolist()
    return [max(0, total - prefix) for total in accumulate(map(len, pieces))]


def found_chunks(alignment):
    by_chunk = [([], []) for _ in range(alignment.chunk_count)]
    for side, ids in enumerate((alignment.student_chunk_id, alignment.teacher_chunk_id)):
        for token in np.flatnonzero(ids >= 0).tolist():
            by_chunk[ids[token]][side].append(token)
    return [(tuple(student), tuple(teacher)) for student, teacher in by_chunk]


@cache
def encoded(name):
    """Texts with their tokens and true ends; without where the tokenizer cannot represent one."""
    tokenizer = published(name)
    rows = []
    for text in chosen_texts():
        try:
            ids, ends = tokenizer.encode_with_byte_ends(text)
        except TokenizerError:
            rows.append((text, None))
            continue
        unknown = tokenizer.unk_id is not None and tokenizer.unk_id in ids
        pieces = [tokenizer.token_bytes(token_id) or b"" for token_id in ids.tolist()]
        truth = true_ends(pieces, text, ends)
        rows.append((text, None if unknown else ((ids, ends), truth, pieces)))
    return rows


@cache
def chosen_texts():
    chosen = []
    for texts in published_texts().values():
        sizes = accumulate(len(text.encode()) for text in texts)
        chosen += [text for text, size in zip(texts, sizes, strict=True) if size < BYTES_OF_EACH]
    return chosen


@pytest.mark.parametrize(("student", "teacher"), PAIRS if ALL_TEXT else SAMPLE)
def test_every_chunk_is_found_and_no_other(student, teacher):
    aligner = TokenAligner(published(student), published(teacher))
    texts = chunks = 0
    for (text, own), (same_text, other) in zip(encoded(student), encoded(teacher), strict=True):
        assert text == same_text
        if own is None or other is None:
            continue
        truth = true_chunks((own[1], other[1]), (own[2], other[2]))
        found = found_chunks(aligner.align_encoded(own[0], other[0]))
        assert found == truth, text
        texts, chunks = texts + 1, chunks + len(truth)
    assert texts > 0
    assert chunks > texts
    print(f"{student} <- {teacher}: {texts} texts, {chunks} chunks, all found")


def test_the_share_of_1_to_1_chunks_on_gsm8k():
    """Questions and answers of grade-school problems, each a text of its own."""
    lines = (SHARED / "corpora/gsm8k/train.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines[: None if ALL_TEXT else 1000]]
    found = PairAudit(published("llama3_2"), published("qwen3"))
    found.add(
        AuditDocument(record[key], "gsm8k") for record in records for key in ("question", "answer")
    )
    report = found.report()
    assert round(report.total.one_to_one_share, 3) == 0.886
    rows = {row.name: row for row in report.classes}
    # Llama has every number of up to three digits, Qwen has single digits.
    assert rows["digits-2"].counts.one_to_one == rows["digits-3"].counts.one_to_one == 0
    assert rows["digits-1"].one_to_one_share == 1.0
    assert report.recommendation.objective == "projected_kl"
