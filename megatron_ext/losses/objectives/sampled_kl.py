"""``sampled_kl``: reverse KL at what the student itself has sampled, chunk by chunk. C chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, KnownAhead, LossOutput
from megatron_ext.losses.diagnostics import chunk_output, over_chunks
from megatron_ext.losses.matched_columns import counted_ids
from megatron_ext.losses.objective import LOSS_REGISTRY, Needs, TargetForm
from megatron_ext.losses.objectives.chunk_likelihood import LikelihoodObjective, labelled_ahead
from megatron_ext.ops.chunk_likelihood import ChunkLikelihoods
from megatron_ext.ops.chunk_rows import chunk_slots, index_sum
from megatron_ext.ops.launch import Implementation, check_implementation


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledKLLoss(LikelihoodObjective):
    """Reverse KL of each chunk, estimated at its sampled tokens: a policy gradient.

    With ``log P_c`` and ``log Q_c`` the sums of the teacher's and the student's log-probabilities
    of a chunk's tokens, the signal of the chunk is ``r_c = log P_c - log Q_c`` and the gradient of
    the sum is ``-sum_c w_c r_c d log Q_c``: every student token of a chunk gets all of the chunk's
    signal, which is the unbiased gradient of the chunk's reverse KL where its tokens were sampled
    from the student. ``w_c``, at most ``most_ratio``, is the probability of the chunk's tokens by
    the student over that by the engine that sampled them; 1 for texts that nobody sampled, where
    the gradient is no longer that of a divergence. ``r_c`` and ``w_c`` are constants.

    The value is an estimate of the divergence that is never below 0, ``exp(r_c) - r_c - 1`` (k3 of
    Schulman 2020, http://joschu.net/blog/kl-approx.html), of a signal clamped to 5, and not what
    the gradient is of. Both are 0 for models that give every chunk the same likelihood.

    Left out: chunks with a position that has no label on either side, and chunks to which a model
    gives the probability 0.

    Metrics, a chunk: ``student_nats``, ``teacher_nats``, ``ratio`` (before it is cut), ``cut``
    (ratios above ``most_ratio``); ``impossible`` of all; and those of ``losses/diagnostics``.

    Teacher targets: ``logits``, ``hidden`` (both with ``inputs.teacher_labels``) and ``label``, of
    which only the label's log-probability is read. Collectives on the tensor-parallel group,
    forward: two all-reduces of at most [3 (Ts + Tt)] numbers. Backward: none.

    Raises:
        LossError: Invalid options; calling it without the teacher, alignment or teacher labels that
            it needs, or with ones that do not fit. NaN logits make ``loss_sum`` NaN.
    """

    name: ClassVar[str] = "sampled_kl"
    summary: ClassVar[str] = "likelihoods of chunks that the student sampled, as a policy gradient"

    most_signal: float = 10.0
    """Largest size of a signal, in nats."""

    most_ratio: float = 2.0
    """Largest ratio of probabilities."""

    implementation: Implementation = "auto"
    """``auto``, ``triton`` or ``torch``, see ``ops/launch``."""

    def __post_init__(self) -> None:
        check_implementation(self.name, self.implementation)
        for option in ("most_signal", "most_ratio"):
            if not getattr(self, option) > 0:
                raise LossError(
                    f"{option} of the objective {self.name} is not positive",
                    got=getattr(self, option),
                )

    def compare(self, inputs: DistillationInputs, chunks: ChunkLikelihoods) -> LossOutput:
        """See ``LikelihoodObjective``."""
        impossible = (chunks.student == -torch.inf) | (chunks.teacher == -torch.inf)
        kept = chunks.usable & ~impossible
        # Values left out become an ordinary number first, so that their gradient is 0, too.
        student, its = (torch.where(kept, x, -1.0) for x in (chunks.student, chunks.teacher))
        own = student.detach()
        signal = (its - own).clamp(-self.most_signal, self.most_signal)
        ratio = self._ratio(inputs, own)
        weight = ratio.clamp(max=self.most_ratio)
        near = signal.clamp(max=_MOST_IN_VALUE)
        value = near.exp() - near - 1
        loss = value - weight * signal * (student - own)
        return chunk_output(
            inputs,
            loss,
            usable=kept,
            means={
                "student_nats": -own,
                "teacher_nats": -its,
                "ratio": ratio,
                "cut": (ratio > self.most_ratio).to(ratio.dtype),
            },
            implementation=self.implementation,
            metrics={"impossible": over_chunks(impossible.to(loss.dtype), chunks.usable)},
        )

    def count_ahead(self, known: KnownAhead) -> torch.Tensor:
        """Chunks with all their labels; exact but for chunks of probability 0."""
        return known.chunks(labelled_ahead(known))

    def _ratio(self, inputs: DistillationInputs, own: torch.Tensor) -> torch.Tensor:
        """[C] probability of each chunk by the student over that by its engine."""
        sampled = inputs.sampled_log_probs
        if sampled is None:
            return torch.ones_like(own)
        ids, count = counted_ids(inputs)[0], len(own)
        values = torch.stack([sampled.flatten().nan_to_num(0.0), sampled.flatten().isnan().float()])
        slots = chunk_slots(ids, count)
        sums, unknown = (index_sum(row.to(own.dtype), slots, count + 1)[:-1] for row in values)
        return torch.where(unknown > 0, 1.0, (own - sums).clamp(max=_MOST_LOG_RATIO).exp())

    @property
    def needs(self) -> Needs:
        """Nothing beside labels and alignment."""
        return Needs()

    @property
    def target_forms(self) -> tuple[TargetForm, ...]:
        """The label's log-probability is enough."""
        return ("label", "hidden")

    @property
    def why_no_linear_form(self) -> str | None:
        """Tiles do not have the engine's log-probabilities."""
        return "tiles do not have the log-probabilities of what was sampled"


_MOST_IN_VALUE = 5.0
_MOST_LOG_RATIO = 20.0

LOSS_REGISTRY.register("sampled_kl", SampledKLLoss)
