"""Rows of a batch that are no longer than its longest text."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.data.aligner import PackedSample
from megatron_ext.errors import ConfigError
from tests.data.readers import TEXTS, collator


@pytest.mark.parametrize("multiple", [1, 16, 50, 1000])
def test_rows_lose_padding_and_nothing_else(multiple: int) -> None:
    texts = TEXTS[:3]
    whole, short = collator(220, 230)(texts), collator(220, 230, row_multiple=multiple)(texts)
    for full, cut, most in (
        (whole.student, short.student, 220),
        (whole.teachers["sp"], short.teachers["sp"], 230),
    ):
        longest = int(full.lengths.max())
        length = min(-(-longest // multiple) * multiple, most)
        assert cut.input_ids.shape == (3, length)
        for name in ("input_ids", "labels", "loss_mask"):
            assert torch.equal(getattr(cut, name), getattr(full, name)[:, :length])
        assert (full.labels[:, length:] == IGNORE_INDEX).all()
        assert torch.equal(cut.lengths, full.lengths)
    for name, alignment in whole.alignments.items():
        its = short.alignments[name]
        assert its.chunk_count == alignment.chunk_count > 0
        for ids, cut_ids in (
            (alignment.student_chunk_id, its.student_chunk_id),
            (alignment.teacher_chunk_id, its.teacher_chunk_id),
        ):
            assert torch.equal(cut_ids, ids[:, : cut_ids.shape[1]])
        # Spans count positions of all rows, so that they are of the shorter rows too.
        first = its.student_spans[:, 0]
        assert torch.equal(its.student_chunk_id.flatten()[first], torch.arange(len(first)))
    assert short.teachers["same"] is short.student
    assert short.token_count == whole.token_count


def test_rows_without_a_text_are_as_short_as_rows_may_be() -> None:
    batch = collator(64, 80, row_multiple=8)([PackedSample(()), PackedSample(())])
    assert batch.student.input_ids.shape == (2, 8)
    assert batch.teachers["sp"].input_ids.shape == (2, 8)


def test_a_multiple_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="row_multiple of the student is too small"):
        collator(row_multiple=0)
