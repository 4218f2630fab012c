"""Distances of hidden states between layers of both models, at the ends of chunks.

B batch, Ts Tt tokens, C chunks, Ds Dt hidden, P pairs of layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

import torch

from megatron_ext.distributed.vocab_parallel import accumulation_dtype
from megatron_ext.errors import LossError
from megatron_ext.losses.base import DistillationInputs, KnownAhead, LossOutput
from megatron_ext.losses.checks import check_alignment, check_student
from megatron_ext.losses.diagnostics import chunk_output, used_chunks
from megatron_ext.losses.lookup import places_after
from megatron_ext.losses.objective import (
    LAST_LAYER,
    LOSS_REGISTRY,
    ModelPair,
    Needs,
    Objective,
    TargetForm,
)

HiddenDistance = Literal["mse", "cosine"]
PairsOfLayers = tuple[tuple[int, int], ...]

_BOTH_LAST: Final = ((LAST_LAYER, LAST_LAYER),)


def state_distance(
    distance: HiddenDistance, projected: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Distance of each of the student's projected states [C, Dt] from the teacher's [C, Dt]; [C].

    ``mse``: the mean of the squares over the width. ``cosine``: 1 less the cosine of the angle, in
    which lengths do not count; 1 for a state of length 0.
    """
    hidden = hidden.to(projected.dtype)
    if distance == "mse":
        return (projected - hidden).square().mean(dim=-1)
    return 1 - torch.nn.functional.cosine_similarity(projected, hidden, dim=-1)


def onto(weight: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """``hidden weight^T``, accumulated in at least fp32."""
    dtype = accumulation_dtype(hidden.dtype)
    return torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype))


