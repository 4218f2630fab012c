"""Inputs and output of every objective, and the counts known before the student runs.

B batch, Ts Tt tokens, Vp local columns, C chunks, D hidden.

A schedule runs the backward pass of one microbatch before the forward pass of the next, so the
global count must be known before the first forward. ``KnownAhead`` holds the data that gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal

import torch

from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError, arguments_elsewhere
from megatron_ext.losses.lookup import Completions
from megatron_ext.losses.projection_shard import ProjectionShard
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.losses.vocabulary_match import BoundaryColumns, VocabularyMatch
from megatron_ext.ops.prefix_masses import PrefixColumns

SumCount = tuple[torch.Tensor, torch.Tensor]
"""Local sum (fp32 scalar) and the number of terms in it (int64 scalar)."""

_TRAINED = "is labels=, IGNORE_INDEX where a token is not trained"
_TARGETS = "is teacher=, TeacherTargets"


@arguments_elsewhere(
    {
        **dict.fromkeys(("input_ids", "input_lengths"), "is student_logits= of these ids"),
        **dict.fromkeys(("token_mask", "sample_mask"), _TRAINED),
        **dict.fromkeys(("teacher_topk_logits", "teacher_topk_indices"), _TARGETS),
        **dict.fromkeys(("aligned_pairs", "pair_valid"), "is alignment=, an AlignmentBatch"),
    },
    project="NeMo RL",
)
@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationInputs:
    """One microbatch on one rank of the last pipeline stage."""

    student_logits: torch.Tensor
    """[B, Ts, Vp] this rank's columns, any float dtype."""

    student_shard: VocabShard

    labels: torch.Tensor
    """[B, Ts] int64: the token that each position predicts, ``IGNORE_INDEX`` where untrained."""

    teacher: TeacherTargets | None = None

    alignment: AlignmentBatch | None = None

    projection: ProjectionShard | None = None
    """The [Vs, Vt] projection, cut to this rank's student rows and teacher columns."""

    match: VocabularyMatch | None = None
    """The tokens that both vocabularies have."""

    teacher_labels: torch.Tensor | None = None
    """[B, Tt] int64: the token that each teacher position predicts, ``IGNORE_INDEX`` where none."""

    student_hidden: torch.Tensor | None = None
    """[B, Ts, D] last hidden states, with a graph; for objectives that compare them."""

    student_states: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """[B, Ts, D] with a graph: outputs of layers below the last, by number from 1; for objectives
    that compare them."""

    student_head_weight: torch.Tensor | None = None
    """[Vp, D] rows of the student's output layer for this rank's columns."""

    boundary: BoundaryColumns | None = None
    """The tokens of both vocabularies that begin a word; for ``alm``."""

    completions: Completions | None = None
    """Rows of each chunk and the continuations that both models can predict: ``ChunkCompletions``
    for ``partition_kl``, ``PrefixRows`` for ``byte_prefix``, ``RepeatRows`` for ``projected_kl``
    with a ``repeat_weight``."""

    prefix_columns: PrefixColumns | None = None
    """Student and teacher columns of prefixes; for ``byte_prefix``."""

    chunk_mask: torch.Tensor | None = None
    """[C] bool: chunks that count; False where another teacher is chosen for the sample. None:
    all."""

    chunk_text_class: torch.Tensor | None = None
    """[C] int8: number in ``alignment.audit.text_class.TEXT_CLASSES``; for diagnostics."""

    chunk_script: torch.Tensor | None = None
    """[C] int8: number in ``alignment.audit.character_table.SCRIPTS``; for diagnostics."""

    sampled_log_probs: torch.Tensor | None = None
    """[B, Ts] fp32: log-probability with which an engine sampled each label, NaN where it was not
    sampled; None where no label was."""

    grad_scale: float | torch.Tensor = 1.0
    """Upstream gradient that ``LossOutput.loss_sum`` will get: its weight over its global count,
    not 0; as a tensor a scalar without a graph. The forward writes the gradient for it; another
    upstream gradient costs one more pass over that."""

    in_place: bool = False
    """Whether the gradient may be written over ``student_logits``, which nothing reads after the
    objective. An objective that cannot do so ignores it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """Sum over a microbatch, normalised once by the caller, who knows the global count."""

    loss_sum: torch.Tensor
    """fp32 scalar with a graph; the same on every tensor-parallel rank."""

    count: torch.Tensor
    """int64 scalar: number of chunks or tokens in the sum."""

    metrics: dict[str, SumCount] = field(default_factory=dict)

    chunk_loss: torch.Tensor | None = None
    """[C] without a graph: each chunk's share of ``loss_sum``, 0 for chunks left out; None from an
    objective that does not sum over chunks."""

    bad: Callable[[], torch.Tensor] | None = None
    """Function that makes int32 [2] as ``FiniteCheck.bad`` has it of one teacher, from sums that
    the objective knows; None unless ``Objective.tells_bad``."""


Over = Literal["chunks", "tokens"]
"""Terms of an objective's sum: chunks of an alignment, or the student's labels (``vocab_kl``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAhead:
    """Fields of ``DistillationInputs`` that the data gives before the student has run."""

    labels: torch.Tensor
    """[B, Ts] int64"""

    alignment: AlignmentBatch | None = None

    chunk_mask: torch.Tensor | None = None
    """[C] bool; None: all."""

    teacher_labels: torch.Tensor | None = None
    """[B, Tt] int64, for objectives that read them; None: every chunk has all of them."""

    word_starts: torch.Tensor | None = None
    """[V] bool: student tokens that begin a word; see ``BoundaryColumns``."""

    @property
    def aligned(self) -> AlignmentBatch:
        """The alignment.

        Raises:
            LossError: There is none.
        """
        if self.alignment is None:
            raise LossError("chunks are counted by an alignment", got="none")
        return self.alignment

    def chunks(self, usable: torch.Tensor | None = None) -> torch.Tensor:
        """Number of chunks in the mask and in ``usable`` [C] bool, int64 scalar; None: all."""
        masks = [mask for mask in (self.chunk_mask, usable) if mask is not None]
        if not masks:
            return torch.tensor(self.aligned.chunk_count, device=self.labels.device)
        return reduce(torch.logical_and, masks).sum()
