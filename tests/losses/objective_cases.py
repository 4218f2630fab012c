"""A case of every objective, for ``test_every_objective.py`` to hold to the rules of all of them.

A row of ``CASES`` is an objective with options, and how its inputs are made of a ``Microbatch``.
B batch, T tokens, V vocabularies, D hidden, K top-k, N common tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.losses import (
    LOSS_REGISTRY,
    BoundaryColumns,
    DistillationInputs,
    DskdProjectors,
    Objective,
    TargetKind,
    TeacherTargets,
    VocabularyMatch,
)
from megatron_ext.losses.completions import ChunkCompletions, CompletionTable
from tests.losses.microbatch import Microbatch

Build = Callable[[Microbatch, tuple[int, int]], DistillationInputs]


def inputs_of(batch: Microbatch, padding: tuple[int, int]) -> DistillationInputs:
    """Everything that an objective can ask for, of a pair of tokenizers or of one."""
    inputs = batch.inputs(padding=padding)
    vocabs = batch.student_logits.shape[-1], batch.teacher_logits.shape[-1]
    common = torch.arange(0, min(vocabs), 2) if vocabs[0] != vocabs[1] else torch.arange(vocabs[0])
    # Any labels do that differ from one position to the next.
    length = batch.teacher_logits.shape[1]
    teacher_labels = (batch.labels[:, :1] + torch.arange(length)) % vocabs[1]
    if length == batch.labels.shape[1] and vocabs[0] == vocabs[1]:
        teacher_labels = batch.labels
    boundary = (
        torch.arange(vocab + extra) % 4 == 1 for vocab, extra in zip(vocabs, padding, strict=True)
    )
    return replace(
        inputs,
        match=VocabularyMatch(common_student=common, common_teacher=common),
        boundary=BoundaryColumns(student=next(boundary), teacher=next(boundary)),
        teacher_labels=teacher_labels.clamp(min=IGNORE_INDEX),
    )


def with_uncommon_tokens(batch: Microbatch, padding: tuple[int, int]) -> DistillationInputs:
    """Every second token is common, also of one vocabulary with itself."""
    common = torch.arange(0, min(batch.student_logits.shape[-1], batch.teacher_logits.shape[-1]), 2)
    match = VocabularyMatch(common_student=common, common_teacher=common)
    return replace(inputs_of(batch, padding), match=match)


class AnyCompletions(CompletionTable):
    """Gives every pair of last tokens two more completions, whatever they spell."""

    def completions(
        self, student: Sequence[int], teacher: Sequence[int], limit: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        more = np.arange(1 if len(student) > 1 and len(teacher) > 1 else 3)
        vocabs = len(self.student_bytes), len(self.teacher_bytes)
        return (student[-1] + 5 * more) % vocabs[0], (teacher[-1] + 5 * more) % vocabs[1]


def with_completions(batch: Microbatch, padding: tuple[int, int]) -> DistillationInputs:
    """What ``partition_kl`` looks up where data is loaded."""
    inputs = inputs_of(batch, padding)
    assert inputs.alignment is not None
    assert inputs.teacher_labels is not None
    vocabs = (batch.student_logits.shape[-1], batch.teacher_logits.shape[-1])
    table = AnyCompletions.from_token_bytes(*([b""] * vocab for vocab in vocabs))
    completions = ChunkCompletions.of(inputs.alignment, inputs.labels, inputs.teacher_labels, table)
    return replace(inputs, completions=completions)


def with_hidden_states(batch: Microbatch, padding: tuple[int, int]) -> DistillationInputs:
    """Hidden states of width 5 and 6 that follow from the logits, under random heads."""
    inputs = inputs_of(batch, padding)
    states, heads = [], []
    for logits, width, extra in zip(
        (batch.student_logits, batch.teacher_logits), (5, 6), padding, strict=True
    ):
        states.append(2 * torch.tanh(logits[..., :width].detach().float()))
        head = torch.randn(logits.shape[-1], width, generator=torch.Generator().manual_seed(width))
        heads.append(torch.nn.functional.pad(head, (0, 0, 0, extra), value=40.0))
    assert inputs.teacher is not None
    teacher = TeacherTargets(
        kind="hidden", shard=inputs.teacher.shard, hidden=states[1], head_weight=heads[1]
    )
    return replace(inputs, teacher=teacher, student_hidden=states[0], student_head_weight=heads[0])


@dataclass(frozen=True, kw_only=True)
class ObjectiveCase:
    """One objective with options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    over: Literal["chunks", "tokens"] = "chunks"
    """What it sums over. Those over tokens use labels and no alignment."""

    kinds: tuple[TargetKind, ...] = ("logits", "hidden")
    """Forms of teacher targets that it accepts; () where it has no teacher."""

    same_tokenizer: bool = False
    """It can only compare models with one vocabulary and one tokenization."""

    no_identity: str | None = None
    """Why it is not zero, with zero gradient, for a student that predicts what its teacher does;
    None: it is."""

    no_finite_difference: str | None = None
    """Why its gradient is not that of its value, as where a weight is held constant."""

    build: Build = inputs_of

    def objective(self) -> Objective:
        return LOSS_REGISTRY[self.name](**self.options)

    def batch(self, **sizes: Any) -> Microbatch:
        """A random microbatch of sizes that the objective can compare."""
        if self.same_tokenizer:
            length = sizes.pop("lengths", (8, 8))[0]
            sizes |= {"vocabs": (37, 37), "lengths": (length, length)}
        return Microbatch.random(**sizes)

    def same(self) -> Microbatch:
        """Two models that agree: one vocabulary, one tokenization, chunks of several tokens."""
        batch = Microbatch.random(vocabs=(23, 23), lengths=(9, 9))
        return replace(
            batch,
            teacher_logits=batch.student_logits.clone(),
            chunk_ids=[(student, student) for student, _ in batch.chunk_ids],
            projection=torch.eye(23),
        )


