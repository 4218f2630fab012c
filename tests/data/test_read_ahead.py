"""Global batches that are read ahead leave the state of those that were trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.data.aligner import PackedSample
from megatron_ext.data.global_batches import Place, ReadAhead
from megatron_ext.errors import DataError
from tests.training.test_run_data import WHOLE, run_data

Ids = list[list[int]]


def ids(microbatches: list[list[PackedSample]]) -> Ids:
    samples = [sample for rows in microbatches for sample in rows]
    return [[int(number) for number in sample.pieces[0].student_ids] for sample in samples]


def state(batches: Any) -> dict[str, Any]:
    found: dict[str, Any] = batches.state([batches.positions()])
    return found


def test_what_is_taken_and_the_state_behind_it_do_not_depend_on_the_depth(tmp_path: Path) -> None:
    data = run_data(tmp_path)
    plain = data.batches(WHOLE)
    ahead = ReadAhead(data.batches(WHOLE), ids, depth=2, total=4)
    assert state(ahead) == state(plain)
    for iteration in range(1, 5):
        assert ahead.take() == ids(plain.take())
        assert ahead.iteration == iteration
        assert state(ahead) == state(plain)
        coming = [number for number, _ in ahead.ahead()]
        # Nothing is read that the run does not train on.
        assert coming == [n for n in (iteration + 1, iteration + 2) if n <= 4]


def test_a_run_that_is_resumed_takes_what_was_only_read_ahead(tmp_path: Path) -> None:
    data = run_data(tmp_path)
    first = ReadAhead(data.batches(WHOLE), ids, depth=2)
    first.take()
    saved = state(first)
    expected = [first.take(), first.take()]
    again = ReadAhead(data.batches(WHOLE), ids, depth=1)
    again.take()
    again.load_state(saved)
    assert [again.take(), again.take()] == expected
    assert again.iteration == 3


class _Broken:
    """Global batches of which the third cannot be read; each counts what it met."""

    def __init__(self) -> None:
        self.iteration = 0

    def place(self) -> Place:
        return Place(self.iteration, [], [])

    def take(self) -> list[list[PackedSample]]:
        if self.iteration == 2:
            raise DataError("a document cannot be read")
        self.iteration += 1
        return []

    def refused(self) -> list[Any]:
        return [self.iteration]

    def retokenized_since_asked(self) -> int:
        return 10 * self.iteration

    def restarts_since_asked(self) -> int:
        return 100 * self.iteration


def test_counts_and_errors_are_those_of_the_batch_that_is_taken() -> None:
    broken: Any = _Broken()
    ahead = ReadAhead(broken, lambda rows: rows, depth=3)
    for iteration in (1, 2):
        ahead.take()
        assert ahead.refused() == [iteration]
        assert ahead.refused() == []
        assert ahead.retokenized_since_asked() == 10 * iteration
        assert ahead.restarts_since_asked() == 100 * iteration
    with pytest.raises(DataError, match="a document cannot be read"):
        ahead.take()