class StateProjectors(torch.nn.Module):
    """A matrix [Dt, Ds] for each pair of layers, from the student's width to the teacher's.

    Parameters are fp32 and drawn from a seed, the same on every rank. Their gradients are complete
    on every rank: a trainer reduces them over data-parallel replicas alone.

    Args:
        layers: Numbers of each pair's layers, resolved as by ``ModelPair.numbers``.
        start: ``random``, or ``none`` for models of one width, whose states are compared as they
            are.

    Raises:
        LossError: There is no projection, and the models' widths differ.
    """

    def __init__(
        self,
        *,
        student_hidden: int,
        teacher_hidden: int,
        layers: PairsOfLayers = _BOTH_LAST,
        start: str = "random",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.layers = layers
        if start == "none" and student_hidden != teacher_hidden:
            raise LossError(
                "states of other widths are compared by a projection",
                got=f"projectors none, {student_hidden} and {teacher_hidden} wide",
                fix="set the option projectors to random",
            )
        generator = torch.Generator().manual_seed(seed)
        scale = 1 / math.sqrt(student_hidden)
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(
                scale * torch.randn(teacher_hidden, student_hidden, generator=generator)
            )
            for _ in (layers if start == "random" else ())
        )

    def forward(self, pair: int, hidden: torch.Tensor) -> torch.Tensor:
        """The student's states [C, Ds] of a pair, as they are compared with the teacher's."""
        if not len(self.weights):
            return hidden.to(accumulation_dtype(hidden.dtype))
        return onto(self.weights[pair], hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StatesLoss(Objective):
    """Sum over chunks ``c`` of the mean over pairs ``p`` of ``d(B_p h_s, h_t)``.

    ``h_s`` and ``h_t`` are the states of the pair's layers at the last token of the chunk, where
    both models have read the same bytes. A chunk counts where a token that both models learn to
    predict follows it in its text. The loss trains the projections ``B_p`` and all of the student
    up to the pair's layer; the teacher's states are constant, so it is 0 only where these can be
    computed from the student's.

    Teacher targets: ``hidden``, with the states of its layers below the last; and
    ``inputs.student_hidden`` and ``student_states``. States are replicated over the tensor-parallel
    group, and gradients of states and projections are complete on every rank. No collectives.

    Metrics, a chunk: ``layers/S:T``, the distance of each pair.

    Raises:
        LossError: Invalid options; calling it without states or an alignment, or with ones that do
            not fit. A NaN in a state makes ``loss_sum`` NaN.
    """

    projectors: StateProjectors
    """``B_p``, which a trainer registers as parameters of its own."""

    layers: PairsOfLayers = _BOTH_LAST
    """Pairs of a layer of the student and one of the teacher: ``n`` is the output of the nth layer,
    ``-n`` of the nth from the end; the last is behind the final norm."""

    projector_starts: ClassVar[tuple[str, ...]] = ("random", "none")
    projector_kind: ClassVar[type[torch.nn.Module] | None] = StateProjectors

    def __post_init__(self) -> None:
        for pair in self.layers:
            if len(pair) != 2 or any(isinstance(n, bool) or n == 0 for n in pair):
                raise LossError(
                    f"layers of the objective {self.name} are pairs of numbers from 1 or -1 on",
                    got=list(pair),
                    expected="[student's layer, teacher's layer]",
                )
        if not self.layers or len(set(self.layers)) < len(self.layers):
            raise LossError(
                f"the objective {self.name} compares pairs of layers, each once",
                got=[list(pair) for pair in self.layers],
                expected="one pair or more",
            )

    def distances(self, projected: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[C] of states [C, Dt]."""
        raise NotImplementedError

    def make_projectors(self, start: str, pair: ModelPair) -> torch.nn.Module:
        """See ``Objective``."""
        return StateProjectors(
            student_hidden=pair.student_hidden,
            teacher_hidden=pair.teacher_hidden,
            layers=pair.numbers(self.layers),
            start=start,
            seed=pair.seed,
        )

    def compute(self, inputs: DistillationInputs) -> LossOutput:
        """See ``Objective``."""
        check_student(inputs)
        alignment, teacher = check_alignment(inputs, objective=self.name, kinds=("hidden",))
        labels = self._teacher_labels(inputs, teacher.positions)
        ends = places_after(alignment, inputs.labels, labels)
        usable = ends[0].exists & ends[1].exists
        used = used_chunks(inputs, usable)
        both = (
            _States("student", inputs.student_hidden, inputs.student_states, inputs.labels.shape),
            _States("teacher", teacher.hidden, teacher.states, teacher.positions),
        )
        distances = []
        for number, pair in enumerate(self.projectors.layers):
            own, its = (
                states.at(layer, end.row, used, objective=self.name)
                for states, layer, end in zip(both, pair, ends, strict=True)
            )
            distances.append(self.distances(self.projectors(number, own), its))
        names = [f"layers/{student}:{its}" for student, its in self.layers]
        return chunk_output(
            inputs,
            # Logits get a gradient of 0: DDP waits for one of every parameter, the head's too.
            torch.stack(distances).mean(dim=0) + inputs.student_logits.flatten()[:0].sum(),
            usable=usable,
            means=dict(zip(names, distances, strict=True)),
        )

    def _teacher_labels(self, inputs: DistillationInputs, positions: torch.Size) -> torch.Tensor:
        labels = inputs.teacher_labels
        if labels is None or labels.shape != positions:
            raise LossError(
                f"the objective {self.name} needs the labels of the teacher's positions",
                got="none" if labels is None else tuple(labels.shape),
                expected=tuple(positions),
            )
        return labels

    def count_ahead(self, known: KnownAhead) -> torch.Tensor:
        """Chunks that a label follows on both sides; without the teacher's labels, at most so
        many."""
        teacher_labels = known.teacher_labels
        if teacher_labels is None:
            teacher_labels = torch.zeros_like(known.aligned.teacher_chunk_id)
        ends = places_after(known.aligned, known.labels, teacher_labels)
        return known.chunks(ends[0].exists & ends[1].exists)

    @property
    def needs(self) -> Needs:
        """States of the layers."""
        return Needs(hidden=True, layers=self.layers)

    @property
    def target_forms(self) -> tuple[TargetForm, ...]:
        """Last states are cached and sent; those of other layers are not."""
        return ("hidden",) if all(pair[1] == LAST_LAYER for pair in self.layers) else ()


@dataclass(frozen=True, slots=True)
class _States:
    """One model's hidden states."""

    side: str
    last: torch.Tensor | None
    lower: Mapping[int, torch.Tensor]
    positions: Sequence[int]

    def at(
        self, layer: int, rows: torch.Tensor, used: torch.Tensor, *, objective: str
    ) -> torch.Tensor:
        """[C, D] at the rows [C] of the used chunks, 0 at others."""
        states = self.last if layer == LAST_LAYER else self.lower.get(layer)
        what = "last layer" if layer == LAST_LAYER else f"layer {layer}"
        if states is None or tuple(states.shape[:2]) != tuple(self.positions):
            raise LossError(
                f"the objective {objective} needs the {self.side}'s states of its {what}",
                got="none" if states is None else tuple(states.shape),
                expected=f"{tuple(self.positions)} positions",
            )
        # Rows left out must not reach the projection, not even as 0 times NaN.
        return torch.where(used[:, None], states.flatten(0, 1)[torch.where(used, rows, 0)], 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenMseLoss(_StatesLoss):
    """``_StatesLoss`` with ``d = mean((B h_s - h_t)^2)`` over the teacher's width."""

    name: ClassVar[str] = "hidden_mse"
    summary: ClassVar[str] = "hidden states of pairs of layers, by their squared difference"

    relative: bool = False
    """Divide by ``mean(h_t^2)``, so that layers with large states weigh no more than others."""

    def distances(self, projected: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """See ``_StatesLoss``."""
        distance = state_distance("mse", projected, hidden)
        if not self.relative:
            return distance
        size = hidden.to(projected.dtype).square().mean(dim=-1)
        return distance / torch.where(size == 0, 1.0, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenCosineLoss(_StatesLoss):
    """``_StatesLoss`` with ``d = 1 - cos(B h_s, h_t)``."""

    name: ClassVar[str] = "hidden_cosine"
    summary: ClassVar[str] = "hidden states of pairs of layers, by the angle between them"

    def distances(self, projected: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """See ``_StatesLoss``."""
        return state_distance("cosine", projected, hidden)


LOSS_REGISTRY.register("hidden_mse", HiddenMseLoss)
LOSS_REGISTRY.register("hidden_cosine", HiddenCosineLoss)
