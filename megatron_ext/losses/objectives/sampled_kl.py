"""``sampled_kl``: reverse KL at what the student itself has sampled, chunk by chunk. C chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, KnownAhead, LossOutput
from megatron_ext.losses.lookup import chunk_rows
from megatron_ext.losses.objective import LOSS_REGISTRY, Needs, TargetForm
from megatron_ext.losses.objectives.chunk_likelihood import (
    LikelihoodObjective,
    labelled_ahead,
    likelihood_output,
)
from megatron_ext.ops.chunk_likelihood import ChunkLikelihoods
from megatron_ext.ops.launch import Implementation, check_implementation
from megatron_ext.ops.sampled_signal import SignalLimits, sampled_signals


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
        alignment, sampled = inputs.alignment, inputs.sampled_log_probs
        assert alignment is not None
        signals = sampled_signals(
            chunks.student,
            chunks.teacher,
            chunks.usable,
            None if sampled is None else sampled.flatten(),
            chunk_rows(alignment)[0],
            SignalLimits(self.most_signal, self.most_ratio),
            implementation=self.implementation,
        )
        return likelihood_output(
            inputs,
            signals.loss,
            chunks.usable,
            signals.kept,
            {
                "student_nats": signals.student_nats,
                "teacher_nats": signals.teacher_nats,
                "ratio": signals.ratio,
                "cut": signals.cut,
            },
            implementation=self.implementation,
        )

    def count_ahead(self, known: KnownAhead) -> torch.Tensor:
        """Chunks with all their labels; exact but for chunks of probability 0."""
        return known.chunks(labelled_ahead(known))

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


LOSS_REGISTRY.register("sampled_kl", SampledKLLoss)
