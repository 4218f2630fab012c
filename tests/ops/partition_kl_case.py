"""Random inputs of the partition KL. T rows, Vs Vt vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron_ext.ops.partition_kl import (
    ChainRows,
    Chains,
    PartitionPlan,
    SingleRows,
    evaluate_partition_kl,
    partition_kl_reference,
    shared_columns,
)
from megatron_ext.ops.partition_kl.operands import ReferenceChunk
from megatron_ext.ops.unit_gradient import kept_gradient
from tests.losses.microbatch import columns
from tests.ops.kernel_case import packed, vocab_shard

Sizes = Sequence[tuple[int, int]]
"""Student and teacher tokens of each chunk."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Unsharded inputs in fp64. The pairs of the singles are the shared tokens."""

    student_logits: torch.Tensor
    teacher_logits: torch.Tensor
    singles: list[ReferenceChunk]
    chains: list[ReferenceChunk]
    shared: list[tuple[int, int]]

    @classmethod
    def random(
        cls,
        *,
        sizes=((1, 1), (1, 2), (1, 1), (2, 1), (1, 3), (2, 3), (1, 1)),
        vocabs=(37, 23),
        shared=14,
        completions=4,
        scale=3.0,
        seed=0,
        side_by_side=False,
    ):
        generator = torch.Generator().manual_seed(seed)

        def some(vocab, count):
            return torch.randperm(vocab, generator=generator)[: min(count, vocab)].tolist()

        pairs = list(zip(some(vocabs[0], shared), some(vocabs[1], shared), strict=False))
        if side_by_side:
            pairs = [(column, column) for column in range(shared)]
        # Rows of no chunk stand between the chunks.
        rows = [[1, 0], [1, 0]]
        chunks = []
        for size in sizes:
            starts = [side[-1] + 1 for side in rows]
            for side, count in zip(rows, size, strict=True):
                side.extend(range(side[-1] + 1, side[-1] + 1 + count))
            own = list(
                zip(some(vocabs[0], completions), some(vocabs[1], completions), strict=False)
            )
            chunks.append(
                ReferenceChunk(
                    student_rows=range(starts[0], starts[0] + size[0]),
                    teacher_rows=range(starts[1], starts[1] + size[1]),
                    student_prefix=[some(vocabs[0], 1)[0] for _ in range(size[0] - 1)],
                    teacher_prefix=[some(vocabs[1], 1)[0] for _ in range(size[1] - 1)],
                    pairs=pairs if size == (1, 1) else own,
                )
            )
        logits = [
            scale * torch.randn(max(side) + 2, vocab, generator=generator, dtype=torch.float64)
            for side, vocab in zip(rows, vocabs, strict=True)
        ]
        return cls(
            student_logits=logits[0],
            teacher_logits=logits[1],
            singles=[c for c, size in zip(chunks, sizes, strict=True) if size == (1, 1)],
            chains=[c for c, size in zip(chunks, sizes, strict=True) if size != (1, 1)],
            shared=pairs,
        )

    def to(self, dtype):
        """The same case with logits in ``dtype``."""
        return replace(
            self,
            student_logits=self.student_logits.to(dtype),
            teacher_logits=self.teacher_logits.to(dtype),
        )

    def weights(self):
        """[chunks] of the singles and then of the chains, so that each counts for itself."""
        return torch.linspace(0.5, 2, len(self.singles) + len(self.chains), dtype=torch.float64)

    def divergences_of(self, logits, **options):
        """Each chunk's divergence by the reference, of these logits of the student."""
        chunks = [*self.singles, *self.chains]
        teacher = self.teacher_logits.to(logits.dtype)
        return partition_kl_reference(logits, teacher, chunks, **options)

    def truth(self, **options):
        """Each chunk's divergence, and the gradient of their weighted sum."""
        logits = self.student_logits.detach().requires_grad_()
        found = self.divergences_of(logits, **options)
        (grad,) = torch.autograd.grad((found * self.weights()).sum(), logits)
        return found.detach(), grad

    def run(
        self,
        *,
        dtype=torch.float64,
        device="cpu",
        logits=None,
        padding=(0, 0),
        strided=False,
        backward=True,
        shards=(0, 1, None),
        in_place=False,
        counted=None,
        **options,
    ):
        """What the op says on one rank's columns, and the gradient of the weighted sum.

        Args:
            logits: The student's columns as they are; None: made of the case.
            strided: Rows lie further apart than they are wide.
            backward: Else the gradient is empty.
            shards: Rank, ranks and their group.
            options: ``DivergenceOptions``, and others of ``evaluate_partition_kl``.
        """
        student = vocab_shard(self.student_logits.shape[1], padding[0], *shards)
        teacher = vocab_shard(self.teacher_logits.shape[1], padding[1], *shards)
        leaf = columns(self.student_logits, student).to(device, dtype).requires_grad_()
        if logits is None:
            # A tensor that can be overwritten, unlike a leaf.
            logits = torch.nn.functional.pad(leaf, (0, 5 if strided else 0))[:, : leaf.shape[1]]
        common = torch.tensor(self.shared, dtype=torch.int64, device=device).reshape(-1, 2)
        first = [[chunk.student_rows[0], chunk.teacher_rows[0]] for chunk in self.singles]
        rows = torch.tensor(first, dtype=torch.int64, device=device).reshape(-1, 2)
        if counted is None:
            counted = torch.ones(len(self.chains), dtype=torch.bool)
        options = packed({"grad_scale": self.weights()} | options)
        plan = PartitionPlan(
            SingleRows(*rows.t().contiguous()),
            shared_columns(common[:, 0], common[:, 1], student, teacher),
            chains_of(self.chains, device),
            counted.to(device),
            student,
            teacher,
            options.pop("options"),
        )
        options = {
            name: value.to(device) if torch.is_tensor(value) else value
            for name, value in options.items()
        }
        found = []

        def evaluate(whole, gradient):
            values = evaluate_partition_kl(
                whole,
                columns(self.teacher_logits, teacher).to(device, dtype),
                plan,
                gradient=gradient,
                **options,
            )
            found.append(values)
            return (values.divergences().sum(),)

        (total,) = kept_gradient(logits, evaluate, in_place=in_place)
        if not backward:
            return found[0], leaf.new_empty(0)
        return found[0], torch.autograd.grad(total, leaf)[0]


def chains_of(chunks, device="cpu"):
    """The chunks as the op takes them."""
    counts = [len(chunk.pairs) for chunk in chunks]
    pointers = torch.tensor([0, *counts]).cumsum(0).tolist()

    def rows(student):
        own = [c.student_rows if student else c.teacher_rows for c in chunks]
        prefixes = [c.student_prefix if student else c.teacher_prefix for c in chunks]
        pairs = [pair[0 if student else 1] for chunk in chunks for pair in chunk.pairs]
        lists = (
            [row for side in own for row in side[:-1]],
            [label for prefix in prefixes for label in prefix],
            [chain for chain, prefix in enumerate(prefixes) for _ in prefix],
            [place for prefix in prefixes for place in range(len(prefix))],
            [side[-1] for side in own],
            pairs,
        )
        return ChainRows(
            *(torch.tensor(values, dtype=torch.int64, device=device) for values in lists)
        )

    return Chains(
        student=rows(True),
        teacher=rows(False),
        completion_chain=torch.repeat_interleave(
            torch.arange(len(chunks), device=device),
            torch.tensor(counts, dtype=torch.int64, device=device),
        ),
        completion_pointers=tuple(pointers),
        longest=max((max(len(c.student_prefix), len(c.teacher_prefix)) for c in chunks), default=0),
    )