TOP_K: dict[str, Any] = {"kinds": ("logits", "hidden", "topk")}
LIKELIHOODS: dict[str, Any] = {"kinds": ("logits", "hidden", "label")}
HIDDEN: dict[str, Any] = {"kinds": ("hidden",), "build": with_hidden_states}
ONE_TOKENIZER: dict[str, Any] = {"over": "tokens", "same_tokenizer": True}

CASES: dict[str, ObjectiveCase] = {
    "next_token": ObjectiveCase(
        name="next_token", over="tokens", kinds=(), no_identity="it has no teacher"
    ),
    "vocab_kl": ObjectiveCase(name="vocab_kl", options={"temperature": 1.5}, **ONE_TOKENIZER),
    "vocab_kl reverse": ObjectiveCase(
        name="vocab_kl", options={"direction": "reverse"}, **TOP_K, **ONE_TOKENIZER
    ),
    "vocab_kl jensen-shannon": ObjectiveCase(
        name="vocab_kl",
        options={"direction": "jensen_shannon", "mixture": 0.3},
        **TOP_K,
        **ONE_TOKENIZER,
    ),
    "strict_topk": ObjectiveCase(name="strict_topk", options={"top_k": 5}, **TOP_K),
    "strict_topk at another temperature": ObjectiveCase(
        name="strict_topk", options={"top_k": 5, "temperature": 1.5}
    ),
    "strict_topk reverse": ObjectiveCase(
        name="strict_topk", options={"top_k": 5, "direction": "reverse"}, **TOP_K
    ),
    "strict_topk renormalised": ObjectiveCase(
        name="strict_topk",
        options={"top_k": 5, "tail": "renormalise"},
        **TOP_K,
    ),
    "strict_topk jensen-shannon of every shared token": ObjectiveCase(
        name="strict_topk", options={"direction": "jensen_shannon"}, **TOP_K
    ),
    "alm": ObjectiveCase(name="alm", **LIKELIHOODS),
    "alm without debiasing": ObjectiveCase(name="alm", options={"debias": False}, **LIKELIHOODS),
    "alm merged up to likely boundaries": ObjectiveCase(
        name="alm", options={"merge": "likely_boundaries", "temperature": 1.0}, **LIKELIHOODS
    ),
    "alm merged up to words": ObjectiveCase(name="alm", options={"merge": "words"}, **LIKELIHOODS),
    "alm as cross-entropy": ObjectiveCase(
        name="alm",
        options={"difference": "binary_ce"},
        no_identity="it keeps the entropy of the teacher's likelihoods",
        **LIKELIHOODS,
    ),
    "alm reverse": ObjectiveCase(
        name="alm", options={"difference": "reverse_binary_kl"}, **LIKELIHOODS
    ),
    "alm at the limit of the temperature": ObjectiveCase(
        name="alm", options={"difference": "binary_kl_temp_limit"}, **LIKELIHOODS
    ),
    "alm of absolute differences": ObjectiveCase(
        name="alm", options={"difference": "abs"}, **LIKELIHOODS
    ),
    "alm of total variation": ObjectiveCase(
        name="alm", options={"difference": "abs_exp", "temperature": 20.0}, **LIKELIHOODS
    ),
    "alm of Renyi's divergence": ObjectiveCase(
        name="alm", options={"difference": "renyi"}, **LIKELIHOODS
    ),
    "alm of squared log-ratios": ObjectiveCase(
        name="alm", options={"difference": "joschu_k2"}, **LIKELIHOODS
    ),
    "alm of exponential log-ratios": ObjectiveCase(
        name="alm", options={"difference": "joschu_k3"}, **LIKELIHOODS
    ),
    "partition_kl": ObjectiveCase(
        name="partition_kl",
        options={"temperature": 1.5},
        kinds=("logits", "hidden", "topk"),
        build=with_completions,
    ),
    "partition_kl reverse": ObjectiveCase(
        name="partition_kl",
        options={"direction": "reverse", "chain_weight": 0.5},
        kinds=("logits", "hidden", "topk"),
        build=with_completions,
    ),
    "partition_kl jensen-shannon": ObjectiveCase(
        name="partition_kl",
        options={"direction": "jensen_shannon", "mixture": 0.3},
        kinds=("logits", "hidden", "topk"),
        build=with_completions,
    ),
    "mined": ObjectiveCase(name="mined", options={"temperature": 1.5}),
    "mined with copies": ObjectiveCase(name="mined", options={"sharing": "copy"}),
    "mined reverse": ObjectiveCase(name="mined", options={"direction": "reverse"}),
    "dskd": ObjectiveCase(
        name="dskd",
        options={
            "projectors": DskdProjectors(student_hidden=5, teacher_hidden=6),
            "gate": "none",
        },
        no_identity="its projected logits are held to the labels",
        **HIDDEN,
    ),
    "dskd at chunk starts to the teacher's tokens": ObjectiveCase(
        name="dskd",
        options={
            "projectors": DskdProjectors(student_hidden=5, teacher_hidden=6),
            "positions": "chunk_starts",
            "target": "teacher",
            "gate": "none",
            "direction": "reverse",
        },
        no_identity="its projected logits are held to the teacher's first choice",
        **HIDDEN,
    ),
    "projected_kl": ObjectiveCase(name="projected_kl", options={"temperature": 1.5}),
    "projected_kl reverse": ObjectiveCase(name="projected_kl", options={"direction": "reverse"}),
    "projected_kl jensen-shannon": ObjectiveCase(
        name="projected_kl", options={"direction": "jensen_shannon", "mixture": 0.3}
    ),
    "projected_kl on the teacher's top tokens": ObjectiveCase(
        name="projected_kl", options={"vocab_topk": 4, "temperature": 1.5}
    ),
    "gold": ObjectiveCase(name="gold", options={"temperature": 1.5}, build=with_uncommon_tokens),
    "gold reverse, over the largest uncommon": ObjectiveCase(
        name="gold",
        options={"direction": "reverse", "uncommon_topk": 3},
        build=with_uncommon_tokens,
    ),
    "gold jensen-shannon": ObjectiveCase(
        name="gold",
        options={"direction": "jensen_shannon", "uncommon_weight": 0.5},
        build=with_uncommon_tokens,
    ),
    "hybrid_kl": ObjectiveCase(name="hybrid_kl", build=with_uncommon_tokens),
    "hybrid_kl of one vocabulary": ObjectiveCase(name="hybrid_kl"),
    "uld": ObjectiveCase(name="uld", options={"temperature": 1.5}),
    "uld over the largest": ObjectiveCase(name="uld", options={"top_u": 5}),
    "uld by position": ObjectiveCase(
        name="uld", options={"alignment": "position", "top_u": None}, over="tokens"
    ),
}
"""Readable id -> case. An objective has a row for each option that changes its formula."""


