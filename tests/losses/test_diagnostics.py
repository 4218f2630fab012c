from dataclasses import replace

import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.losses import DistillationInputs
from megatron_ext.losses.diagnostics import chunk_output
from tests.losses.microbatch import Microbatch

CHUNK_LOSS = torch.tensor([1.0, 2.0, 4.0, 8.0, torch.nan])


def _inputs(mask: torch.Tensor | None) -> DistillationInputs:
    """Chunks 1:1, 1:2, 2:1, 2:2 and 1:1."""
    alignment = AlignmentBatch.from_chunk_ids(
        torch.tensor([[0, 1, 2, 2, 3, 3, 4, -1]]), torch.tensor([[0, 1, 1, 2, 3, 3, 4]])
    )
    batch = Microbatch.random(batch=1, lengths=(8, 7))
    return replace(batch.inputs(), alignment=alignment, chunk_mask=mask)


def test_chunks_outside_the_mask_or_unusable_leave_sum_count_and_metrics() -> None:
    inputs = _inputs(torch.tensor([True, True, True, True, False]))
    chunk_loss = CHUNK_LOSS.clone().requires_grad_()
    output = chunk_output(
        inputs,
        chunk_loss,
        usable=torch.tensor([True, True, False, True, True]),
        means={"agreement": torch.tensor([True, False, True, True, True])},
        metrics={"rest": (torch.tensor(3.0), torch.tensor(7))},
    )
    (grad,) = torch.autograd.grad(output.loss_sum, chunk_loss)
    assert grad.tolist() == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert output.chunk_loss.tolist() == [1.0, 2.0, 0.0, 8.0, 0.0]
    assert (output.loss_sum.item(), int(output.count)) == (11.0, 3)
    pairs = {name: (total.item(), int(count)) for name, (total, count) in output.metrics.items()}
    assert pairs == {
        "agreement": (2.0, 3),
        "rest": (3.0, 7),
        "used/one_to_one": (1.0, 2),
        "used/one_to_many": (1.0, 1),
        "used/many_to_one": (0.0, 1),
        "used/many_to_many": (1.0, 1),
        "loss/one_to_one": (1.0, 1),
        "loss/one_to_many": (2.0, 1),
        "loss/many_to_one": (0.0, 0),
        "loss/many_to_many": (8.0, 1),
    }


def test_losses_are_summed_by_text_class_and_script_where_these_are_known() -> None:
    inputs = replace(
        _inputs(torch.tensor([True, True, True, True, False])),
        chunk_text_class=torch.tensor([0, 7, 0, 4, 4], dtype=torch.int8),
        chunk_script=torch.tensor([0, 20, 0, 20, 20], dtype=torch.int8),
    )
    metrics = chunk_output(inputs, CHUNK_LOSS).metrics
    found = {name: (total.item(), int(count)) for name, (total, count) in metrics.items() if count}
    assert {name: found[name] for name in ("loss/digits-1", "loss/code", "loss/letters")} == {
        "loss/digits-1": (5.0, 2),
        "loss/code": (2.0, 1),
        "loss/letters": (8.0, 1),
    }
    assert (found["loss/Common"], found["loss/Latin"]) == ((5.0, 2), (10.0, 2))
    assert metrics["loss/whitespace"][1] == 0
