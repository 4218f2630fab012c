"""Small fixed inputs of every objective and its options.

B batch, T tokens, Vp local columns, D hidden.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.losses import (
    DistillationInputs,
    DskdLoss,
    DskdProjectors,
    LearnedProjection,
    Objective,
)
from megatron_ext.projection import SparseProjection
from tests.losses.linear.linear_case import ordered
from tests.losses.microbatch import csr_arrays
from tests.losses.objective_cases import (
    CASES,
    ObjectiveCase,
    as_kind,
    with_uncommon_tokens,
)

HIDDEN = 6
PADDING = (3, 1)
"""Columns beyond the vocabularies."""

TOP_K = 5


@dataclass(frozen=True, kw_only=True)
class LossCase:
    """An objective and what it is given."""

    objective: Objective
    inputs: DistillationInputs
    """With logits and with hidden states and a head, which have nothing to do with one another but
    in the cases of ``dskd``."""

    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Of the objective and of a learned projection."""


class MakeCase(Protocol):
    """A new case each time, with leaves of its own."""

    def __call__(self): ...


def loss_cases():
    """Readable name -> case."""
    cases = {name: partial(_case, case) for name, case in (CASES | _MORE).items()}
    for objective in dict.fromkeys(case.name for case in CASES.values()):
        for kind in ("hidden", "topk", "label"):
            names = [
                name
                for name, case in CASES.items()
                if case.name == objective and "logits" in case.kinds and kind in case.kinds
            ]
            if names:
                cases[f"{names[0]}, given {kind}"] = partial(_case, CASES[names[0]], kind=kind)
    cases["projected_kl of exact chunks"] = partial(
        _inexact, ObjectiveCase(name="projected_kl", options={"exact_token_match_only": True})
    )
    cases["projected_kl of inexact chunks"] = partial(_inexact, CASES["projected_kl"])
    cases["projected_kl with a learned projection"] = partial(_learned, CASES["projected_kl"])
    for name in ("projected_kl", "partition_kl", "gold", "uld", "alm", "mined", "strict_topk"):
        cases[f"{name}, some chunks masked"] = partial(_masked, CASES[name])
    cases["dskd gated"] = _gated
    cases["dskd gated, from heads"] = partial(_gated, from_heads=True)
    return cases


_MORE = {
    "projected_kl nemo": ObjectiveCase(name="projected_kl", options={"numerics": "nemo"}),
    "projected_kl nemo reverse, on the teacher's top tokens": ObjectiveCase(
        name="projected_kl",
        options={"numerics": "nemo", "direction": "reverse", "vocab_topk": 4, "temperature": 1.5},
    ),
    "gold nemo": ObjectiveCase(
        name="gold", options={"numerics": "nemo"}, build=with_uncommon_tokens
    ),
    "hybrid_kl nemo reverse": ObjectiveCase(
        name="hybrid_kl",
        options={"numerics": "nemo", "direction": "reverse", "temperature": 1.5},
        build=with_uncommon_tokens,
    ),
    "uld over all": ObjectiveCase(name="uld", options={"top_u": None}),
    "mined jensen-shannon": ObjectiveCase(
        name="mined", options={"direction": "jensen_shannon", "mixture": 0.3}
    ),
}


def leaves(case):
    """What a gradient can reach."""
    inputs = case.inputs
    found = {
        "logits": inputs.student_logits,
        "hidden": inputs.student_hidden,
        "head": inputs.student_head_weight,
        **case.parameters,
    }
    return {name: leaf for name, leaf in found.items() if leaf is not None}


def _case(case, *, kind="logits"):
    options, parameters = dict(case.options), {}
    if "projectors" in options:
        # A case's own would gather the gradients of every test.
        options["projectors"] = copy.deepcopy(options["projectors"])
        parameters = dict(options["projectors"].named_parameters())
    inputs = case.build(_microbatch(case), PADDING)
    if not case.kinds and case.name == "next_token":
        inputs = replace(inputs, teacher=None)
    if kind != "logits":
        inputs = as_kind(inputs, kind, TOP_K)
    made = replace(case, options=options).objective()
    return LossCase(objective=made, inputs=_with_leaves(inputs), parameters=parameters)


def _microbatch(case):
    """Chunks in the order of the text; logits from a stream that is the same on every machine."""
    batch = ordered(case.batch())
    return replace(
        batch,
        student_logits=3 * _normal(1, *batch.student_logits.shape),
        teacher_logits=3 * _normal(2, *batch.teacher_logits.shape),
    )


def _with_leaves(inputs):
    hidden, head = inputs.student_hidden, inputs.student_head_weight
    if hidden is None or head is None:
        hidden = _normal(3, *inputs.labels.shape, HIDDEN)
        head = 1.5 * _normal(4, inputs.student_shard.width, HIDDEN)
    return replace(
        inputs,
        student_logits=inputs.student_logits.detach().requires_grad_(),
        student_hidden=hidden.requires_grad_(),
        student_head_weight=head.requires_grad_(),
    )


def _inexact(case):
    """Of the same bytes are two of three chunks."""
    made = _case(case)
    alignment = made.inputs.alignment
    is_exact = torch.arange(alignment.chunk_count) % 3 != 1
    alignment = replace(alignment, is_exact=is_exact)
    return replace(made, inputs=replace(made.inputs, alignment=alignment))


def _masked(case):
    """Two of three chunks count, and chunks have classes and scripts for the diagnostics."""
    made = _case(case)
    number = torch.arange(made.inputs.alignment.chunk_count)
    inputs = replace(
        made.inputs,
        chunk_mask=number % 3 != 0,
        chunk_text_class=(number % 3).to(torch.int8),
        chunk_script=(number % 2).to(torch.int8),
    )
    return replace(made, inputs=inputs)


def _learned(case):
    made = _case(case)
    dense = case.batch().projection
    module = LearnedProjection(
        SparseProjection(*csr_arrays(dense), (dense.shape[0], dense.shape[1])),
        student_shard=made.inputs.student_shard,
        teacher_shard=made.inputs.teacher.shard,
    )
    return replace(
        made,
        inputs=replace(made.inputs, projection=module()),
        parameters={"projection": module.logits},
    )


def _gated(*, from_heads=False):
    """Labels are what most of the teacher's states say under the student's head."""
    inputs = _case(CASES["dskd"]).inputs
    teacher, head = inputs.teacher, inputs.student_head_weight
    projectors = DskdProjectors(student_hidden=5, teacher_hidden=6)
    if from_heads:
        projectors = DskdProjectors.from_heads(
            head,
            teacher.head_weight,
            inputs.match,
            student_shard=inputs.student_shard,
            teacher_shard=teacher.shard,
        )
    with torch.no_grad():
        logits = teacher.hidden @ projectors.teacher_to_student.t() @ head.t()
    label = logits[..., : inputs.student_shard.vocab_size].argmax(dim=-1).flatten().mode().values
    labels = torch.where(inputs.labels == IGNORE_INDEX, IGNORE_INDEX, label)
    return LossCase(
        objective=DskdLoss(projectors=projectors, positions="chunk_starts"),
        inputs=replace(inputs, labels=labels),
        parameters=dict(projectors.named_parameters()),
    )


def _normal(seed, *shape):
    """fp32, from numpy's frozen generator: torch's differs between instruction sets."""
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(shape)).float()
