"""Base classes of objectives: loss, gradient, and the properties that a run asks them for.

B batch, Ts tokens, Vp local columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Literal, NamedTuple

import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, KnownAhead, LossOutput, Over
from megatron_ext.losses.diagnostics import bad_flags, chunk_mask
from megatron_ext.losses.vocabulary_match import VocabularyMatch
from megatron_ext.ops.labels import RowLabels
from megatron_ext.ops.launch import Implementation
from megatron_ext.ops.unit_gradient import kept_gradient, own_modes
from megatron_ext.projection.speller import ProjectionMethod
from megatron_ext.registry import Registry

Scale = float | torch.Tensor
"""Factor of a sum: its weight over its global count. A tensor is a scalar without a graph."""


def is_zero(scale: Scale) -> bool:
    """Whether the scale is known on the host to be 0."""
    return not isinstance(scale, torch.Tensor) and scale == 0


LAST_LAYER: Final = -1
"""Number of the last hidden states, behind the final norm, which the head reads."""

TargetForm = Literal["label", "topk", "hidden"]
"""Kind of targets that a cache keeps or a remote teacher sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Inputs that an objective reads beside logits, labels and alignment."""

    projection: ProjectionMethod | None = None
    """Method that builds the projection where the run is given none; None: none is needed."""

    shard: bool = False
    """The projection itself."""

    match: bool = False
    """Tokens that both vocabularies have, by the projection."""

    min_share: float | None = None
    """Least share of a token in the match, see ``SparseProjection.partition``."""

    boundary: bool = False
    """Tokens that begin a word."""

    word_starts: bool = False
    """The student's tokens that begin a word, before the models have run, to count by."""

    completions: Literal["chunks", "prefixes", "repeats"] | None = None
    """Continuations that both models can predict, looked up in each batch: of whole chunks
    (``CompletionTable``), behind every prefix (``PrefixTable``), or of a token that is repeated
    (``RepeatTable``)."""

    hidden: bool = False
    """The student's last hidden states and head."""

    layers: tuple[tuple[int, int], ...] = ()
    """Pairs of a layer of the student and one of the teacher whose states are read, as
    configured: from 1 on, or from the end with -1 for the last."""

    same_tokenizer: bool = False
    """A teacher that reads the student's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPair:
    """Student and teacher on this rank of the last stage, for projectors between their states."""

    student_hidden: int
    teacher_hidden: int
    student_layers: int
    teacher_layers: int

    seed: int
    """Seed of the run."""

    student_shard: VocabShard
    teacher_shard: VocabShard

    student_head: torch.Tensor
    """[Vps, Ds] this rank's rows."""

    teacher_head: torch.Tensor | None = None
    """[Vpt, Dt]; None for a teacher whose model is elsewhere."""

    match: VocabularyMatch | None = None
    """The tokens that both vocabularies have, where the objective needs them."""

    def numbers(self, layers: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Pairs of layers as ``layer_number`` has them."""
        return tuple(
            (layer_number(own, self.student_layers), layer_number(its, self.teacher_layers))
            for own, its in layers
        )


def layer_number(layer: int, count: int) -> int:
    """A layer of ``count``, counted from 1 or with negative numbers from the end, as its number
    from 1; the last as ``LAST_LAYER``.

    Raises:
        LossError: There is no such layer.
    """
    number = layer if layer > 0 else count + 1 + layer
    if not 1 <= number <= count:
        raise LossError(
            "the model has no such layer",
            got=layer,
            expected=f"1 to {count}, or -1 to -{count} from the end",
        )
    return LAST_LAYER if number == count else number


class Objective(ABC):
    """Loss of a student against one teacher, or against its labels.

    A subclass is a frozen dataclass whose fields are the options. It implements ``compute``, or
    derives from ``FusedObjective``; it declares its inputs and the ways its sum can be cut by
    overriding the properties below; and one line registers it:
    ``LOSS_REGISTRY.register("name", TheObjective)``. Nothing else names it.
    """

    __slots__ = ()

    name: ClassVar[str]
    """Name in ``LOSS_REGISTRY``, for errors."""

    summary: ClassVar[str] = ""
    """What it compares, for ``megatron-ext ls objectives``."""

    projector_starts: ClassVar[tuple[str, ...]] = ()
    """Values of the option ``projectors`` in a configuration, the default first, of an objective
    with a field of that name: a module that learns with the student. Empty: it has none."""

    projector_kind: ClassVar[type[torch.nn.Module] | None] = None
    """Class of that module, which two widths make a stand-in of."""

    def __call__(self, inputs: DistillationInputs) -> LossOutput:
        """The loss of one microbatch; ``loss_sum`` has a graph. Collectives: see the class.

        A run computes the same, together with the cross-entropy where it can (``losses/plan.py``).
        """
        with own_modes(inputs.student_logits):
            return self.compute(inputs)

    @abstractmethod
    def compute(self, inputs: DistillationInputs) -> LossOutput:
        """The loss under autograd."""

    def make_projectors(self, start: str, pair: ModelPair) -> torch.nn.Module:
        """The module for the field ``projectors``, on every rank of the last stage alike.

        Args:
            start: One of ``projector_starts``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no projectors")

    def count_ahead(self, known: KnownAhead) -> torch.Tensor:
        """int64 scalar: ``LossOutput.count`` of these inputs, before the student has run.

        Labels, or chunks that are not masked; an objective that leaves out more overrides it.

        Raises:
            LossError: Chunks without an alignment.
        """
        if self.sums_over == "tokens":
            return (known.labels != IGNORE_INDEX).sum()
        return known.chunks()

    @property
    def needs(self) -> Needs:
        """Inputs that it reads; by default a projection and the match."""
        return Needs(projection="retokenized", shard=True, match=True)

    @property
    def sums_over(self) -> Over:
        """Terms of its sum: chunks of an alignment, or the student's labels."""
        return "chunks"

    @property
    def target_forms(self) -> tuple[TargetForm, ...]:
        """Forms of cached or remote targets that it accepts at its options, the smallest first."""
        return ("hidden",)

    @property
    def why_no_context_parallel(self) -> str | None:
        """Reason why it needs whole sequences, which context-parallel ranks do not have; None: it
        does not, since each term depends on a chunk's rows and the row after them alone."""
        return None

    @property
    def why_no_linear_form(self) -> str | None:
        """Reason why it has no linear form; None: each chunk's or label's term depends on its own
        rows of logits alone, and the row behind if it ``reads_behind``."""
        return self.why_no_context_parallel or "it needs all positions, or hidden states"

    @property
    def reads_behind(self) -> bool:
        """Whether it reads the rows behind chunks."""
        return False

    def tells_bad(self, inputs: DistillationInputs) -> bool:
        """Whether ``LossOutput.bad`` says of these inputs what ``check_finite`` would."""
        return False

    @property
    def learns_projection(self) -> bool:
        """Whether it gives a projection's entries a gradient."""
        return False


class Evaluated(NamedTuple):
    """Result of one pass over the logits, without a graph."""

    output: LossOutput

    token_loss: torch.Tensor | None
    """[B Ts] cross-entropy of each label; None where not requested."""

    top_column: torch.Tensor | None = None
    """int64 [B Ts]: global column of the largest logit, the first of equals, of rows with a label;
    beside ``token_loss``."""


class FusedObjective(Objective):
    """Objective whose value and gradient come from one pass over the logits.

    The pass can compute the cross-entropy of the same rows with them.
    """

    implementation: Implementation
    """How it is computed, sums for metrics and the gradient's scale included."""

    __slots__ = ()

    @property
    def takes_labels(self) -> bool:
        """Whether ``evaluate`` computes the cross-entropy, too, at these options."""
        return True

    @abstractmethod
    def evaluate(
        self,
        inputs: DistillationInputs,
        *,
        scale: Scale = 1.0,
        ce_scale: Scale | None = None,
        gradient: torch.Tensor | None = None,
    ) -> Evaluated:
        """Compute the loss, and write the gradient into the caller's memory.

        Args:
            inputs: ``student_logits`` have no graph.
            scale: Factor of the objective's sum in the gradient.
            ce_scale: Factor of the cross-entropy's sum; None: no cross-entropy.
            gradient: [B Ts, Vp], receives the gradient of the scaled sums, rounded once; can be the
                logits. None: no gradient is computed.

        Collectives: those of the operation, see the class.
        """

    def fuses(self, inputs: DistillationInputs) -> bool:
        """Whether ``evaluate`` supports these inputs at these options; else they run under
        autograd."""
        return True

    def __call__(self, inputs: DistillationInputs) -> LossOutput:
        """The loss of one microbatch; ``loss_sum`` has a graph. Collectives: see the class.

        The gradient is written in the forward, for ``inputs.grad_scale``.
        """
        if not self.fuses(inputs):
            return super().__call__(inputs)
        output: LossOutput | None = None

        def evaluate(rows: torch.Tensor, gradient: torch.Tensor | None) -> tuple[torch.Tensor]:
            nonlocal output
            detached = replace(inputs, student_logits=rows.view(inputs.student_logits.shape))
            output = self.evaluate(detached, scale=inputs.grad_scale, gradient=gradient).output
            return (output.loss_sum,)

        (loss_sum,) = kept_gradient(
            inputs.student_logits,
            evaluate,
            grad_scale=inputs.grad_scale,
            in_place=inputs.in_place,
            implementation=self.implementation,
        )
        assert output is not None
        return replace(output, loss_sum=loss_sum)

    def compute(self, inputs: DistillationInputs) -> LossOutput:
        """The loss under autograd, of inputs that ``evaluate`` does not support."""
        raise NotImplementedError(f"{type(self).__name__} evaluates everything")

    def flags(
        self,
        inputs: DistillationInputs,
        student: torch.Tensor,
        teacher: torch.Tensor,
        *,
        is_cut: bool = False,
    ) -> torch.Tensor:
        """``bad_flags`` of these, for ``LossOutput.bad``."""
        return bad_flags(
            inputs, student, teacher, is_cut=is_cut, implementation=self.implementation
        )


def row_labels(inputs: DistillationInputs, scale: Scale | None) -> RowLabels | None:
    """The labels [B Ts] of an operation that evaluates them, if ``scale`` is not None."""
    if scale is None:
        return None
    return RowLabels(inputs.labels.flatten(), label_factors(inputs, scale))


def label_factors(inputs: DistillationInputs, scale: Scale) -> Scale:
    """``label_scales``, or the one number of all labels."""
    return label_scales(inputs, scale) if isinstance(scale, torch.Tensor) else scale


def label_scales(inputs: DistillationInputs, scale: Scale) -> torch.Tensor:
    """fp32 [B Ts]: ``scale`` at every label, 0 where there is none."""
    return ((inputs.labels.flatten() != IGNORE_INDEX) * in_fp32(scale)).float()


def in_fp32(scale: Scale) -> torch.Tensor:
    """A factor for tensors of bools, which a float would make ones of torch's default dtype; on the
    host where it is a float, which takes no operation on the device."""
    if isinstance(scale, torch.Tensor):
        return scale
    return torch.tensor(scale, dtype=torch.float32, device="cpu")


def chunk_factors(
    inputs: DistillationInputs, scale: Scale, usable: torch.Tensor | None = None
) -> Scale:
    """``chunk_scales``, or the one number of all chunks."""
    if isinstance(scale, torch.Tensor) or chunk_mask(inputs, usable) is not None:
        return chunk_scales(inputs, scale, usable)
    return scale


def chunk_scales(
    inputs: DistillationInputs, scale: Scale, usable: torch.Tensor | None = None
) -> torch.Tensor:
    """fp32 [C]: ``scale`` at every chunk of ``used_chunks``, 0 elsewhere."""
    mask = chunk_mask(inputs, usable)
    if mask is not None:
        return (mask * in_fp32(scale)).float()
    assert inputs.alignment is not None
    count, logits = inputs.alignment.chunk_count, inputs.student_logits
    if isinstance(scale, torch.Tensor):
        return scale.to(logits.device, torch.float32).expand(count)
    return torch.full((count,), scale, dtype=torch.float32, device=logits.device)


LOSS_REGISTRY: Registry[Callable[..., Objective]] = Registry("distillation objective")
"""Name -> constructor taking the objective's options as keywords."""
