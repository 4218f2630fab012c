"""No objective makes an fp32 tensor of the logits' size, nor one of chunks by vocabulary.

T rows, V columns, C chunks.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.distributed import vocab_parallel
from megatron_ext.losses import DistillationInputs
from megatron_ext.ops.projected_kl import kernel_evaluation
from tests.losses.linear.linear_case import ordered
from tests.losses.microbatch import Microbatch
from tests.losses.objective_cases import CASES, CHOSEN, ObjectiveCase, in_precision
from tests.ops.allocation_record import AllocationRecord
from tests.ops.kernel_case import EVERY_COMBINATION

BATCH, CHUNKS, VOCABS = 4, 8, (600, 500)


BY_KERNEL = ["next_token", "vocab_kl", "partition_kl", "projected_kl", "alm"]
KERNEL_CHUNKS = 4
if EVERY_COMBINATION:
    BY_KERNEL += ["vocab_kl reverse", "gold", "uld over the largest"]
    KERNEL_CHUNKS = CHUNKS


def _inputs(
    case: ObjectiveCase, batch_size: int = BATCH, chunks: int = CHUNKS
) -> DistillationInputs:
    """bf16 logits and targets."""
    sizes: dict[str, Any] = {"vocabs": VOCABS, "lengths": (16, 12)}
    if case.same_tokenizer:
        sizes = {"vocabs": (VOCABS[0],) * 2, "lengths": (16, 16)}
    batch = ordered(Microbatch.random(batch=batch_size, chunks=chunks, **sizes), chunks)
    inputs = in_precision(case.build(batch, (8, 4)), torch.bfloat16)
    if inputs.teacher is not None:
        inputs = replace(inputs, teacher=in_precision(inputs.teacher, torch.bfloat16))
    inputs.student_logits.requires_grad_()
    return inputs


@pytest.mark.parametrize("name", CHOSEN)
def test_no_wide_tensor_is_as_large_as_chunks_by_vocabulary(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, "cpu", 1 << 12)
    case = CASES[name]
    inputs, objective = _inputs(case), case.objective()

    with AllocationRecord() as record:
        objective(inputs).loss_sum.backward()

    record.assert_no_wide_tensor(rows=BATCH * CHUNKS, columns=min(VOCABS))
    # So it does see what is made: the gradient at least, in bf16.
    assert record.peak_bytes >= 2 * inputs.student_logits.numel()


@pytest.mark.parametrize("name", BY_KERNEL)
def test_kernels_make_no_such_tensor_either(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setitem(vocab_parallel.SLICE_ELEMENTS, "cpu", 1 << 10)
    # Its scratch holds whole groups of chunks, here of fewer than there are.
    monkeypatch.setattr(kernel_evaluation, "CHUNKS", 2)
    monkeypatch.setattr(kernel_evaluation, "_SCRATCH_BYTES", 1)
    case = replace(CASES[name], options={**CASES[name].options, "implementation": "triton"})
    inputs, objective = _inputs(case, 1, KERNEL_CHUNKS), case.objective()

    with AllocationRecord() as record:
        objective(inputs).loss_sum.backward()

    record.assert_no_wide_tensor(rows=KERNEL_CHUNKS, columns=min(VOCABS))
    assert record.peak_bytes >= 2 * inputs.student_logits.numel()
