"""The established way to compute a loss over two vocabularies, written eagerly, to compare with.

Projected KL as public training code computes it, from its description in the X-Token paper (arXiv
2605.21699) and in this project's survey of such code: fp32 copies of both models' logits, dense
log-softmax, the projection as a sparse matrix rebuilt for each call, chunk means by a product with
a one-hot matrix, a fixed number of columns for the microbatch, and autograd for the rest. Its value
is that of ``numerics="nemo"``. T rows, V columns, K kept columns, C chunks.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

from megatron_ext.losses import DistillationInputs

KEPT_COLUMNS: Final = 8192
"""K, of the largest teacher logit anywhere in the microbatch."""

FLOOR: Final = 1e-10
"""Added to probabilities before their logarithm."""


def eager_projected_kl(
    inputs: DistillationInputs, *, temperature: float = 1.0, kept_columns: int = KEPT_COLUMNS
) -> torch.Tensor:
    """Sum over chunks of KL(teacher || projected student) on the kept columns; a scalar."""
    assert inputs.teacher is not None
    assert inputs.teacher.logits is not None
    assert inputs.alignment is not None
    count = inputs.alignment.chunk_count
    teacher_logits = inputs.teacher.logits[..., : inputs.teacher.shard.valid_width]
    student_logits = inputs.student_logits[..., : inputs.student_shard.valid_width]
    with torch.no_grad():
        wide = teacher_logits.float()
        columns = _largest_columns(wide, kept_columns)
        teacher = functional.log_softmax(wide[..., columns] / temperature, dim=-1)
        teacher = _one_hot_means(teacher, inputs.alignment.teacher_chunk_id, count)
    weight = _kept_projection(inputs, columns, student_logits.shape[-1])
    scaled = student_logits.float() / temperature
    probs = functional.log_softmax(scaled, dim=-1).exp()
    projected = torch.sparse.mm(weight, probs.flatten(0, 1).t()).t()
    projected = projected.unflatten(0, probs.shape[:2])
    student = _one_hot_means(projected, inputs.alignment.student_chunk_id, count)
    student = student / (student.sum(dim=-1, keepdim=True) + FLOOR)
    divergence = functional.kl_div(
        (student + FLOOR).log(), teacher, reduction="none", log_target=True
    )
    return temperature**2 * divergence.sum()


def eager_cross_entropy(inputs: DistillationInputs) -> torch.Tensor:
    """Sum of next-token cross-entropies over an fp32 copy of the logits; a scalar."""
    logits = inputs.student_logits[..., : inputs.student_shard.valid_width]
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), inputs.labels.flatten(), reduction="sum"
    )


def eager_vocab_kl(inputs: DistillationInputs, *, temperature: float = 1.0) -> torch.Tensor:
    """Sum over rows of KL(teacher || student) of one vocabulary, from fp32 log-softmaxes."""
    assert inputs.teacher is not None
    assert inputs.teacher.logits is not None
    width = inputs.student_shard.valid_width
    with torch.no_grad():
        teacher = functional.log_softmax(
            inputs.teacher.logits[..., :width].float() / temperature, dim=-1
        )
    student = functional.log_softmax(
        inputs.student_logits[..., :width].float() / temperature, dim=-1
    )
    divergence = functional.kl_div(student, teacher, reduction="none", log_target=True)
    return temperature**2 * divergence.sum()


def _largest_columns(logits: torch.Tensor, kept: int) -> torch.Tensor:
    peaks = logits.flatten(0, 1).amax(dim=0)
    return peaks.topk(min(kept, len(peaks))).indices.sort().values


def _kept_projection(
    inputs: DistillationInputs, columns: torch.Tensor, student_columns: int
) -> torch.Tensor:
    """COO [K, Vs]: the rows of the transposed projection that are kept, in a new matrix."""
    assert inputs.projection is not None
    whole = inputs.projection.weight_transposed
    counts = whole.crow_indices().diff().long()
    row = torch.repeat_interleave(torch.arange(len(counts), device=columns.device), counts)
    place = torch.full((len(counts),), -1, device=columns.device)
    place[columns] = torch.arange(len(columns), device=columns.device)
    kept = place[row] >= 0
    indices = torch.stack([place[row][kept], whole.col_indices()[kept].long()])
    shape = (len(columns), student_columns)
    values = whole.values()[kept]
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False).coalesce()


def _one_hot_means(values: torch.Tensor, chunk_id: torch.Tensor, count: int) -> torch.Tensor:
    """Means [B, C, K] of ``values`` [B, T, K] over the rows of each chunk."""
    chunks = torch.arange(count, device=values.device)
    one_hot = (chunk_id[:, None, :] == chunks[None, :, None]).to(values.dtype)
    sizes = one_hot.sum(dim=-1, keepdim=True).clamp(min=1.0)
    return torch.bmm(one_hot, values) / sizes
