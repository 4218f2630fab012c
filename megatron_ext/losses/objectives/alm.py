"""ALM: comparison of the two models' likelihoods of each chunk, or of merged groups of chunks.

T rows, Vp local columns, C chunks, G groups, at most C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, KnownAhead, LossOutput
from megatron_ext.losses.checks import check_choice
from megatron_ext.losses.lookup import places_after
from megatron_ext.losses.objective import LOSS_REGISTRY, Needs, TargetForm
from megatron_ext.losses.objectives.chunk_likelihood import (
    LikelihoodObjective,
    labelled_ahead,
    likelihood_output,
)
from megatron_ext.ops.binary_divergence import (
    BinaryOptions,
    Difference,
    check_binary_divergence,
    compare_events,
)
from megatron_ext.ops.chunk_likelihood import ChunkLikelihoods
from megatron_ext.ops.chunk_rows import index_sum
from megatron_ext.ops.launch import Implementation, check_implementation


class ChunkGroups(NamedTuple):
    """Groups of consecutive chunks; a group's value stands in the place of its last chunk."""

    group: torch.Tensor
    """int64 [C], ascending from 0."""

    is_last: torch.Tensor
    """bool [C]: True for the last chunk of a group."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of ``values`` [C] over the group of each chunk, [C]."""
        return index_sum(values, self.group, len(values))[self.group]


def chunk_groups(
    alignment: AlignmentBatch, *, usable: torch.Tensor, closes: torch.Tensor
) -> ChunkGroups:
    """Groups of adjacent usable chunks, each up to the first that closes it.

    No group crosses the end of a sample, or tokens outside every chunk on either side, or a chunk
    that is not usable, which is a group of its own.

    Args:
        usable: bool [C].
        closes: bool [C]: chunks that end a group.
    """
    # A gap between a chunk's end and the next one's start, on either side.
    apart = torch.zeros_like(closes[1:])
    for spans in (alignment.student_spans, alignment.teacher_spans):
        apart = apart | (spans[:-1, 1] != spans[1:, 0])
    apart = apart | (alignment.sample[1:] != alignment.sample[:-1])
    begins = apart | closes[:-1] | ~usable[:-1] | ~usable[1:]
    is_last = torch.ones_like(closes)
    is_last[: len(begins)] = begins
    group = torch.zeros_like(closes, dtype=torch.int64)
    group[1:] = begins.cumsum(dim=0)
    return ChunkGroups(group, is_last)


