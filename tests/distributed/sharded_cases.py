"""Everything vocab-parallel on one rank, for ``test_sharding.py`` to put together again."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_ext.distributed import shard_collectives as collectives
from megatron_ext.distributed import vocab_parallel as vp
from megatron_ext.losses import (
    LOSS_REGISTRY,
    DistillationInputs,
    NextTokenLoss,
    Objective,
    TargetKind,
)
from megatron_ext.losses.fused_evaluation import evaluate_together, fuses
from megatron_ext.losses.multi_teacher import averaged_inputs
from megatron_ext.ops.selected_tokens import evaluate_selected_tokens
from megatron_ext.ops.top_columns import top_columns, top_log_probs
from tests.distributed.sharded_inputs import (
    PADDING,
    Case,
    completed,
    hidden_states,
    learned_projection,
    prefixed,
    repeating,
    replicated,
    with_boundaries,
)
from tests.losses.microbatch import Microbatch, columns
from tests.losses.objective_cases import as_kind
from tests.ops.kernel_case import vocab_shard

ONE_TOKENIZER: dict[str, Any] = {"vocabs": (37, 37), "lengths": (8, 8)}
"""Sizes of a batch in which both models read the same tokens."""

Result = dict[str, tuple[list[torch.Tensor], torch.Tensor]]
"""Name -> (what is replicated, this rank's columns)."""


def every_size(rank: int, sizes: tuple[int, ...]) -> tuple[dict[int, Result], dict[str, list[str]]]:
    """The cases on the last ranks, as many as each size, and the collectives of all of them."""
    ranks = dist.get_world_size()
    results = {}
    for size in sizes:
        group = dist.new_group(list(range(ranks - size, ranks)))
        if rank >= ranks - size:
            results[size] = cases(rank - (ranks - size), size, group)
    return results, collectives_of(rank, ranks)


def cases(rank: int, ranks: int, group: Any) -> Result:
    results: Result = {}
    for name, case in CASES.items():
        results[name] = case(rank, ranks, group)
    return results


def _log_softmax(rank: int, ranks: int, group: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """A loss that weights every column, summed shard by shard."""
    full = Microbatch.random().student_logits
    valid = torch.arange(37) % 5 != 2
    shard = vocab_shard(37, PADDING[0], rank, ranks, group)
    logits = columns(full, shard).requires_grad_()
    kept = torch.zeros(shard.width, dtype=torch.bool)
    kept[: shard.valid_width] = valid[shard.start : shard.stop]
    log_probs = vp.log_softmax(logits, shard, temperature=1.5, valid=kept)
    weights = torch.sin(torch.arange(shard.start, shard.stop, dtype=torch.float32))
    local = torch.where(kept, log_probs * weights, 0.0).sum()
    loss = collectives.sum_over_shards(local, group).square()
    (grad,) = torch.autograd.grad(loss, logits)
    return [loss.detach()], grad


def _copy_to_shards(rank: int, ranks: int, group: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """A replicated vector against each shard's columns of a matrix."""
    full = Microbatch.random().teacher_logits
    shard = vocab_shard(23, PADDING[1], rank, ranks, group)
    matrix = columns(full, shard)[..., : shard.valid_width]
    vector = torch.linspace(-1, 1, full.shape[1]).requires_grad_()
    copied = collectives.copy_to_shards(vector, group)
    loss = collectives.sum_over_shards((copied[:, None] * matrix).square().sum(), group)
    (grad,) = torch.autograd.grad(loss, vector)
    return [loss.detach(), grad], matrix.new_zeros(1, 0)


def _argmax(rank: int, ranks: int, group: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Ties across shards, and rows of -inf."""
    full = Microbatch.random().student_logits.flatten(0, 1).round()
    full[0] = -torch.inf
    shard = vocab_shard(37, PADDING[0], rank, ranks, group)
    return [vp.vocab_argmax(columns(full, shard), shard)], full.new_zeros(1, 0)


def _selected(rank: int, ranks: int, group: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Negative logits, with all columns of the second of four shards and no other selected."""
    full = Microbatch.random().student_logits.flatten(0, 1).round() - 50.0
    ids = torch.arange(13, 26).expand(len(full), 13)
    shard = vocab_shard(37, PADDING[0], rank, ranks, group)
    found = evaluate_selected_tokens(columns(full, shard), ids, shard, with_top_column=True)
    assert found.top_column is not None
    return [found.log_prob, found.top_column], full.new_zeros(1, 0)


def _objective(
    name: str,
    *,
    chunks: int = 4,
    shift: float = 0.0,
    is_rounded: bool = False,
    same_tokenizer: bool = False,
    padding: tuple[int, int] = PADDING,
    kind: TargetKind = "logits",
    slice_elements: int | None = None,
    more: Callable[[Microbatch, DistillationInputs], DistillationInputs] | None = None,
    has_labels: bool = False,
    **options: Any,
) -> Case:
    """An objective with ``options``, and with ``has_labels`` the cross-entropy in its pass;
    ``more`` adds to the inputs that are made of a batch."""

    def run(rank: int, ranks: int, group: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        sizes = ONE_TOKENIZER if same_tokenizer else {}
        batch = Microbatch.random(chunks=chunks, **sizes)
        batch.student_logits.add_(shift)
        if is_rounded:
            batch.student_logits.round_()
            batch.teacher_logits.round_()
        inputs = batch.inputs(rank=rank, ranks=ranks, group=group, padding=padding)
        if more is not None:
            inputs = more(batch, inputs)
        if kind == "topk":
            whole = as_kind(batch.inputs(), kind, top_k=9).teacher
            inputs = replace(inputs, teacher=replace(whole, shard=inputs.teacher.shard))
        elements = slice_elements or vp.SLICE_ELEMENTS["cpu"]
        objective = LOSS_REGISTRY[name](**options)
        with patch.dict(vp.SLICE_ELEMENTS, cpu=elements):
            if has_labels:
                return _with_labels(objective, inputs, batch.student_logits.argmax(dim=-1))
            output = objective(inputs)
            (grad,) = torch.autograd.grad(output.loss_sum, inputs.student_logits)
        return replicated(output), grad

    return run


def _with_labels(
    objective: Objective, inputs: DistillationInputs, likeliest: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """With the likeliest token as every second label, so that some are met."""
    labels = inputs.labels.clone()
    labels[:, ::2] = likeliest[:, ::2].where(labels[:, ::2] >= 0, labels[:, ::2])
    inputs = replace(inputs, labels=labels)
    logits = inputs.student_logits.detach()
    assert fuses(objective, inputs)
    gradient = torch.empty_like(logits).flatten(0, 1)
    found = evaluate_together(
        {"kd": objective, "ce": NextTokenLoss()},
        {"kd": 0.7, "ce": 0.3},
        replace(inputs, student_logits=logits),
        gradient=gradient,
    )
    return replicated(found["kd"]) + replicated(found["ce"]), gradient.view_as(logits)


_likelihoods = partial(_objective, "alm", more=with_boundaries)
_partition = partial(_objective, "partition_kl", more=completed)
_prefixes = partial(_objective, "byte_prefix", more=prefixed)
_repeats = partial(_objective, "projected_kl", more=repeating, repeat_weight=0.7)


def _average(rank: int, ranks: int, group: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Vocabulary KL to the average of two teachers, each with padding of its own."""
    batches = [Microbatch.random(seed=seed, **ONE_TOKENIZER) for seed in (0, 1)]
    taught = [
        batch.inputs(rank=rank, ranks=ranks, group=group, padding=(15, padding))
        for batch, padding in zip(batches, (5, 91), strict=True)
    ]
    inputs = {
        name: replace(taught[0], teacher=each.teacher, projection=None)
        for name, each in zip("ab", taught, strict=True)
    }
    output = LOSS_REGISTRY["vocab_kl"]()(averaged_inputs(inputs, [0.5, 2.0]))
    (grad,) = torch.autograd.grad(output.loss_sum, taught[0].student_logits)
    return replicated(output), grad


def _top_columns(rank: int, ranks: int, group: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Ties within and across shards, some columns left out, more asked for than there are."""
    full = Microbatch.random().student_logits.flatten(0, 1).round()
    shard = vocab_shard(37, PADDING[0], rank, ranks, group)
    allowed = torch.arange(shard.start, shard.stop) % 5 != 2
    excluded = shard.excluded_columns(full.device, allowed)
    found = [top_columns(columns(full, shard), k, shard, excluded) for k in (1, 6, 40)]
    return found, full.new_zeros(1, 0)


def _top_log_probs(rank: int, ranks: int, group: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Ties within and across shards, and the whole vocabulary."""
    full = Microbatch.random().student_logits.flatten(0, 1).round()
    shard = vocab_shard(37, PADDING[0], rank, ranks, group)
    found = [top_log_probs(columns(full, shard), k, shard) for k in (1, 6, 37)]
    return [part for top in found for part in (top.token_id, top.log_prob)], full.new_zeros(1, 0)


CASES: dict[str, Case] = {
    "log-softmax": _log_softmax,
    "copy to shards": _copy_to_shards,
    "argmax": _argmax,
    "all tokens of a shard selected": _selected,
    "next token": _objective("next_token"),
    # exp(-300) is zero in fp32: the shard of padding alone must not set the peak.
    "next token of very negative logits": _objective("next_token", shift=-300.0),
    "forward projected KL": _objective("projected_kl", temperature=1.4),
    "reverse projected KL": _objective("projected_kl", direction="reverse"),
    "Jensen-Shannon projected KL": _objective("projected_kl", direction="jensen_shannon"),
    "projected KL on the top tokens": _objective("projected_kl", vocab_topk=7),
    "projected KL with repeats": _repeats(temperature=1.4, chunks=6),
    "reverse projected KL with repeats": _repeats(direction="reverse", chunks=6),
    "projected KL with repeats without chunks": _repeats(chunks=0),
    # Of four ranks the student has 13 columns each and the teacher 11, 32 and 13.
    "forward vocabulary KL": _objective("vocab_kl", same_tokenizer=True, temperature=1.4),
    # Differences of logarithms lose digits; at this temperature none are large.
    "reverse vocabulary KL": _objective(
        "vocab_kl", same_tokenizer=True, padding=(15, 91), direction="reverse", temperature=3.0
    ),
    "Jensen-Shannon divergence over the vocabulary": _objective(
        "vocab_kl",
        same_tokenizer=True,
        padding=(15, 15),
        direction="jensen_shannon",
        temperature=3.0,
    ),
    "vocabulary KL to the average of teachers": _average,
    "vocabulary KL to top-k targets": _objective("vocab_kl", same_tokenizer=True, kind="topk"),
    "strict top-k": _objective("strict_topk", top_k=3),
    "strict top-k, renormalised": _objective("strict_topk", top_k=30, tail="renormalise"),
    "strict top-k of top-k targets": _objective("strict_topk", top_k=3, kind="topk"),
    "strict top-k without chunks": _objective("strict_topk", chunks=0),
    "top columns of equal logits": _top_columns,
    "top log-probabilities of equal logits": _top_log_probs,
    "projected KL without chunks": _objective("projected_kl", chunks=0),
    # With collectives in each.
    "projected KL in slices": _objective("projected_kl", slice_elements=160),
    "projected KL as nemo": _objective("projected_kl", numerics="nemo", vocab_topk=8),
    "reverse projected KL as nemo": _objective(
        "projected_kl", numerics="nemo", direction="reverse", temperature=1.4
    ),
    "gold": _objective("gold", temperature=1.4),
    "reverse gold": _objective("gold", direction="reverse", uncommon_topk=4),
    "Jensen-Shannon gold": _objective("gold", direction="jensen_shannon"),
    "gold without chunks": _objective("gold", chunks=0),
    "gold in slices": _objective("gold", uncommon_topk=4, slice_elements=160),
    "gold with labels": _objective("gold", has_labels=True),
    "gold with labels at another temperature": _objective(
        "gold", direction="reverse", temperature=1.4, has_labels=True
    ),
    "gold as nemo": _objective("gold", numerics="nemo", uncommon_topk=4),
    # Its gradient is a difference of larger terms, in fp32 by autograd; less so when softened.
    "reverse hybrid KL as nemo": _objective(
        "hybrid_kl", numerics="nemo", direction="reverse", temperature=3.0
    ),
    "uld": _objective("uld", temperature=1.4),
    "uld over the largest": _objective("uld", top_u=3),
    # Many equal probabilities, in different shards.
    "uld of tied logits": _objective("uld", top_u=9, is_rounded=True),
    "uld by position": _objective("uld", alignment="position"),
    "uld by position with labels": _objective("uld", alignment="position", has_labels=True),
    "uld with labels": _objective("uld", temperature=1.4, has_labels=True),
    "strict top-k with labels": _objective(
        "strict_topk", top_k=4, has_labels=True, is_rounded=True, shift=-50.0
    ),
    "vocabulary KL to top-k targets with labels": _objective(
        "vocab_kl", same_tokenizer=True, kind="topk", has_labels=True
    ),
    "alm": _likelihoods(),
    "alm with labels": _likelihoods(has_labels=True),
    "alm without chunks": _likelihoods(chunks=0),
    "alm merged up to words": _likelihoods(merge="words", difference="reverse_binary_kl"),
    "alm merged up to likely boundaries": _likelihoods(
        merge="likely_boundaries", boundary_threshold=0.4
    ),
    "mined": _objective("mined", temperature=1.4),
    "mined with copies": _objective("mined", sharing="copy"),
    "mined without chunks": _objective("mined", chunks=0),
    "dskd": hidden_states(gate="none"),
    "dskd without chunks": hidden_states(chunks=0, from_heads=True),
    "dskd from heads": hidden_states(
        from_heads=True, positions="chunk_starts", target="teacher", direction="reverse"
    ),
    "dskd with the distance of hidden states": hidden_states(gate="none", hidden_distance="mse"),
    "dskd with the angle of hidden states": hidden_states(gate="none", hidden_distance="cosine"),
    "partition KL": _partition(temperature=1.4),
    "reverse partition KL": _partition(direction="reverse", chain_weight=0.5),
    "Jensen-Shannon partition KL": _partition(direction="jensen_shannon"),
    "partition KL in slices": _partition(slice_elements=60),
    "partition KL without chunks": _partition(chunks=0),
    "partition KL to top-k targets": _partition(kind="topk"),
    "partition KL with labels": _partition(
        temperature=1.4, has_labels=True, is_rounded=True, shift=-50.0
    ),
    "byte prefixes": _prefixes(temperature=1.4),
    "byte prefixes with labels": _prefixes(has_labels=True, is_rounded=True, shift=-50.0),
    "reverse byte prefixes": _prefixes(direction="reverse", smoothing=0.01),
    "Jensen-Shannon byte prefixes": _prefixes(direction="jensen_shannon"),
    "byte prefixes in slices": _prefixes(slice_elements=60),
    "byte prefixes without chunks": _prefixes(chunks=0),
    "learned projection": learned_projection,
}

COUNTED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "next_token": ("next_token", 4, {}),
    "projected_kl": ("projected_kl", 4, {}),
    "projected_kl without chunks": ("projected_kl", 0, {}),
    "projected_kl as nemo": ("projected_kl", 4, {"numerics": "nemo"}),
    "projected_kl with repeats": ("projected_kl", 4, {"repeat_weight": 1.0}),
    "gold": ("gold", 4, {}),
    "gold without chunks": ("gold", 0, {}),
    "gold as nemo": ("gold", 4, {"numerics": "nemo"}),
    "uld": ("uld", 4, {}),
    "vocab_kl": ("vocab_kl", 4, {}),
    "vocab_kl over another cut": ("vocab_kl", 4, {}),
    "strict_topk": ("strict_topk", 4, {}),
    "strict_topk without chunks": ("strict_topk", 0, {}),
    "mined": ("mined", 4, {}),
    "mined without chunks": ("mined", 0, {}),
    "partition_kl": ("partition_kl", 4, {}),
    "partition_kl without chunks": ("partition_kl", 0, {}),
    "byte_prefix": ("byte_prefix", 4, {}),
    "byte_prefix without chunks": ("byte_prefix", 0, {}),
}
"""Label -> objective, chunks and options, whose collectives are counted."""


def collectives_of(rank: int, size: int) -> dict[str, list[str]]:
    """The collectives of each objective's forward and backward, in order."""
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return call

    group, made = dist.new_group(list(range(size))), {}
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all_single")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(dist, name, counted(name)))
        for label, (name, chunks, options) in COUNTED.items():
            sizes = ONE_TOKENIZER if name == "vocab_kl" else {}
            batch = Microbatch.random(chunks=chunks, **sizes)
            padding = (0, 8) if label.endswith("another cut") else (0, 0)
            inputs = batch.inputs(rank=rank, ranks=size, group=group, padding=padding)
            if name == "partition_kl":
                inputs = completed(batch, inputs)
            if name == "byte_prefix":
                inputs = prefixed(batch, inputs)
            if label.endswith("repeats"):
                inputs = repeating(batch, inputs)
            output = LOSS_REGISTRY[name](**options)(inputs)
            forward = len(calls)
            output.loss_sum.backward()
            made[f"{label} forward"] = calls[:forward]
            made[f"{label} backward"] = calls[forward:]
            calls.clear()
    return made
