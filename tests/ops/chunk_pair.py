"""Two models over the same chunks: of one row, of several, or of none on a side. C chunks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.chunk_rows import ChunkedLogits
from tests.ops.kernel_case import DEVICE

FEW = ((1, 1), (3, 2), (1, 1))
"""Rows of each chunk on either side; interpreted kernels take their time."""

MANY = ((1, 1), (1, 2), (3, 1), (1, 1), (5, 4), (2, 5), (4, 3))


class ChunkPair(NamedTuple):
    """Logits on ``DEVICE`` in the dtype that is compared; rows of no chunk hold NaN."""

    logits: tuple[torch.Tensor, torch.Tensor]
    """[Ts, Vs + padding] and [Tt, Vt + padding], rows strided; padding holds 1e4."""

    chunk_ids: tuple[torch.Tensor, torch.Tensor]

    vocabs: tuple[int, int]

    chunk_count: int

    @classmethod
    def random(cls, vocabs=(2311, 1207), *, sizes=FEW, dtype=torch.float32, padding=5, scale=3.0):
        """Rows of a chunk need not be neighbours."""
        generator = torch.Generator().manual_seed(0)
        logits, ids = [], []
        for side, vocab in enumerate(vocabs):
            rows = [chunk for chunk, size in enumerate(sizes) for _ in range(size[side])]
            own = torch.tensor([-1, *rows, -1])
            own = own[torch.randperm(len(own), generator=generator)]
            wide = torch.full((len(own), vocab + padding + 3), 1e4)
            wide[:, :vocab] = scale * torch.randn(len(own), vocab, generator=generator)
            wide[own < 0] = torch.nan
            logits.append(wide.to(DEVICE, dtype)[:, : vocab + padding])
            ids.append(own.to(DEVICE))
        return cls((logits[0], logits[1]), (ids[0], ids[1]), vocabs, len(sizes))

    @property
    def weights(self):
        """[C]: what each chunk's loss gets; the last gets nothing."""
        weights = torch.linspace(0.5, 2.0, self.chunk_count, device=DEVICE)
        weights[-1:] = 0.0
        return weights

    def sides(self, student=None):
        """Both models' of one rank, with other logits of the student where they are given."""
        logits = (self.logits[0] if student is None else student, self.logits[1])
        return [
            ChunkedLogits.of(
                own, ids, self.chunk_count, VocabShard(start=0, stop=own.shape[1], vocab_size=vocab)
            )
            for own, ids, vocab in zip(logits, self.chunk_ids, self.vocabs, strict=True)
        ]

    def run(self, op, **options):
        """The op's outputs, and the gradient of the weighted sum of its first."""
        base = torch.zeros_like(self.logits[0], requires_grad=True)
        # Rows stay strided, and may be written in place.
        student = torch.cat([base, base[:, :3]], dim=1)[:, : base.shape[1]]
        student.data.copy_(self.logits[0])
        outputs = op(*self.sides(student), **options)
        (grad,) = torch.autograd.grad((outputs[0] * self.weights).sum(), base)
        return outputs, grad

    def means(self, *, temperature):
        """Both models' mean probabilities of the rows of each chunk, Q and P, in fp64."""
        found = []

        def keep(q, p):
            found.extend((q.detach(), p))
            return q.sum(dim=-1)

        self.truth(keep, temperature=temperature)
        return found

    def truth(self, loss, *, temperature, dtype=torch.float64):
        """``loss(Q, P)`` [C] and the gradient of its weighted sum [Ts, Vs + padding].

        Args:
            dtype: What is computed in; means of rows and their gradient are autograd's.
        """
        student = self.logits[0].to(dtype, copy=True).requires_grad_()
        sides = zip((student, self.logits[1].to(dtype)), self.chunk_ids, self.vocabs, strict=True)
        q, p = (
            torch.stack(
                [
                    _mean(logits[ids == chunk, :vocab], temperature)
                    for chunk in range(self.chunk_count)
                ]
            )
            for logits, ids, vocab in sides
        )
        value = loss(q, p)
        (grad,) = torch.autograd.grad((value * self.weights.to(dtype)).sum(), student)
        return value.detach(), grad


def _mean(logits, temperature):
    """0 for no rows."""
    return torch.softmax(logits / temperature, dim=-1).sum(dim=0) / max(len(logits), 1)
