from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.errors import LossError
from megatron_ext.losses import TargetKind
from megatron_ext.losses.diagnostics import FiniteCheck, check_finite
from tests.losses.check_ranks import errors_of_poison
from tests.losses.microbatch import Microbatch
from tests.losses.objective_cases import as_kind, inputs_of
from tests.process_group import run_ranks


def test_a_number_that_one_rank_alone_holds_is_an_error_on_both() -> None:
    first, second = run_ranks(2, errors_of_poison)
    assert first == second
    assert first["nothing"] is None
    assert first["student"].startswith("iteration 7: the student's predictions hold NaN or inf")
    assert "the teacher's predictions" in first["teacher"]
    assert "the student and the teacher's predictions" in first["both"]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["logits", "hidden", "topk", "label"])
def test_every_form_of_teacher_targets_is_looked_at(kind: TargetKind, poison: float) -> None:
    batch = Microbatch.random()
    inputs = as_kind(inputs_of(batch, (3, 1)), kind, top_k=5)
    assert check_finite(inputs).bad.tolist() == [0, 0]
    assert inputs.alignment is not None
    used = inputs.alignment.teacher_chunk_id >= 0
    teacher = inputs.teacher
    assert teacher is not None
    name = {"logits": "logits", "hidden": "hidden", "topk": "topk_logits"}.get(
        kind, "label_log_probs"
    )
    values = getattr(teacher, name).clone()
    values[~used] = poison
    unused = replace(inputs, teacher=replace(teacher, **{name: values}))
    assert check_finite(unused).bad.tolist() == [0, 0]
    values = getattr(teacher, name).clone()
    values[used] = poison
    bad = replace(inputs, teacher=replace(teacher, **{name: values}))
    assert check_finite(bad).bad.tolist() == [0, 1]


def test_masked_tokens_padding_and_rows_that_nobody_reads_are_good() -> None:
    inputs = Microbatch.random().inputs(padding=(3, 1))
    assert inputs.alignment is not None
    logits = inputs.student_logits.detach().clone()
    logits[..., 5] = -torch.inf
    logits[..., 37:] = torch.nan
    unread = (inputs.labels == IGNORE_INDEX) & (inputs.alignment.student_chunk_id < 0)
    assert unread.any()
    logits[unread] = torch.nan
    assert check_finite(replace(inputs, student_logits=logits)).bad.tolist() == [0, 0]
    read = (~unread).nonzero()[0]
    logits[read[0], read[1], 2] = torch.inf
    assert check_finite(replace(inputs, student_logits=logits)).bad.tolist() == [1, 0]


def test_checks_of_several_microbatches_are_one_question() -> None:
    good, bad = (FiniteCheck(torch.tensor(flags)) for flags in ([0, 0], [0, 1]))
    good.merged(good).raise_if_bad()
    with pytest.raises(LossError, match="the teacher's predictions hold NaN"):
        good.merged(bad).merged(good).raise_if_bad()
