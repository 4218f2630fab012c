"""A case of every objective, for ``test_every_objective.py`` to hold to the rules of all of them.

A row of ``CASES`` is an objective with options, and how its inputs are made of a ``Microbatch``.
B batch, T tokens, V vocabularies, D hidden, K top-k, N common tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.losses import (
    LOSS_REGISTRY,
    BoundaryColumns,
    CompletionSource,
    DistillationInputs,
    DskdProjectors,
    Objective,
    PrefixRows,
    PrefixTable,
    RepeatRows,
    RepeatTable,
    StateProjectors,
    TargetKind,
    TeacherTargets,
    VocabularyMatch,
)
from megatron_ext.losses.completions import ChunkCompletions, CompletionTable
from tests.losses.microbatch import Microbatch
from tests.ops.kernel_case import EVERY_COMBINATION

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
    table = completion_table((batch.student_logits.shape[-1], batch.teacher_logits.shape[-1]))
    completions = ChunkCompletions.of(inputs.alignment, inputs.labels, inputs.teacher_labels, table)
    return replace(inputs, completions=completions)


def completion_table(vocabs: tuple[int, int]) -> AnyCompletions:
    """Table of two vocabularies whose tokens spell nothing."""
    return AnyCompletions.from_token_bytes(*([b""] * vocab for vocab in vocabs))


def prefix_table(vocabs: tuple[int, int]) -> PrefixTable:
    """Table of tokens of one to nine letters, the first nine of one letter alone; some are control
    tokens, of which the lowest have partners."""
    random = np.random.default_rng(0)
    sides: list[list[bytes | None]] = []
    for vocab in vocabs if vocabs[0] != vocabs[1] else vocabs[:1]:
        letters = [random.integers(97, 99, size=1 + place % 4).tolist() for place in range(vocab)]
        side: list[bytes | None] = [bytes(text) for text in letters]
        side[:9] = [b"a" * length for length in range(1, min(vocab, 9) + 1)]
        side[10::11] = [None] * len(side[10::11])
        sides.append(side)
    own, its = sides[0], sides[-1]
    whole = len(own[10::11]) if own is its else 1
    control = [10 + 11 * place for place in range(min(whole, len(its[10::11]), len(own[10::11])))]
    return PrefixTable.from_token_bytes(own, its, (control, control))


def repeat_table(vocabs: tuple[int, int]) -> RepeatTable:
    """Table of two teacher tokens, of which the student has one to three copies, and two to five
    without three."""
    members = {3: {1: 5, 2: 6, 3: 7}, 4: {2: 8, 4: 9, 5: 11}}
    copies = {
        token: (column, count)
        for column, tokens in members.items()
        for count, token in tokens.items()
    }
    return RepeatTable(vocabs, members, copies)


def repeated(inputs: DistillationInputs) -> DistillationInputs:
    """The same inputs with labels that are copies of one teacher token, wherever a chunk is one
    token of the student, and the rows of ``repeat_table``."""
    alignment = inputs.alignment
    labels = [inputs.labels.clone(), inputs.teacher_labels.clone()]
    table = repeat_table((inputs.student_shard.vocab_size, inputs.teacher.shard.vocab_size))
    for chunk in range(alignment.chunk_count):
        own, its = alignment.student_chunk_id == chunk, alignment.teacher_chunk_id == chunk
        count = int(its.sum())
        columns = [column for column, tokens in table.members.items() if count in tokens]
        if int(own.sum()) == 1 and columns:
            column = columns[int(own.nonzero()[0, 1]) % len(columns)]
            labels[0][own], labels[1][its] = table.members[column][count], column
    return replace(
        inputs,
        labels=labels[0],
        teacher_labels=labels[1],
        completions=table.of_batch(alignment, *labels),
    )


def with_repeats(batch: Microbatch, padding: tuple[int, int]) -> DistillationInputs:
    """What ``projected_kl`` with a ``repeat_weight`` looks up where data is loaded."""
    return repeated(inputs_of(batch, padding))


def table_of(inputs: DistillationInputs) -> CompletionSource | None:
    """Table that the completions of some inputs were looked up in."""
    if inputs.completions is None:
        return None
    vocabs = inputs.student_shard.vocab_size, inputs.teacher.shard.vocab_size
    if isinstance(inputs.completions, RepeatRows):
        return repeat_table(vocabs)
    is_prefix = isinstance(inputs.completions, PrefixRows)
    return prefix_table(vocabs) if is_prefix else completion_table(vocabs)


def spelled(inputs: DistillationInputs) -> DistillationInputs:
    """The same inputs with labels of ``prefix_table`` that spell one text on both sides of a chunk,
    and what ``byte_prefix`` looks up for them."""
    alignment = inputs.alignment
    labels = [inputs.labels.clone(), inputs.teacher_labels.clone()]
    ids = alignment.student_chunk_id, alignment.teacher_chunk_id
    for chunk in range(alignment.chunk_count):
        counts = [int((side == chunk).sum()) for side in ids]
        if counts == [1, 1]:
            continue
        divisor = math.gcd(*counts)
        for side, own, other in zip(ids, labels, counts[::-1], strict=True):
            own[(side == chunk) & (own != IGNORE_INDEX)] = other // divisor - 1
    table = prefix_table((inputs.student_shard.vocab_size, inputs.teacher.shard.vocab_size))
    return replace(
        inputs,
        labels=labels[0],
        teacher_labels=labels[1],
        completions=table.of_batch(alignment, *labels),
        prefix_columns=table.columns(inputs.student_shard, inputs.teacher.shard),
    )


def with_prefixes(batch: Microbatch, padding: tuple[int, int]) -> DistillationInputs:
    """What ``byte_prefix`` looks up where data is loaded."""
    return spelled(inputs_of(batch, padding))


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
    teacher = TeacherTargets(
        kind="hidden", shard=inputs.teacher.shard, hidden=states[1], head_weight=heads[1]
    )
    return replace(inputs, teacher=teacher, student_hidden=states[0], student_head_weight=heads[0])


def with_learning_states(batch: Microbatch, padding: tuple[int, int]) -> DistillationInputs:
    """``with_hidden_states``, of which the student's take a gradient."""
    inputs = with_hidden_states(batch, padding)
    return replace(inputs, student_hidden=inputs.student_hidden.requires_grad_())


