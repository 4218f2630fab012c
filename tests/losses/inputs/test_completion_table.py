import os
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.errors import LossError
from megatron_ext.losses import ChunkCompletions, CompletionTable
from tests.conversation.shared_files import needs_shared, published_tokenizer

STUDENT = [b"a", b"b", b"ab", b"abc", b"c", None, b"", b"ab"]
TEACHER = [b"bc", b"a", b"b", b"c", b"ba"]
TABLE = CompletionTable.from_token_bytes(STUDENT, TEACHER)


def test_every_prefix_has_the_pairs_that_a_search_of_all_pairs_finds() -> None:
    # Of two student ids that spell "ab", the lower one stands for them.
    whole = {token: STUDENT.index(token) for token in STUDENT if token}
    truth: dict[bytes, list[tuple[int, int]]] = {}
    for (token, student), (teacher, part) in product(whole.items(), enumerate(TEACHER)):
        if token.endswith(part) and len(token) > len(part):
            truth.setdefault(token[: -len(part)], []).append((student, teacher))
    assert set(TABLE.student_wholes.row) == set(truth)
    for prefix, pairs in truth.items():
        found = zip(*(ids.tolist() for ids in TABLE.student_wholes.behind(prefix)), strict=True)
        assert sorted(found) == sorted(pairs)
    assert truth == {b"a": [(2, 2), (3, 0)], b"ab": [(3, 3)]}


@pytest.mark.parametrize(
    ("student", "teacher", "completions"),
    [
        ([3], [1, 0], [(3, 0), (2, 2)]),
        ([3], [1, 2, 3], [(3, 3)]),
        ([7], [1, 2], [(7, 2), (3, 0)]),
        ([1, 4], [0], [(4, 0), (0, 4)]),
        ([2], [1], [(2, 1)]),
        ([2, 4], [1, 0], [(4, 0)]),
        ([3], [1, 2], [(3, 2)]),
        ([5], [1, 2], [(5, 2)]),
    ],
    ids=[
        "one to two",
        "one to three",
        "an id that another stands for",
        "two to one",
        "one to one",
        "several a side",
        "other bytes",
        "a control token",
    ],
)
def test_completions_begin_with_what_was_observed(
    student: list[int], teacher: list[int], completions: list[tuple[int, int]]
) -> None:
    found = TABLE.completions(student, teacher)
    assert list(zip(*(ids.tolist() for ids in found), strict=True)) == completions


def test_a_limit_keeps_the_observed_pair_and_the_lowest_ids() -> None:
    student = [b"z", b"az", b"ay", b"ax"]
    table = CompletionTable.from_token_bytes(student, [b"a", b"x", b"y", b"z"])
    found = table.completions([3], [0, 1], limit=1)
    assert [ids.tolist() for ids in found] == [[3, 1], [1, 3]]


def test_rows_labels_and_pointers_of_a_batch() -> None:
    alignment = AlignmentBatch.from_chunk_ids(
        torch.tensor([[0, 1, -1, 2, 2], [3, 4, -1, -1, -1]]),
        torch.tensor([[0, 1, 1, 2], [3, 4, 4, -1]]),
    )
    batch = ChunkCompletions.of(
        alignment,
        torch.tensor([[0, 3, -100, 1, 4], [-100, 2, 0, 0, 0]]),
        torch.tensor([[1, 1, 0, 0], [1, 1, -100, 0]]),
        TABLE,
    )
    # Chunk 3 needs no label; chunk 4 is left out for the teacher's.
    assert batch.single_chunk.tolist() == [0, 3]
    assert [rows.tolist() for rows in batch.singles] == [[0, 5], [0, 4]]
    assert batch.chain_chunk.tolist() == [1, 2]
    assert [part.tolist() for part in batch.chains.student] == [
        [3],
        [1],
        [1],
        [0],
        [1, 4],
        [3, 2, 4, 0],
    ]
    assert [part.tolist() for part in batch.chains.teacher] == [
        [1],
        [1],
        [0],
        [0],
        [2, 3],
        [0, 2, 0, 4],
    ]
    assert batch.chains.completion_chain.tolist() == [0, 0, 1, 1]
    assert batch.chains.completion_pointers == (0, 2, 4)
    assert batch.chains.longest == 1
    assert batch.chunk_count == 5


def test_labels_of_another_batch_or_vocabulary_are_refused() -> None:
    ids = torch.tensor([[0, 1]])
    alignment = AlignmentBatch.from_chunk_ids(ids, ids)
    with pytest.raises(LossError, match=r"student's labels.*got \(1, 3\); expected \(1, 2\)"):
        ChunkCompletions.of(alignment, torch.zeros(1, 3, dtype=torch.int64), ids, TABLE)
    with pytest.raises(LossError, match=r"label of the teacher.*got 5; expected below 5"):
        ChunkCompletions.of(alignment, ids, torch.tensor([[5, 0]]), TABLE)


def test_a_digit_goes_on_as_the_numbers_of_another_vocabulary_do() -> None:
    numbers = [str(n).encode() for n in range(1000)]
    table = CompletionTable.from_token_bytes(numbers, numbers[:10])
    _check_digits(table, observed=([123], [1, 2, 3]), numbers=range(1000), digits=range(10))


@needs_shared
@pytest.mark.skipif(
    not os.environ.get("MEGATRON_EXT_ALL_TEXT"),
    reason="large vocabularies: set MEGATRON_EXT_ALL_TEXT=1",
)
def test_a_digit_of_qwen3_goes_on_as_the_numbers_of_llama3_2_do() -> None:
    student = published_tokenizer("llama3_2")
    numbers = [student.text_to_ids(str(n))[-1] for n in range(1000)]
    student_bytes = [student.token_bytes(token) for token in range(student.vocab_size)]
    teacher = published_tokenizer("qwen3")
    digits = [teacher.text_to_ids(str(digit))[-1] for digit in range(10)]
    table = CompletionTable.from_token_bytes(
        student_bytes, [teacher.token_bytes(token) for token in range(teacher.vocab_size)]
    )
    observed = [numbers[123]], [digits[1], digits[2], digits[3]]
    _check_digits(table, observed=observed, numbers=numbers, digits=digits)


def _check_digits(
    table: CompletionTable,
    *,
    observed: tuple[list[int], list[int]],
    numbers: Sequence[int],
    digits: Sequence[int],
) -> None:
    """The number 123 against its digits: "12" goes on as ten numbers do, and by a digit each.

    Args:
        numbers: Number -> its student id.
        digits: Digit -> its teacher id.
    """
    found = table.completions(*observed)
    assert found[0][0] == numbers[123]
    by_last = {t: s for s, t in zip(*(x.tolist() for x in found), strict=True) if t in set(digits)}
    assert by_last == {digits[n % 10]: numbers[n] for n in range(120, 130)}
    assert np.all(np.diff(table.student_wholes.pointers) >= 1)
