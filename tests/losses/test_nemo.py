"""The original numerics: what they do that the proper ones do not, and its stored values.

Each file holds one microbatch: logits, chunk ids in token coordinates, which pairs are valid and
correct, a projection as top-k rows, a configuration, and what NeMo RL's x_token loss gives. The
original divides by the microbatch's valid chunks; here that is sum over count.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses import (
    LOSS_REGISTRY,
    DistillationInputs,
    LossOutput,
    Objective,
    ProjectedKLLoss,
    ProjectionShard,
    TeacherTargets,
    VocabularyMatch,
)
from megatron_ext.projection.sparse_projection import SparseProjection
from tests.conversation.shared_files import SHARED, needs_shared
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
    kept = inputs.alignment.sample > 0
    inputs = replace(inputs, chunk_mask=kept)
    output = LOSS_REGISTRY[name](numerics="nemo")(inputs)
    (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
    assert int(output.count) == 8
    assert not grad[0].any()
    assert grad[1:].any()


def test_a_direction_that_the_original_lacks_is_refused() -> None:
    with pytest.raises(
        LossError, match="nemo numerics of the objective projected_kl have no such direction"
    ):
        ProjectedKLLoss(numerics="nemo", direction="jensen_shannon")


FILES = sorted((SHARED / "golden" / "x_token_losses").glob("*.npz"))
MIN_SHARE = 0.6


def label_chunks(arrays: dict[str, Any]) -> AlignmentBatch:
    """Chunks that are valid, of a sample that counts, and that a label of both sides is in."""
    batch, pairs = arrays["pair_valid"].shape
    sides = []
    for side in ("student", "teacher"):
        ids = arrays[f"{side}_chunk_id"]
        sides.append(np.concatenate([ids[:, 1:], np.full((batch, 1), -1)], axis=1))
    numbers = np.arange(pairs)
    seen = [(ids[:, :, None] == numbers).any(axis=1) for ids in sides]
    counted = arrays["pair_valid"] & seen[0] & seen[1] & (arrays["sample_mask"][:, None] > 0)
    new_ids = np.where(counted, counted.cumsum().reshape(counted.shape) - 1, -1)
    new_ids = np.concatenate([new_ids, np.full((batch, 1), -1)], axis=1)
    return AlignmentBatch.from_chunk_ids(
        *(torch.from_numpy(np.take_along_axis(new_ids, ids, axis=1)) for ids in sides),
        is_exact=torch.from_numpy(arrays["pair_is_correct"][counted]),
    )


def golden_inputs(arrays: dict[str, Any], config: dict[str, Any]) -> DistillationInputs:
    sizes = (config["student_vocab_size"], config["teacher_vocab_size"])
    rows, places = (arrays["projection_indices"] >= 0).nonzero()
    projection = SparseProjection.from_entries(
        rows,
        arrays["projection_indices"][rows, places],
        arrays["projection_weights"][rows, places],
        sizes,
    )
    student, teacher = (
        VocabShard(start=0, stop=arrays[f"{side}_logits"].shape[-1], vocab_size=size)
        for side, size in zip(("student", "teacher"), sizes, strict=True)
    )
    logits = torch.from_numpy(arrays["student_logits"])
    return DistillationInputs(
        student_logits=logits.requires_grad_(),
        student_shard=student,
        labels=torch.zeros(logits.shape[:2], dtype=torch.int64),
        teacher=TeacherTargets(
            kind="logits", shard=teacher, logits=torch.from_numpy(arrays["teacher_logits"])
        ),
        alignment=label_chunks(arrays),
        projection=ProjectionShard.from_projection(
            projection, student_shard=student, teacher_shard=teacher
        ),
        match=VocabularyMatch.from_partition(
            projection.partition(MIN_SHARE if config["objective"] == "hybrid_kl" else None)
        ),
    )


def golden_objective(config: dict[str, Any]) -> Objective:
    options: dict[str, Any] = {
        "numerics": "nemo",
        "temperature": config["temperature"],
        "direction": "reverse" if config["reverse_kl"] else "forward",
    }
    if config["objective"] == "projected_kl":
        options["vocab_topk"] = config["vocab_topk"]
        options["exact_token_match_only"] = config["exact_token_match_only"]
    else:
        options["uncommon_topk"] = config["uncommon_topk"]
    return LOSS_REGISTRY[config["objective"]](**options)


@needs_shared
def test_every_stored_case_is_there() -> None:
    assert len(FILES) == 15


@needs_shared
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_value_and_gradient_are_the_originals(path: Path) -> None:
    arrays = dict(np.load(path))
    config = json.loads(str(arrays["config"]))
    inputs = golden_inputs(arrays, config)
    output = golden_objective(config)(inputs)
    assert int(output.count) == int(arrays["num_valid_chunks"])
    loss = output.loss_sum / output.count
    assert loss.item() == pytest.approx(float(arrays["loss"]), rel=1e-5)
    (grad,) = torch.autograd.grad(loss, inputs.student_logits)
    truth = torch.from_numpy(arrays["grad_student_logits"])
    assert (grad - truth).abs().max() <= 1e-4 * truth.abs().max()

    metrics = {name: (total / count).item() for name, (total, count) in output.metrics.items()}
    for name in ("kl_common", "l1_uncommon"):
        if name in arrays:
            assert metrics[name] == pytest.approx(float(arrays[name]), rel=1e-5)
    # The original's agreement of P-KL also counts samples that its loss leaves out.
    if "top1_accuracy" in arrays:
        assert metrics["top1_agreement"] == pytest.approx(float(arrays["top1_accuracy"]))
    elif arrays["sample_mask"].all():
        assert metrics["top1_agreement"] == pytest.approx(float(arrays["projection_accuracy"]))