def with_samples(batch: Microbatch, padding: tuple[int, int]) -> DistillationInputs:
    """Log-probabilities with which most labels were sampled, near those of the student."""
    inputs = inputs_of(batch, padding)
    log_probs = batch.student_logits.detach().float().log_softmax(-1)
    own = log_probs.gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]
    number = torch.arange(own.shape[1]).expand_as(own)
    sampled = torch.where(number % 5 == 0, torch.nan, own + 0.3 * torch.sin(number.float()))
    return replace(inputs, sampled_log_probs=sampled)


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

    reads_logits: bool = True
    """Whether its gradient is of the student's logits; otherwise it is of the last states."""

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
CONSTANT_SIGNAL = {"no_finite_difference": "its signal and its ratio are held constant"}
ONE_TOKENIZER: dict[str, Any] = {"over": "tokens", "same_tokenizer": True}
COMPLETED: dict[str, Any] = {**TOP_K, "build": with_completions}
PREFIXES: dict[str, Any] = {"build": with_prefixes}
SMOOTHED = {"no_identity": "a share of its target is even"}
REPEATS: dict[str, Any] = {"build": with_repeats, "no_identity": "it compares what comes next"}
UNCOMMON: dict[str, Any] = {"build": with_uncommon_tokens}
JENSEN_SHANNON: dict[str, Any] = {"direction": "jensen_shannon", "mixture": 0.3}
PROJECTORS = DskdProjectors(student_hidden=5, teacher_hidden=6)
STATES: dict[str, Any] = {
    "kinds": ("hidden",),
    "build": with_learning_states,
    "reads_logits": False,
    "no_identity": "its projection does not carry over exactly",
    "no_finite_difference": "it reads no logits",
}


