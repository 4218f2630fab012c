"""What the original numerics do that the proper ones do not; values are in the golden files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_ext.errors import LossError
from megatron_ext.losses import LOSS_REGISTRY, LossOutput, ProjectedKLLoss
from tests.losses.microbatch import Microbatch


def run(batch: Microbatch, vocab_topk: int | None) -> LossOutput:
    return ProjectedKLLoss(numerics="nemo", vocab_topk=vocab_topk)(batch.inputs(padding=(3, 1)))


def test_columns_are_chosen_for_a_microbatch_so_that_the_value_depends_on_it() -> None:
    batch = Microbatch.random(batch=4)
    halves = [batch.samples(slice(0, 2)), batch.samples(slice(2, 4))]
    for vocab_topk, differs in ((5, True), (None, False)):
        whole = run(batch, vocab_topk).loss_sum.item()
        parts = sum(run(half, vocab_topk).loss_sum.item() for half in halves)
        assert (abs(parts - whole) > 1e-3) == differs


def test_all_columns_is_what_a_count_beyond_the_vocabulary_gives() -> None:
    batch = Microbatch.random()
    assert torch.equal(run(batch, None).loss_sum, run(batch, 8192).loss_sum)


def test_padded_columns_are_never_chosen() -> None:
    batch = Microbatch.random()
    plain = ProjectedKLLoss(numerics="nemo", vocab_topk=5)(batch.inputs())
    assert run(batch, 5).loss_sum.item() == pytest.approx(plain.loss_sum.item(), rel=1e-6)


@pytest.mark.parametrize("numerics", ["proper", "nemo"])
def test_chunks_of_unequal_bytes_are_left_out_where_asked(numerics: str) -> None:
    inputs = Microbatch.random().inputs()
    assert inputs.alignment is not None
    is_exact = torch.arange(12) % 3 > 0
    inputs = replace(inputs, alignment=replace(inputs.alignment, is_exact=is_exact))
    everything = LOSS_REGISTRY["projected_kl"](numerics=numerics)(inputs)
    exact = LOSS_REGISTRY["projected_kl"](numerics=numerics, exact_token_match_only=True)(inputs)
    masked = LOSS_REGISTRY["projected_kl"](numerics=numerics)(replace(inputs, chunk_mask=is_exact))
    assert (int(everything.count), int(exact.count)) == (12, 8)
    assert torch.equal(exact.loss_sum, masked.loss_sum)


@pytest.mark.parametrize("name", ["projected_kl", "gold", "hybrid_kl"])
def test_no_chunk_gives_zero_with_a_graph(name: str) -> None:
    inputs = Microbatch.random(chunks=0).inputs(padding=(3, 1))
    output = LOSS_REGISTRY[name](numerics="nemo")(inputs)
    assert (output.loss_sum.item(), int(output.count)) == (0.0, 0)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
    assert not grad.any()


@pytest.mark.parametrize("name", ["projected_kl", "gold"])
def test_a_masked_chunk_has_no_gradient(name: str) -> None:
    batch = Microbatch.random()
    inputs = batch.inputs()
    assert inputs.alignment is not None
    kept = inputs.alignment.sample > 0
    inputs = replace(inputs, chunk_mask=kept)
    output = LOSS_REGISTRY[name](numerics="nemo")(inputs)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
    assert int(output.count) == 8
    assert not grad[0].any()
    assert grad[1:].any()


def test_a_direction_that_the_original_lacks_is_refused() -> None:
    with pytest.raises(LossError, match="nemo numerics of projected_kl have no such direction"):
        ProjectedKLLoss(numerics="nemo", direction="jensen_shannon")
