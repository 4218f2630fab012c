"""Random inputs of the projected KL. T rows, Vs Vt vocabularies, C chunks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.projected_kl import (
    ColumnPlan,
    ProjectedKLOptions,
    ShardedProjection,
    WeightedLabels,
    evaluate_projected_kl,
    projected_kl,
    projected_kl_reference,
)
from megatron_ext.ops.unit_gradient import kept_gradient
from tests.ops.kernel_case import DEVICE, columns_of, packed, vocab_shard


@lru_cache(maxsize=16)
def _random_projection(student_vocab, teacher_vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    reachable = max(1, teacher_vocab - teacher_vocab // 10)
    dense = torch.zeros(student_vocab, teacher_vocab, dtype=torch.float64)
    for row in range(student_vocab):
        if row % 7 == 3:
            continue
        columns = torch.randperm(reachable, generator=generator)[: 1 + row % 3]
        dense[row, columns] = torch.rand(len(columns), generator=generator).double() + 0.1
    return dense / dense.sum(dim=-1, keepdim=True).clamp(min=1e-9)


def random_projection(student_vocab, teacher_vocab, seed=0):
    """fp64 dense [Vs, Vt]: rows of one to three entries that sum to 1, some rows empty, the last
    tenth of the columns unreachable."""
    return _random_projection(student_vocab, teacher_vocab, seed).clone()


def paired_projection(student_vocab, teacher_vocab, seed=0):
    """fp64 dense [Vs, Vt]: mostly tokens that stand for one another, as between two real
    vocabularies. Every fifth student token is in no pair: it has two to four columns, one of which
    is often the first, or none. The last tenth of the teacher's are unreachable."""
    generator = torch.Generator().manual_seed(seed)
    reachable = max(1, teacher_vocab - teacher_vocab // 10)
    dense = torch.zeros(student_vocab, teacher_vocab, dtype=torch.float64)
    pairs = torch.randperm(reachable - 1, generator=generator) + 1 if reachable > 1 else []
    for row in range(student_vocab):
        if row % 5 != 2 and row < len(pairs):
            dense[row, pairs[row]] = 1.0
        elif row % 3:
            columns = torch.randint(reachable, (2 + row % 3,), generator=generator)
            columns[0] = 0 if row % 2 else columns[0]
            dense[row, columns] = torch.rand(len(columns), generator=generator).double() + 0.1
    return dense / dense.sum(dim=-1, keepdim=True).clamp(min=1e-9)


def aligned_projection(student_vocab, teacher_vocab):
    """fp64 dense [Vs, Vt] in the co-sharded order: tokens that stand for one another first, on both
    sides, then those of two to four columns behind these pairs, then those of none."""
    pairs, mapped = student_vocab * 2 // 5 + 2, student_vocab * 4 // 5
    reachable = teacher_vocab - teacher_vocab // 10
    generator = torch.Generator().manual_seed(1)
    dense = torch.zeros(student_vocab, teacher_vocab, dtype=torch.float64)
    dense[:pairs, :pairs] = torch.eye(pairs, dtype=torch.float64)
    for row in range(pairs, mapped):
        columns = torch.randint(pairs, reachable, (2 + row % 3,), generator=generator)
        dense[row, columns] = torch.rand(len(columns), generator=generator).double() + 0.1
    return dense / dense.sum(dim=-1, keepdim=True).clamp(min=1e-9)


def column_plan(projection, student, teacher):
    """The plan of a rank for a dense projection [Vs, Vt], on its device."""
    device, projection = projection.device, projection.cpu()
    row, column = projection.nonzero(as_tuple=True)
    counts = np.bincount(row.numpy(), minlength=len(projection))
    return ColumnPlan.of(
        np.concatenate([[0], counts.cumsum()]),
        column.numpy().astype(np.int32),
        projection[row, column].float().numpy(),
        student_shard=student,
        teacher_shard=teacher,
        device=device,
    )


def random_chunks(lengths, chunk_count, seed=0):
    """int64 [Ts], [Tt]: every chunk at least once on both sides, in any order, and rows in none."""
    generator = torch.Generator().manual_seed(seed)
    sides = []
    for rows in lengths:
        others = torch.randint(-1, chunk_count, (rows - chunk_count,), generator=generator)
        ids = torch.cat([torch.arange(chunk_count), others])
        sides.append(ids[torch.randperm(rows, generator=generator)])
    return sides


def sharded(rows, plan, reachable=None, dtype=torch.float32):
    """A rank's rows [Vps, Vt] in the forms that the op takes."""
    return ShardedProjection(
        rows.to(dtype).to_sparse_csr(),
        rows.t().contiguous().to(dtype).to_sparse_csr(),
        rows.sum(dim=-1).to(dtype),
        (rows > 0).any(dim=0) if reachable is None else reachable,
        plan,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """Unsharded inputs in fp64."""

    student_logits: torch.Tensor
    teacher_logits: torch.Tensor
    student_chunk_id: torch.Tensor
    teacher_chunk_id: torch.Tensor
    chunk_count: int
    projection: torch.Tensor

    @classmethod
    def random(cls, *, vocabs=(37, 23), lengths=(11, 9), chunk_count=4, scale=3.0, seed=0):
        generator = torch.Generator().manual_seed(seed)
        logits = [
            scale * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
            for rows, vocab in zip(lengths, vocabs, strict=True)
        ]
        chunks = random_chunks(lengths, chunk_count, seed)
        return cls(
            student_logits=logits[0],
            teacher_logits=logits[1],
            student_chunk_id=chunks[0],
            teacher_chunk_id=chunks[1],
            chunk_count=chunk_count,
            projection=random_projection(*vocabs, seed=seed),
        )

    def dominated(self, nats):
        """Students that are ``nats`` surer, and more from row to row, of a token with an empty row;
        in chunk 0 one row alone."""
        logits = self.student_logits.clone()
        token = int((self.projection.sum(dim=1) == 0).nonzero()[0])
        rows = torch.arange(len(logits), device=logits.device)
        first = int((self.student_chunk_id == 0).nonzero()[0])
        raised = (self.student_chunk_id != 0) | (rows == first)
        logits[:, token] += torch.where(raised, nats + rows % 3, 0.0)
        return replace(self, student_logits=logits)

    def emptied(self):
        """A student without anything that is mapped in one row of the last chunk of several."""
        logits = self.student_logits.clone()
        sizes = torch.bincount(self.student_chunk_id[self.student_chunk_id >= 0])
        for chunk in (sizes > 1).nonzero()[-1:]:
            row = int((self.student_chunk_id == chunk).nonzero()[0])
            logits[row, self.projection.sum(dim=1) > 0] = -torch.inf
        return replace(self, student_logits=logits)

    @classmethod
    def paired(cls, *, vocabs=(47, 41), **options):
        """A random case of tokens that mostly stand for one another, on the device."""
        case = cls.random(vocabs=vocabs, **options)
        return replace(case, projection=paired_projection(*vocabs)).on(DEVICE)

    def rounded(self, dtype):
        """The same case with logits in fp64 as they are in ``dtype``."""
        return replace(
            self,
            student_logits=self.student_logits.to(dtype).double(),
            teacher_logits=self.teacher_logits.to(dtype).double(),
        )

    def to(self, dtype):
        """The same case with logits and projection in ``dtype``."""
        return replace(
            self,
            student_logits=self.student_logits.to(dtype),
            teacher_logits=self.teacher_logits.to(dtype),
            projection=self.projection.to(dtype),
        )

    def on(self, device):
        """The same case with its tensors on ``device``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self,
            **{
                name: value.to(device)
                for name, value in values.items()
                if isinstance(value, torch.Tensor)
            },
        )

    def losses_of(self, logits, dtype, **options):
        """Each chunk's loss [C] by the reference, of these logits of the student."""
        return projected_kl_reference(
            logits,
            self.teacher_logits.to(dtype),
            student_chunk_id=self.student_chunk_id,
            teacher_chunk_id=self.teacher_chunk_id,
            chunk_count=self.chunk_count,
            projection=self.projection.to(dtype),
            **options,
        )

    def truth(self, **options):
        """Value and student gradient of the reference, in the dtype of the case."""
        logits = self.student_logits.detach().requires_grad_()
        value = self.losses_of(logits, logits.dtype, **options).sum()
        (grad,) = torch.autograd.grad(value, logits)
        return value.detach(), grad

    def run(
        self,
        *,
        dtype=torch.float64,
        padding=(0, 0),
        rank=0,
        ranks=1,
        group=None,
        pad_value=50.0,
        weights=None,
        planned=False,
        **options,
    ):
        """``projected_kl`` on rank ``rank``'s columns, and its gradient [Ts, Vps].

        Padded columns hold ``pad_value``, far above the real logits. Chunks count by ``weights``
        [C] in the gradient. ``planned`` gives it the plan that its kernels need.
        """
        student = vocab_shard(self.student_logits.shape[1], padding[0], rank, ranks, group)
        teacher = vocab_shard(self.teacher_logits.shape[1], padding[1], rank, ranks, group)
        logits = columns_of(self.student_logits, student, pad_value).to(dtype).requires_grad_()
        rows = columns_of(self.projection.t(), student, 0.0).t()
        reachable = (self.projection > 0).any(dim=0).double()[None]
        teacher_logits = columns_of(self.teacher_logits, teacher, pad_value).to(dtype)
        out = projected_kl(
            ChunkedLogits.of(logits, self.student_chunk_id, self.chunk_count, student),
            ChunkedLogits.of(teacher_logits, self.teacher_chunk_id, self.chunk_count, teacher),
            sharded(
                rows,
                column_plan(self.projection, student, teacher) if planned else None,
                columns_of(reachable, teacher, 0.0)[0] > 0,
                torch.float64 if dtype == torch.float64 else torch.float32,
            ),
            **packed(options, ProjectedKLOptions),
        )
        weights = torch.ones_like(out.chunk_loss) if weights is None else weights
        (grad,) = torch.autograd.grad(out.chunk_loss, logits, weights)
        return out, grad


class WithLabels(NamedTuple):
    """What cross-entropy beside the projected KL is of, and what each term gets."""

    labels: torch.Tensor
    """int64 [Ts]; -100: none."""

    weights: torch.Tensor
    """[Ts], of the labels."""

    grad_scale: torch.Tensor
    """[C], of the chunks."""

    def truth(self, case, dtype, **options):
        """The weighted sum of chunks and labels, and its gradient, by the definitions."""
        logits = case.student_logits.detach().clone().to(dtype).requires_grad_()
        chunks = case.losses_of(logits, dtype, **options)
        tokens = torch.nn.functional.cross_entropy(logits, self.labels, reduction="none")
        total = (self.grad_scale.to(dtype) * chunks).sum() + (self.weights.to(dtype) * tokens).sum()
        return total.detach(), torch.autograd.grad(total, logits)[0]

    def fused(self, case, logits, chosen, *, in_place=False, **options):
        """The same sum of one sweep over ``logits`` [Ts, Vs + padding], and the sweep's values."""
        student_vocab, teacher_vocab = case.projection.shape
        padding = logits.shape[1] - student_vocab
        student = vocab_shard(student_vocab, padding, 0, 1, None)
        teacher = vocab_shard(teacher_vocab, 0, 0, 1, None)
        rows = torch.nn.functional.pad(case.projection.float(), (0, 0, 0, padding))
        its = case.teacher_logits.to(logits.dtype)
        found = []

        def evaluate(whole, gradient):
            values = evaluate_projected_kl(
                ChunkedLogits.of(whole, case.student_chunk_id, case.chunk_count, student),
                ChunkedLogits.of(its, case.teacher_chunk_id, case.chunk_count, teacher),
                sharded(rows, column_plan(case.projection, student, teacher)),
                chosen,
                cross_entropy=WeightedLabels(self.labels, self.weights),
                grad_scale=self.grad_scale,
                gradient=gradient,
                **options,
            )
            found.append(values)
            chunks = torch.where(self.grad_scale == 0, 0.0, values.chunk_loss * self.grad_scale)
            tokens = torch.where(self.weights == 0, 0.0, values.token_loss * self.weights)
            return (chunks.sum() + tokens.sum(),)

        (total,) = kept_gradient(logits, evaluate, in_place=in_place)
        return total, found[0]