def case(name: str, known: dict[str, Any] | None = None, /, **options: Any) -> ObjectiveCase:
    """An objective with ``options``, of which ``known`` is so."""
    return ObjectiveCase(name=name, options=options, **(known or {}))


CASES: dict[str, ObjectiveCase] = {
    "next_token": case(
        "next_token", {"over": "tokens", "kinds": (), "no_identity": "it has no teacher"}
    ),
    "vocab_kl": case("vocab_kl", ONE_TOKENIZER, temperature=1.5),
    "vocab_kl reverse": case("vocab_kl", TOP_K | ONE_TOKENIZER, direction="reverse"),
    "vocab_kl jensen-shannon": case("vocab_kl", TOP_K | ONE_TOKENIZER, **JENSEN_SHANNON),
    "strict_topk": case("strict_topk", TOP_K, top_k=5),
    "strict_topk at another temperature": case("strict_topk", top_k=5, temperature=1.5),
    "strict_topk reverse": case("strict_topk", TOP_K, top_k=5, direction="reverse"),
    "strict_topk renormalised": case("strict_topk", TOP_K, top_k=5, tail="renormalise"),
    "strict_topk jensen-shannon of every shared token": case(
        "strict_topk", TOP_K, direction="jensen_shannon"
    ),
    "alm": case("alm", LIKELIHOODS),
    "alm without debiasing": case("alm", LIKELIHOODS, debias=False),
    "alm merged up to likely boundaries": case(
        "alm", LIKELIHOODS, merge="likely_boundaries", temperature=1.0
    ),
    "alm merged up to words": case("alm", LIKELIHOODS, merge="words"),
    "alm as cross-entropy": case(
        "alm",
        {**LIKELIHOODS, "no_identity": "it keeps the entropy of the teacher's likelihoods"},
        difference="binary_ce",
    ),
    "alm reverse": case("alm", LIKELIHOODS, difference="reverse_binary_kl"),
    "alm at the limit of the temperature": case(
        "alm", LIKELIHOODS, difference="binary_kl_temp_limit"
    ),
    "alm of absolute differences": case("alm", LIKELIHOODS, difference="abs"),
    "alm of total variation": case("alm", LIKELIHOODS, difference="abs_exp", temperature=20.0),
    "alm of Renyi's divergence": case("alm", LIKELIHOODS, difference="renyi"),
    "alm of squared log-ratios": case("alm", LIKELIHOODS, difference="joschu_k2"),
    "alm of exponential log-ratios": case("alm", LIKELIHOODS, difference="joschu_k3"),
    "partition_kl": case("partition_kl", COMPLETED, temperature=1.5),
    "partition_kl reverse": case("partition_kl", COMPLETED, direction="reverse", chain_weight=0.5),
    "partition_kl jensen-shannon": case("partition_kl", COMPLETED, **JENSEN_SHANNON),
    "byte_prefix": case("byte_prefix", PREFIXES),
    "byte_prefix reverse": case(
        "byte_prefix", PREFIXES | SMOOTHED, direction="reverse", smoothing=0.01
    ),
    "byte_prefix jensen-shannon": case("byte_prefix", PREFIXES, **JENSEN_SHANNON),
    "sampled_kl": case("sampled_kl", LIKELIHOODS | CONSTANT_SIGNAL),
    "sampled_kl of samples": case(
        "sampled_kl",
        LIKELIHOODS | CONSTANT_SIGNAL | {"build": with_samples},
        most_ratio=1.2,
        most_signal=2.0,
    ),
    "mined": case("mined", temperature=1.5),
    "mined with copies": case("mined", sharing="copy"),
    "mined reverse": case("mined", direction="reverse"),
    "dskd": case(
        "dskd",
        {**HIDDEN, "no_identity": "its projected logits are held to the labels"},
        projectors=PROJECTORS,
        gate="none",
    ),
    "dskd at chunk starts to the teacher's tokens": case(
        "dskd",
        {**HIDDEN, "no_identity": "its projected logits are held to the teacher's first choice"},
        projectors=PROJECTORS,
        positions="chunk_starts",
        target="teacher",
        gate="none",
        direction="reverse",
    ),
    "dskd with the distance of hidden states": case(
        "dskd",
        {**HIDDEN, "no_identity": "its projectors do not carry over exactly"},
        projectors=PROJECTORS,
        positions="chunk_starts",
        gate="none",
        hidden_distance="mse",
        hidden_weight=0.3,
    ),
    "dskd with the angle of hidden states": case(
        "dskd",
        {**HIDDEN, "no_identity": "its projectors do not carry over exactly"},
        projectors=PROJECTORS,
        gate="none",
        hidden_distance="cosine",
        student_space_weight=0.5,
    ),
    "hidden_mse": case(
        "hidden_mse", STATES, projectors=StateProjectors(student_hidden=5, teacher_hidden=6)
    ),
    "hidden_mse relative to the teacher's states": case(
        "hidden_mse",
        STATES,
        projectors=StateProjectors(student_hidden=5, teacher_hidden=6, seed=1),
        relative=True,
    ),
    "hidden_cosine": case(
        "hidden_cosine", STATES, projectors=StateProjectors(student_hidden=5, teacher_hidden=6)
    ),
    "projected_kl": case("projected_kl", temperature=1.5),
    "projected_kl reverse": case("projected_kl", direction="reverse"),
    "projected_kl jensen-shannon": case("projected_kl", **JENSEN_SHANNON),
    "projected_kl on the teacher's top tokens": case("projected_kl", vocab_topk=4, temperature=1.5),
    "projected_kl with repeats": case("projected_kl", REPEATS, repeat_weight=2.0, temperature=1.5),
    "projected_kl jensen-shannon with repeats": case(
        "projected_kl", REPEATS, repeat_weight=0.5, **JENSEN_SHANNON
    ),
    "gold": case("gold", UNCOMMON, temperature=1.5),
    "gold reverse, over the largest uncommon": case(
        "gold", UNCOMMON, direction="reverse", uncommon_topk=3
    ),
    "gold jensen-shannon": case("gold", UNCOMMON, direction="jensen_shannon", uncommon_weight=0.5),
    "hybrid_kl": case("hybrid_kl", UNCOMMON),
    "hybrid_kl of one vocabulary": case("hybrid_kl"),
    "uld": case("uld", temperature=1.5),
    "uld over the largest": case("uld", top_u=5),
    "uld by position": case("uld", {"over": "tokens"}, alignment="position", top_u=None),
}
"""Readable id -> case. An objective has a row for each option that changes its formula."""

