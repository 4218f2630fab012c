"""Sums and gradients of sequences cut over ranks are those of whole sequences."""

from functools import partial
from inspect import signature
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron_ext.distributed.context_parallel import SequenceLayout
from megatron_ext.errors import LossError
from megatron_ext.losses.teacher_scores import sample_scores
from tests.distributed.context_cases import (
    CASES,
    GROUPS,
    LENGTHS,
    Case,
    Rank,
    held,
    objective_of,
    on_every_layout,
    on_this_rank,
    text_of,
    whole_inputs,
)
from tests.distributed.context_row_cases import ROW_CASES, RowCase, Rows, rows_of
from tests.process_group import run_ranks


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[Case, Rank]]]:
    """One spawn for all layouts."""
    return run_ranks(4, on_every_layout, on_this_rank, CASES)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_sums_and_gradients_over_the_ranks_are_those_of_whole_sequences(
    case: Case, name: str, ranks: list[dict[str, dict[Case, Rank]]]
) -> None:
    chunks, order, _, objective = case
    whole = whole_inputs(chunks, objective)
    truth = objective_of(objective)(whole)
    assert (int(truth.count) > 0) == (chunks != "none")
    (true_grad,) = torch.autograd.grad(truth.loss_sum, whole.student_logits)
    scale = max(true_grad.abs().max().item(), 1e-30)

    cp_size, tp_size = GROUPS[name]
    layout = SequenceLayout(size=cp_size, order=order)
    for first in range(0, 4, cp_size * tp_size):
        loss, count, owned = torch.tensor(0.0), 0, []
        for part in range(cp_size):
            shards = [ranks[first + part * tp_size + i][name][case] for i in range(tp_size)]
            loss = loss + shards[0].loss_sum
            count += int(shards[0].count)
            owned += shards[0].chunks.tolist()
            torch.testing.assert_close(
                shards[0].chunk_loss, truth.chunk_loss[shards[0].chunks], rtol=1e-6, atol=1e-6
            )
            grad = torch.cat([shard.grad for shard in shards], dim=-1)
            rows = true_grad[:, held(layout, LENGTHS[0], part)]
            torch.testing.assert_close(grad[..., : rows.shape[-1]], rows, rtol=0, atol=1e-6 * scale)
        assert sorted(owned) == list(range(whole.alignment.chunk_count))
        assert count == int(truth.count)
        torch.testing.assert_close(loss, truth.loss_sum.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", GROUPS)
def test_a_teacher_has_the_scores_of_whole_samples_on_every_rank(
    name: str, ranks: list[dict[str, dict[Case, Rank]]]
) -> None:
    case = CASES[3]
    truth = sample_scores(text_of(whole_inputs(case[0])), "bits_per_byte")
    for rank in range(4):
        torch.testing.assert_close(ranks[rank][name][case].scores, truth, rtol=1e-6, atol=0)


def test_chunks_of_one_rank_leave_the_others_a_zero_with_a_graph(
    ranks: list[dict[str, dict[Case, Rank]]],
) -> None:
    case: Case = ("of the first rank", "contiguous", "logits", "projected_kl")
    assert [int(ranks[rank]["4"][case].count) for rank in range(4)] == [7, 0, 0, 0]
    # Three chunks of ten are masked.
    for rank in range(1, 4):
        result = ranks[rank]["4"][case]
        assert result.loss_sum.item() == 0.0
        assert not result.grad.any()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_zigzag_rank_holds_what_megatron_core_gives_it(size: int) -> None:
    utils = pytest.importorskip("megatron.core.utils")
    layout, tokens = SequenceLayout(size=size), torch.arange(2 * 16).view(2, 16)
    cut = utils.get_batch_on_this_cp_rank
    if "is_hybrid_cp" in signature(cut).parameters:
        # From 0.19 on, without a default; and the group is asked through torch.
        cut = partial(cut, is_hybrid_cp=False)
    for rank in range(size):
        of_size, of_rank = (lambda _: size), (lambda _, rank=rank: rank)
        with (
            patch.multiple(utils, get_pg_size=of_size, get_pg_rank=of_rank),
            patch.multiple(torch.distributed, get_world_size=of_size, get_rank=of_rank),
        ):
            batch = cut({"tokens": tokens}, cp_group=object())
        assert torch.equal(batch["tokens"], tokens[:, held(layout, 16, rank)])


def test_packed_sequences_are_cut_one_by_one() -> None:
    bounds = np.array([0, 4, 4, 12])
    zigzag = SequenceLayout(size=2).holders(bounds)
    assert zigzag.tolist() == [0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 0]
    contiguous = SequenceLayout(size=2, order="contiguous").holders(bounds)
    assert contiguous.tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    with pytest.raises(LossError, match=r"zigzag layout; got length 6; expected a multiple of 4"):
        SequenceLayout(size=2).holders(np.array([0, 4, 10]))


@pytest.fixture(scope="module")
def row_ranks() -> list[dict[str, dict[RowCase, Rows]]]:
    """One spawn for all layouts."""
    return run_ranks(4, on_every_layout, rows_of, ROW_CASES)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("case", ROW_CASES, ids=" ".join)
def test_sums_and_every_gradient_over_the_ranks_are_those_of_whole_sequences(
    case: RowCase, name: str, row_ranks: list[dict[str, dict[RowCase, Rows]]]
) -> None:
    _, order, _ = case
    truth = rows_of(*case)
    assert truth.count > 0
    assert truth.logits.any()
    cp_size, tp_size = GROUPS[name]
    layout = SequenceLayout(size=cp_size, order=order)
    for first in range(0, 4, cp_size * tp_size):
        parts = [
            [row_ranks[first + part * tp_size + i][name][case] for i in range(tp_size)]
            for part in range(cp_size)
        ]
        assert sum(shards[0].count for shards in parts) == truth.count
        total = torch.stack([shards[0].loss_sum for shards in parts]).sum()
        torch.testing.assert_close(total, truth.loss_sum, rtol=1e-6, atol=0)
        for part, shards in enumerate(parts):
            rows = held(layout, LENGTHS[0], part)
            logits = torch.cat([shard.logits for shard in shards], dim=-1)
            assert_near(logits[..., : truth.logits.shape[-1]], truth.logits[:, rows], truth.logits)
            for shard in shards:
                assert_near(shard.hidden, truth.hidden[:, rows], truth.hidden)
        for place, gradient in enumerate(truth.projectors):
            summed = torch.stack([shards[0].projectors[place] for shards in parts]).sum(dim=0)
            assert_near(summed, gradient, gradient)


def assert_near(value: torch.Tensor, truth: torch.Tensor, whole: torch.Tensor) -> None:
    """Errors are at most 1e-6 of the largest of ``whole``."""
    scale = whole.abs().max().item() if whole.numel() else 0.0
    torch.testing.assert_close(value, truth, rtol=0, atol=1e-6 * scale)
