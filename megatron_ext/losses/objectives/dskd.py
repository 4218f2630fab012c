"""DSKD: divergences in both models' spaces, through projected hidden states.

C chunks, n positions of a slice, Ds Dt hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final, Literal, get_args

import torch

from megatron_ext.alignment.alignment import ChunkClass
from megatron_ext.alignment.batch import AlignmentBatch
from megatron_ext.distributed.vocab_parallel import vocab_argmax
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, KnownAhead, LossOutput
from megatron_ext.losses.checks import check_alignment, check_choice, check_student
from megatron_ext.losses.diagnostics import chunk_output, over_chunks, used_chunks
from megatron_ext.losses.objective import (
    LOSS_REGISTRY,
    ModelPair,
    Needs,
    Objective,
    chunk_scales,
)
from megatron_ext.losses.objectives.dskd_spaces import (
    DskdProjectors,
    Positions,
    Spaces,
    Terms,
    terms_by_slice,
)
from megatron_ext.losses.objectives.hidden_states import HiddenDistance, onto, state_distance
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.ops.divergence import Divergence, DivergenceOptions, check_divergence
from megatron_ext.ops.token_log_prob import token_log_prob
from megatron_ext.ops.vocab_kl import vocab_kl

_WEIGHTS: Final = (
    "label_weight",
    "student_space_weight",
    "teacher_space_weight",
    "hidden_weight",
)
Where = Literal["one_to_one", "chunk_starts"]
Target = Literal["label", "teacher"]
Gate = Literal["target", "none"]
DistanceOrNone = Literal["none", HiddenDistance]


@dataclass(frozen=True, slots=True, kw_only=True)
class DskdLoss(Objective):
    """Distillation in both models' spaces, summed over aligned positions c.

    ``A`` carries a teacher's hidden state to the student's width, ``B`` a student's to the
    teacher's. With ``s_c = softmax(E_s A h_t)``, ``t_c = softmax(E_t B h_s)``, the student's Q and
    the teacher's P, each at the temperature tau but in the cross-entropy:

        w CE(s_c, target) + v g_c tau^2 D(s_c || Q_c) + u tau^2 KL(P_c || t_c) + z d(B h_s, h_t)

    The first term trains A, the second the student, the third B and the student's hidden states, as
    does the fourth, which is off by default: a distance d of the states themselves.
    ``s_c`` is constant in the second, ``E_s`` in the first, and ``E_t`` always; ``g_c`` is 1 where
    the largest of ``s_c`` is the target. In nats; the output counts positions. Where A and B carry
    over exactly, the last two terms vanish, with their gradients, for a student that predicts what
    its teacher does; the first is the teacher's own cross-entropy, which does not.

    The published code has no ``tau^2``: at its tau of 2 the divergences weigh a quarter there.

    Left out of the paper: cross-model attention with embeddings (positions come from the alignment,
    as in DSKDv2), scaling by the standard deviation of a batch (it would depend on the
    microbatch), gating by the share of agreeing positions (for the same reason), adaptive and
    skewed divergences, student generations.

    Metrics, a position: ``projected_ce``, ``projected_accuracy`` (of ``s_c``), ``kd_student``,
    ``kd_teacher``, ``gated`` (positions with ``g_c = 1``), with a ``hidden_distance`` that
    distance; and those of ``losses/diagnostics``.

    Teacher targets: ``hidden``; ``inputs.student_hidden`` and ``student_head_weight`` too. Hidden
    states are replicated over the tensor-parallel group, and the gradient of the student's is
    complete on every rank. Collectives, forward: fifteen all-reduces of [C] to [3, C], two more
    with ``target`` "teacher", one of [Dt, Ds] with projectors from heads; backward an all-reduce of
    [C, Ds] and of [C, Dt]. Logits are made a slice of positions at a time (``SLICE_ELEMENTS``),
    with the collectives of the forward in each but that of the projectors; it keeps the gradient of
    the student's.

    Source: Zhang et al. 2024, arXiv 2406.17328, and the code of DSKDv2.

    Raises:
        LossError: Invalid options; calling it without hidden states, heads or an
            alignment, or with ones that do not fit. NaN logits make ``loss_sum`` NaN.
    """

    name: ClassVar[str] = "dskd"
    summary: ClassVar[str] = "hidden states under both heads, by trained projectors"
    projector_starts: ClassVar[tuple[str, ...]] = ("random", "heads")
    projector_kind: ClassVar[type[torch.nn.Module] | None] = DskdProjectors

    projectors: DskdProjectors
    """A and B, which a trainer registers as parameters of its own."""

    temperature: float = 2.0
    """tau of the two divergences."""

    direction: Divergence = "forward"
    """D: ``forward``: KL(s_c || Q_c). ``reverse``: the other. ``jensen_shannon``: between them."""

    mixture: float = 0.5
    """Weight of s_c in the mixture of ``jensen_shannon``."""

    positions: Where = "one_to_one"
    """``one_to_one``: chunks of one token on either side, as DSKDv2. ``chunk_starts``: the first
    position of every chunk, where both models have read the same bytes too."""

    target: Target = "label"
    """Target of the cross-entropy. ``label``: the student's next token. ``teacher``: the teacher's
    most probable token where ``inputs.match`` has it, as DSKDv2; elsewhere the first term is 0."""

    gate: Gate = "target"
    """``target``: g_c as above. ``none``: 1 everywhere."""

    label_weight: float = 1.0
    """w"""

    student_space_weight: float = 1.0
    """v"""

    teacher_space_weight: float = 1.0
    """u"""

    hidden_distance: DistanceOrNone = "none"
    """d: ``mse`` or ``cosine``, see ``state_distance``."""

    hidden_weight: float = 1.0
    """z"""

    def __post_init__(self) -> None:
        check_divergence(
            self.name,
            temperature=self.temperature,
            direction=self.direction,
            mixture=self.mixture,
        )
        check_choice(self.name, "positions", self.positions, get_args(Where))
        check_choice(self.name, "target", self.target, get_args(Target))
        check_choice(self.name, "gate", self.gate, get_args(Gate))
        check_choice(self.name, "hidden_distance", self.hidden_distance, get_args(DistanceOrNone))
        for option in _WEIGHTS:
            weight = getattr(self, option)
            if not (math.isfinite(weight) and weight >= 0):
                raise LossError(
                    f"{option} of the objective {self.name} must not be negative",
                    got=weight,
                    expected="0 or above",
                )

    def make_projectors(self, start: str, pair: ModelPair) -> torch.nn.Module:
        """From the run's seed, or by pseudo-inverses of the models' heads; the latter with the
        collectives of ``DskdProjectors.from_heads``."""
        if start == "heads":
            assert pair.match is not None
            assert pair.teacher_head is not None, "checked before"
            return DskdProjectors.from_heads(
                pair.student_head,
                pair.teacher_head,
                pair.match,
                student_shard=pair.student_shard,
                teacher_shard=pair.teacher_shard,
            )
        return DskdProjectors(
            student_hidden=pair.student_hidden, teacher_hidden=pair.teacher_hidden, seed=pair.seed
        )

    def compute(self, inputs: DistillationInputs) -> LossOutput:
        """See ``Objective``."""
        check_student(inputs)
        alignment, teacher = check_alignment(inputs, objective=self.name, kinds=("hidden",))
        usable = self._usable(inputs.labels, alignment)
        used = used_chunks(inputs, usable)
        positions, onto_student, onto_teacher = self._positions(inputs, alignment, teacher, used)
        terms = terms_by_slice(
            inputs.student_logits.flatten(0, 1),
            onto_student,
            onto_teacher,
            positions,
            partial(self._terms, inputs, teacher, positions.rows, used),
            grad_scale=chunk_scales(inputs, inputs.grad_scale, usable),
        )
        has_target = terms.target >= 0
        loss, means = terms.loss, {}
        if self.hidden_distance != "none":
            distance = state_distance(self.hidden_distance, onto_teacher, positions.hidden)
            # Replicated like the states, so that its gradient is complete on every rank.
            loss, means = loss + self.hidden_weight * distance, {"hidden_distance": distance}
        return chunk_output(
            inputs,
            loss,
            usable=usable,
            means={
                "kd_student": terms.kd_student,
                "kd_teacher": terms.kd_teacher,
                "gated": terms.gate,
                **means,
            },
            metrics={
                "projected_ce": over_chunks(terms.cross_entropy, has_target),
                "projected_accuracy": over_chunks(terms.hits, has_target),
            },
        )

    def _positions(
        self,
        inputs: DistillationInputs,
        alignment: AlignmentBatch,
        teacher: TeacherTargets,
        used: torch.Tensor,
    ) -> tuple[Positions, torch.Tensor, torch.Tensor]:
        """Compared positions, and the projected hidden states: teacher's [C, Ds], student's [C,
        Dt]."""
        student_hidden, head = _check_hidden(inputs, teacher, self.projectors)
        assert teacher.hidden is not None
        assert teacher.head_weight is not None
        rows, teacher_rows = alignment.student_spans[:, 0], alignment.teacher_spans[:, 0]
        # Positions left out must not reach the projectors, not even as 0 times NaN.
        hidden = torch.where(used[:, None], teacher.hidden.flatten(0, 1)[teacher_rows], 0.0)
        student_hidden = torch.where(used[:, None], student_hidden.flatten(0, 1)[rows], 0.0)
        positions = Positions(
            rows=rows,
            hidden=hidden,
            student_head=head,
            teacher_head=teacher.head_weight,
            student_shard=inputs.student_shard,
            teacher_shard=teacher.shard,
        )
        to_teacher = self.projectors.to_teacher_weight(head, inputs.student_shard)
        onto_student = onto(self.projectors.teacher_to_student, hidden)
        return positions, onto_student, onto(to_teacher, student_hidden)

    def _terms(
        self,
        inputs: DistillationInputs,
        teacher: TeacherTargets,
        rows: torch.Tensor,
        used: torch.Tensor,
        spaces: Spaces,
        positions: slice,
    ) -> Terms:
        shard = inputs.student_shard
        target = self._target(inputs, rows[positions], teacher, spaces)
        target = torch.where(used[positions], target, -1)
        cross_entropy = -token_log_prob(spaces.student_projected, target, shard)
        kd_student = vocab_kl(
            spaces.student,
            spaces.student_projected,
            student_shard=shard,
            teacher_shard=shard,
            options=DivergenceOptions(
                temperature=self.temperature, direction=self.direction, mixture=self.mixture
            ),
        ).row_loss
        kd_teacher = vocab_kl(
            spaces.teacher_projected,
            spaces.teacher,
            student_shard=teacher.shard,
            teacher_shard=teacher.shard,
            options=DivergenceOptions(temperature=self.temperature),
        ).row_loss
        hits = vocab_argmax(spaces.student_projected, shard) == target
        gate = hits if self.gate == "target" else torch.ones_like(hits)
        loss = self.student_space_weight * torch.where(gate, kd_student, 0.0)
        loss = loss + self.label_weight * cross_entropy + self.teacher_space_weight * kd_teacher
        return Terms(loss, cross_entropy, kd_student, kd_teacher, gate, hits, target)

    def _target(
        self,
        inputs: DistillationInputs,
        rows: torch.Tensor,
        teacher: TeacherTargets,
        spaces: Spaces,
    ) -> torch.Tensor:
        """Student token of the cross-entropy, int64 [n], negative for none."""
        if self.target == "label":
            return inputs.labels.flatten()[rows]
        if inputs.match is None:
            raise LossError(
                f"the objective {self.name} needs to know which tokens both vocabularies have",
                got="no match",
                fix="make a VocabularyMatch of the projection's partition, or set target to label",
            )
        table = torch.full((teacher.shard.vocab_size,), -1, device=inputs.labels.device)
        table[inputs.match.common_teacher] = inputs.match.common_student
        # The argmax of a row of NaN is beyond the vocabulary; clamp() keeps it inside the table.
        best = vocab_argmax(spaces.teacher, teacher.shard)
        return table[best.clamp(max=teacher.shard.vocab_size - 1)]

    def count_ahead(self, known: KnownAhead) -> torch.Tensor:
        """Positions of the kind ``positions`` that have a label."""
        return known.chunks(self._usable(known.labels, known.aligned))

    def _usable(self, labels: torch.Tensor, alignment: AlignmentBatch) -> torch.Tensor:
        """bool [C]"""
        usable = labels.flatten()[alignment.student_spans[:, 0]] >= 0
        if self.positions == "one_to_one":
            usable = usable & (alignment.chunk_class == ChunkClass.ONE_TO_ONE)
        return usable

    @property
    def needs(self) -> Needs:
        """Hidden states, and the match, which projectors made from the heads use."""
        return Needs(projection="retokenized", match=True, hidden=True)


def _check_hidden(
    inputs: DistillationInputs, teacher: TeacherTargets, projectors: DskdProjectors
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, head = inputs.student_hidden, inputs.student_head_weight
    if hidden is None or head is None:
        raise LossError(
            "the objective dskd needs the student's hidden states and head",
            got=f"no {'student_hidden' if hidden is None else 'student_head_weight'}",
        )
    assert teacher.hidden is not None
    assert teacher.head_weight is not None
    shapes = {
        "student_hidden": (hidden, (*inputs.labels.shape, projectors.student_hidden)),
        "student_head_weight": (head, (inputs.student_shard.width, projectors.student_hidden)),
        "teacher hidden": (teacher.hidden, (*teacher.positions, projectors.teacher_hidden)),
        "teacher head_weight": (
            teacher.head_weight,
            (teacher.shard.width, projectors.teacher_hidden),
        ),
    }
    for name, (tensor, expected) in shapes.items():
        if tuple(tensor.shape) != expected:
            raise LossError(
                f"the {name} of the objective dskd does not fit its logits and projectors",
                got=tuple(tensor.shape),
                expected=expected,
            )
    return hidden, head


LOSS_REGISTRY.register("dskd", DskdLoss)