def as_kind(inputs: DistillationInputs, kind: TargetKind, top_k: int) -> DistillationInputs:
    """The same unsharded teacher, given as logits, in another form."""
    teacher = inputs.teacher
    assert teacher is not None
    assert teacher.logits is not None
    shard = teacher.shard
    real = teacher.logits[..., : shard.vocab_size]
    lse = torch.logsumexp(real, dim=-1)
    if kind == "hidden":
        # The head is the identity: hidden states are the logits.
        width = teacher.logits.shape[-1]
        head = torch.eye(width, dtype=real.dtype)
        targets = TeacherTargets(
            kind="hidden", shard=shard, hidden=teacher.logits, head_weight=head
        )
    elif kind == "topk":
        top = real.topk(min(top_k, shard.vocab_size), dim=-1)
        targets = TeacherTargets(
            kind="topk",
            shard=shard,
            topk_ids=top.indices,
            topk_logits=top.values,
            log_normaliser=lse,
        )
    elif kind == "label":
        assert inputs.teacher_labels is not None
        labels = inputs.teacher_labels
        picked = real.gather(-1, labels.clamp(min=0)[..., None])[..., 0] - lse
        boundary = None
        if inputs.boundary is not None:
            members = inputs.boundary.teacher[: shard.vocab_size]
            boundary = torch.logsumexp(real[..., members], dim=-1) - lse
        targets = TeacherTargets(
            kind="label",
            shard=shard,
            label_log_probs=torch.where(labels >= 0, picked, 0.0),
            boundary_log_probs=boundary,
        )
    else:
        targets = teacher
    return replace(inputs, teacher=targets)