IN_ONE_TERM = (
    *("vocab_kl reverse", "strict_topk reverse", "strict_topk renormalised", "alm reverse"),
    *("alm at the limit of the temperature", "alm of absolute differences"),
    *("alm of Renyi's divergence", "alm of squared log-ratios", "alm of exponential log-ratios"),
    *("partition_kl reverse", "byte_prefix reverse", "mined reverse", "projected_kl reverse"),
    *("dskd with the angle of hidden states", "gold reverse, over the largest uncommon"),
    *("alm merged up to likely boundaries", "gold jensen-shannon"),
)
"""Cases that differ from another one in the divergence of two numbers alone, which
``tests/ops/test_divergence.py`` holds to its definition and ``tests/guards`` to what it was."""
CHOSEN = [name for name in CASES if EVERY_COMBINATION or name not in IN_ONE_TERM]


def in_precision(holder: Any, dtype: torch.dtype) -> Any:
    """The same inputs or targets with their floating-point tensors in ``dtype``, off the graph."""
    tensors = {part.name: getattr(holder, part.name) for part in fields(holder)}
    changed = {
        name: value.detach().to(dtype)
        for name, value in tensors.items()
        if torch.is_tensor(value) and value.is_floating_point()
    }
    return replace(holder, **changed)


def as_kind(inputs: DistillationInputs, kind: TargetKind, top_k: int) -> DistillationInputs:
    """The same unsharded teacher, given as logits, in another form."""
    teacher = inputs.teacher
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