Merge = Literal["none", "words", "likely_boundaries"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlmLoss(LikelihoodObjective):
    """``sum_c D(P_c, Q_c)`` over chunks: how likely the chunk's bytes are to either model.

    ``log P_c`` is the sum of the teacher's log-probabilities of the chunk's tokens, ``log Q_c``
    the student's, in nats; D compares "the chunk comes" with "it does not" at the temperature
    tau (``ops/binary_divergence``). With ``debias`` each has the log-probability added that a
    boundary token follows, ``inputs.boundary``. The output counts groups of chunks: with ``merge``
    "none" the chunks themselves.

    Zero, with a zero gradient, for models that give every chunk the same likelihood; but for the
    difference ``binary_ce``, which keeps the teacher's entropy. The gradient of a logit is at most
    ``max(1, 1 / tau)`` a chunk for ``binary_kl`` and ``binary_ce``.

    Left out: chunks with a position that has no label on either side, and groups that a model
    gives the probability 0 (a masked token), which have no finite likelihood. At the end of a
    sample and where the next position has no label, the token after a chunk is unknown; no boundary
    is added to either side there.

    Metrics, a group: ``student_nats`` and ``teacher_nats`` (of the compared events), ``chunks``,
    ``impossible`` (groups of probability 0, of all); and those of ``losses/diagnostics``, where a
    group has the class of its last chunk.

    Teacher targets: ``logits``, ``hidden`` (both with ``inputs.teacher_labels``) and ``label`` (two
    numbers a token; the boundary's with ``debias`` or ``likely_boundaries``). Collectives on the
    tensor-parallel group, forward: two all-reduces of at most [3 (Ts + Tt)] numbers; one of [Ts]
    more for ``merge`` "words". Backward: none.

    Source: Minixhofer et al. 2025, arXiv 2503.20083, and tokenkit.

    Raises:
        LossError: Invalid options; calling it without the teacher, alignment, teacher labels or
            boundaries that it needs, or with ones that do not fit. NaN logits make ``loss_sum``
            NaN.
    """

    name: ClassVar[str] = "alm"
    summary: ClassVar[str] = "likelihoods of chunks; needs two numbers a token from the teacher"

    difference: Difference = "binary_kl"
    """D. tokenkit's default is ``binary_ce``, which has the same gradient."""

    temperature: float = 5.0
    """tau, the best of the paper's ablation; not multiplied back."""

    coin: float = 0.01
    """Nats taken off both likelihoods, so that none is certain; see ``ops/binary_divergence``.
    ``1e-6 * temperature`` is tokenkit's."""

    renyi_alpha: float = 0.5
    """Order of the difference ``renyi``."""

    debias: bool = True
    """Multiply each likelihood with that of a boundary after the chunk."""

    merge: Merge = "none"
    """``none``: minimal chunks. ``words``: merged until a boundary token follows in the text.
    ``likely_boundaries``: until the teacher gives a boundary more than ``boundary_threshold``."""

    boundary_threshold: float = 0.1
    """gamma, a probability."""

    implementation: Implementation = "auto"
    """``auto``, ``triton`` or ``torch``, see ``ops/launch``."""

    def __post_init__(self) -> None:
        check_binary_divergence(
            self.name,
            difference=self.difference,
            temperature=self.temperature,
            coin=self.coin,
            renyi_alpha=self.renyi_alpha,
        )
        check_implementation(self.name, self.implementation)
        check_choice(self.name, "merge", self.merge, get_args(Merge))
        if not 0 < self.boundary_threshold < 1:
            raise LossError(
                f"boundary_threshold of the objective {self.name} is not a probability",
                got=self.boundary_threshold,
                expected="above 0 and below 1",
            )

    def compare(self, inputs: DistillationInputs, chunks: ChunkLikelihoods) -> LossOutput:
        """See ``LikelihoodObjective``."""
        groups = self._groups(inputs, chunks)
        student, teacher_nats = (
            self._log_likelihood(likelihood, boundary, chunks.usable, groups)
            for likelihood, boundary in (
                (chunks.student, chunks.student_boundary),
                (chunks.teacher, chunks.teacher_boundary),
            )
        )
        compared = chunks.usable if groups is None else chunks.usable & groups.is_last
        events = compare_events(
            teacher_nats,
            student,
            compared,
            BinaryOptions(self.difference, self.temperature, self.coin, self.renyi_alpha),
            implementation=self.implementation,
        )
        means = {"student_nats": events.student_nats, "teacher_nats": events.teacher_nats}
        means["chunks"] = torch.ones_like(events.loss)
        if groups is not None:
            means["chunks"] = groups.sum(chunks.usable.to(events.loss.dtype))
        return likelihood_output(
            inputs,
            events.loss,
            compared,
            events.kept,
            means,
            implementation=self.implementation,
        )

    @property
    def reads_boundaries(self) -> bool:
        """To debias, and to merge where they are likely."""
        return self.debias or self.merge == "likely_boundaries"

    def count_ahead(self, known: KnownAhead) -> torch.Tensor:
        """Chunks with all their labels.

        Exact with ``merge`` "none", and with "words" where ``known`` has the teacher's labels and
        ``word_starts``, but for chunks of probability 0, which the data does not tell. Otherwise an
        upper bound: the number of merged groups depends on the teacher's predictions.
        """
        alignment = known.aligned
        usable = labelled_ahead(known)
        if self.merge != "words" or known.word_starts is None or known.teacher_labels is None:
            return known.chunks(usable)
        if known.chunk_mask is not None:
            usable = usable & known.chunk_mask
        places = places_after(alignment, known.labels, known.teacher_labels)
        labels = known.labels.flatten()
        starts = known.word_starts[labels.clamp(min=0)] & (labels >= 0)
        closes = starts[places[0].row] | ~(usable & places[0].exists & places[1].exists)
        return (usable & chunk_groups(alignment, usable=usable, closes=closes).is_last).sum()

    def _groups(self, inputs: DistillationInputs, chunks: ChunkLikelihoods) -> ChunkGroups | None:
        """Groups by ``merge``, None for chunks alone. ``words``: one all-reduce."""
        if self.merge == "none":
            return None
        alignment = inputs.alignment
        assert alignment is not None
        if self.merge == "words":
            closes = _before_boundary(inputs, alignment, self.name)
        else:
            closes = chunks.teacher_boundary > math.log(self.boundary_threshold)
        # A chunk whose next token is unknown cannot be merged with the next chunk.
        return chunk_groups(alignment, usable=chunks.usable, closes=closes | ~chunks.follows)

    def _log_likelihood(
        self,
        chunk: torch.Tensor,
        boundary: torch.Tensor,
        usable: torch.Tensor,
        groups: ChunkGroups | None,
    ) -> torch.Tensor:
        """Log-likelihood [C] of each chunk's group, debiased at the group's end; arbitrary where
        the chunk is not usable."""
        if groups is None:
            return chunk + boundary if self.debias else chunk
        if self.debias:
            chunk = chunk + torch.where(groups.is_last, boundary, 0.0)
        return groups.sum(torch.where(usable, chunk, 0.0))

    @property
    def needs(self) -> Needs:
        """Boundaries, with ``debias`` or merged chunks."""
        merges = self.merge != "none"
        return Needs(boundary=self.debias or merges, word_starts=self.merge == "words")

    @property
    def target_forms(self) -> tuple[TargetForm, ...]:
        """Two numbers a token are enough."""
        return ("label", "hidden")

    @property
    def why_no_context_parallel(self) -> str | None:
        """Merged chunks can lie on two ranks."""
        return None if self.merge == "none" else "merge, of chunks that can lie on two ranks"

    @property
    def why_no_linear_form(self) -> str | None:
        """Merged chunks can lie in two tiles."""
        return None if self.merge == "none" else "merge, of chunks that can lie in two tiles"

    @property
    def reads_behind(self) -> bool:
        """True with ``debias``."""
        return self.debias


def _before_boundary(
    inputs: DistillationInputs, alignment: AlignmentBatch, objective: str
) -> torch.Tensor:
    """Chunks before a boundary token of the student, bool [C]. One all-reduce of [Ts].

    The teacher's next token begins with the same byte.
    """
    if inputs.boundary is None:
        raise LossError(
            f"the objective {objective} merges up to words and needs to know where they begin",
            got="no boundary columns",
            fix="make BoundaryColumns of the tokenizers' bytes, or set merge to none",
        )
    labels, shard = inputs.labels.flatten(), inputs.student_shard
    column = labels - shard.start
    here = (column >= 0) & (column < shard.valid_width)
    is_local_boundary = here & inputs.boundary.student[torch.where(here, column, 0)]
    is_boundary = all_reduce_sum(is_local_boundary.to(torch.int32), shard.group) > 0
    # Past the last row of a sequence the value is arbitrary; the caller masks it.
    row = alignment.student_spans[:, 1].clamp(max=len(labels) - 1)
    return is_boundary[row]


LOSS_REGISTRY.register("alm", AlmLoss)
