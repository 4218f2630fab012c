"""Predictions that are no numbers and shards that do not fit are an error on every rank."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses import LOSS_REGISTRY, TargetKind
from megatron_ext.losses.checks import check_shard
from megatron_ext.losses.diagnostics import FiniteCheck, check_finite
from tests.losses.check_ranks import all_checks
from tests.losses.microbatch import Microbatch
from tests.losses.objective_cases import CASES, as_kind, inputs_of
from tests.ops.kernel_case import EVERY_COMBINATION
from tests.process_group import run_ranks


@pytest.fixture(scope="module")
def checks_of_ranks() -> list[tuple[Any, ...]]:
    """Of two ranks: errors of poison, flags of poison and errors of shards."""
    return list(zip(*run_ranks(2, all_checks), strict=True))


def test_a_number_that_one_rank_alone_holds_is_an_error_on_both(
    checks_of_ranks: list[tuple[Any, ...]],
) -> None:
    first, second = checks_of_ranks[0]
    assert first == second
    assert first["nothing"] is None
    assert first["student"].startswith("iteration 7: the student's predictions hold NaN or inf")
    assert "the teacher's predictions" in first["teacher"]
    assert "the student's and the teacher's predictions" in first["both"]


def test_sums_of_rows_tell_every_rank_of_a_number_that_one_alone_holds(
    checks_of_ranks: list[tuple[Any, ...]],
) -> None:
    for flags in checks_of_ranks[1]:
        for name, by_place in flags.items():
            for place, (read, told) in by_place.items():
                expected = [place == "student", place == "teacher"]
                assert read == told == list(map(int, expected)), (name, place)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["logits", "hidden", "topk", "label"])
def test_every_form_of_teacher_targets_is_looked_at(kind: TargetKind, poison: float) -> None:
    batch = Microbatch.random()
    inputs = as_kind(inputs_of(batch, (3, 1)), kind, top_k=5)
    assert check_finite(inputs).bad.tolist() == [[0, 0]]
    used = inputs.alignment.teacher_chunk_id >= 0
    teacher = inputs.teacher
    name = {"logits": "logits", "hidden": "hidden", "topk": "topk_logits"}.get(
        kind, "label_log_probs"
    )
    values = getattr(teacher, name).clone()
    values[~used] = poison
    unused = replace(inputs, teacher=replace(teacher, **{name: values}))
    assert check_finite(unused).bad.tolist() == [[0, 0]]
    values = getattr(teacher, name).clone()
    values[used] = poison
    bad = replace(inputs, teacher=replace(teacher, **{name: values}))
    assert check_finite(bad).bad.tolist() == [[0, 1]]


def test_masked_tokens_padding_and_rows_that_nobody_reads_are_good() -> None:
    inputs = Microbatch.random().inputs(padding=(3, 1))
    logits = inputs.student_logits.detach().clone()
    logits[..., 5] = -torch.inf
    logits[..., 37:] = torch.nan
    unread = (inputs.labels == IGNORE_INDEX) & (inputs.alignment.student_chunk_id < 0)
    assert unread.any()
    logits[unread] = torch.nan
    assert check_finite(replace(inputs, student_logits=logits)).bad.tolist() == [[0, 0]]
    read = (~unread).nonzero()[0]
    logits[read[0], read[1], 2] = torch.inf
    assert check_finite(replace(inputs, student_logits=logits)).bad.tolist() == [[1, 0]]


_READ = ("student in a chunk", "teacher in a chunk")
POISONS = [torch.nan, torch.inf, -torch.inf]
POISONED = [*product(["torch", "cpu"], [1.0, 1.7], POISONS), ("triton", 1.7, torch.inf)]
"""Interpreted kernels are slow: all of theirs with MEGATRON_EXT_ALL_TEXT."""
if EVERY_COMBINATION:
    POISONED = [*product(["torch", "cpu", "triton"], [1.0, 1.7], POISONS)]
TELLING = ("projected_kl", "partition_kl", "byte_prefix", "gold", "uld", "alm", "strict_topk")
TELLING += ("sampled_kl",)


@pytest.mark.parametrize("name", TELLING)
@pytest.mark.parametrize(("implementation", "temperature", "poison"), POISONED)
def test_sums_of_rows_tell_what_a_read_of_all_numbers_does(
    name: str, implementation: str, temperature: float, poison: float
) -> None:
    if implementation == "triton":
        pytest.importorskip("triton")
    options = {} if name == "sampled_kl" else {"temperature": temperature}
    objective = LOSS_REGISTRY[name](implementation=implementation, **options)
    inputs = CASES[name].build(Microbatch.random(), (3, 1))
    inputs = replace(inputs, student_logits=inputs.student_logits.detach())
    assert objective.tells_bad(inputs)
    unread = (inputs.labels == IGNORE_INDEX) & (inputs.alignment.student_chunk_id < 0)
    places = {
        "student in a chunk": inputs.alignment.student_chunk_id == 0,
        "student outside": (inputs.alignment.student_chunk_id < 0) & ~unread,
        "student unread": unread,
        "teacher in a chunk": inputs.alignment.teacher_chunk_id == 0,
        "teacher unread": inputs.alignment.teacher_chunk_id < 0,
    }
    places = {name: rows for name, rows in places.items() if rows.any()}
    assert {*_READ, "student unread"} <= places.keys()
    others = torch.arange(inputs.alignment.chunk_count) % 2 == 1
    met = [*product((2, 7), places)]
    if not EVERY_COMBINATION:
        # Each place with one of the columns, and at the other temperature with the other.
        columns = (2, 7) if temperature == 1.0 else (7, 2)
        met = [*zip(columns * len(places), places, strict=False)]
        if implementation == "triton":
            met = [(7, place) for place in _READ]
    for column, place in met:
        teacher, student = inputs.teacher.logits.clone(), inputs.student_logits.clone()
        row = places[place].nonzero()[0].tolist()
        (student if place.startswith("student") else teacher)[(*row, column)] = poison
        bad = replace(
            inputs,
            student_logits=student,
            teacher=replace(inputs.teacher, logits=teacher),
            # Of chunks that another teacher teaches, the first among them.
            chunk_mask=others if column == 2 else None,
        )
        read = check_finite(bad).bad[0].tolist()
        assert objective(bad).bad().tolist() == read, place
        if column == 7 and objective.takes_labels:
            labelled = objective.evaluate(bad, ce_scale=1.0).output
            assert labelled.bad().tolist() == read, place
        is_bad = poison != -torch.inf and "unread" not in place
        assert sum(read) == is_bad, place


@pytest.mark.parametrize("name", ["vocab_kl", "next_token"])
@pytest.mark.parametrize(("implementation", "temperature", "poison"), POISONED)
def test_sums_over_labels_tell_of_their_rows_alone(
    name: str, implementation: str, temperature: float, poison: float
) -> None:
    if implementation == "triton":
        pytest.importorskip("triton")
    options = {"temperature": temperature} if name == "vocab_kl" else {}
    objective = LOSS_REGISTRY[name](implementation=implementation, **options)
    case = CASES[name]
    inputs = replace(case.build(case.batch(), (3, 1)), alignment=None)
    assert objective.tells_bad(inputs)
    labelled = inputs.labels != IGNORE_INDEX
    for side in ("student", "teacher") if name == "vocab_kl" else ("student",):
        for rows, is_read in ((labelled, True), (~labelled, False)):
            student, teacher = inputs.student_logits.detach().clone(), inputs.teacher.logits.clone()
            row = rows.nonzero()[0].tolist()
            (student if side == "student" else teacher)[(*row, 7)] = poison
            bad = replace(
                inputs, student_logits=student, teacher=replace(inputs.teacher, logits=teacher)
            )
            is_bad = is_read and poison != -torch.inf
            assert objective(bad).bad().tolist() == [
                is_bad and side == "student",
                is_bad and side == "teacher",
            ], (side, is_read)


def test_checks_of_several_microbatches_are_one_question() -> None:
    good, bad = (FiniteCheck(torch.tensor([flags])) for flags in ([0, 0], [0, 1]))
    good.merged(good).raise_if_bad()
    with pytest.raises(LossError, match="the teacher's predictions hold NaN"):
        good.merged(bad).merged(good).raise_if_bad()
    several = FiniteCheck(torch.tensor([[0, 0], [0, 1]]), ("teacher code", "teacher maths"))
    with pytest.raises(LossError, match=r"^teacher maths's predictions hold NaN"):
        several.raise_if_bad()


def test_shards_that_differ_or_leave_tokens_out_are_an_error_on_every_rank(
    checks_of_ranks: list[tuple[Any, ...]],
) -> None:
    first, second = checks_of_ranks[2]
    assert (first["right"], first["padded"]) == (None, None)
    assert first["right, host alone"] is None
    for name in ("gap", "other widths", "both the first", "other vocabularies"):
        assert first[name] == second[name] is not None
    assert "do not cover the vocabulary; got 2 of 9 columns" in first["gap"]
    assert (
        "rank 1 has columns 12 to 24 of 20 tokens; expected columns 10 to 20"
        in (first["other widths"])
    )
    assert "rank 1 has columns 0 to 10" in first["both the first"]
    assert "10 to 20 of 19 tokens" in first["other vocabularies"]
    # Without asking the others, a rank knows its own place and the size of the group.
    assert first["gap, host alone"] is not None
    assert first["both the first, host alone"] is None
    assert "is not that of rank 1" in second["both the first, host alone"]


def test_one_rank_alone_holds_every_column() -> None:
    check_shard(VocabShard(start=0, stop=24, vocab_size=20), side="student")
    with pytest.raises(LossError, match=r"student's vocabulary shards do not cover.*1 of 18 col"):
        check_shard(VocabShard(start=0, stop=18, vocab_size=20), side="student")
    with pytest.raises(LossError, match="not that of rank 0; got columns 4 to 24"):
        check_shard(VocabShard(start=4, stop=24, vocab_size=20), side="student")


def test_a_projection_and_a_kind_of_targets_that_are_none_are_named() -> None:
    inputs = Microbatch.random().inputs()
    with pytest.raises(LossError, match=r"got tuple; .* ProjectionShard\.from_projection"):
        LOSS_REGISTRY["projected_kl"]()(replace(inputs, projection=()))
    with pytest.raises(LossError, match="unknown kind of teacher targets; got 'logit'; expected"):
        replace(inputs.teacher, kind="logit")


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_objectives_check_the_shards_of_both_models(side: str) -> None:
    inputs = Microbatch.random().inputs()
    small = VocabShard(start=0, stop=37 if side == "student" else 23, vocab_size=64)
    if side == "student":
        inputs = replace(inputs, student_shard=small)
    else:
        inputs = replace(inputs, teacher=replace(inputs.teacher, shard=small))
    with pytest.raises(LossError, match=f"{side}'s vocabulary shards do not cover"):
        LOSS_REGISTRY["projected_kl"]()(inputs)
