"""Likelihoods of tokens and of sets of tokens under two models, and the student's gradient.

T rows, Vp local columns. Equations are in the README.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    accumulation_dtype,
    merge_log_sum_exp,
    row_slices,
    scaled_logits,
)
from megatron_ext.ops.chunk_rows import ExpSums, merge_top_columns, token_log_probs
from megatron_ext.ops.labels import label_rows
from megatron_ext.ops.launch import (
    ROW_CONFIGS,
    Implementation,
    LaunchConfig,
    check_implementation,
    fitting_config,
    launch_rows,
    small_block,
    uses_compiled,
    uses_triton,
)
from megatron_ext.ops.softmax_statistics import row_statistics

_BLOCK: Final = 1024
"""Rows of a program that needs no logits."""


class RowGradient(NamedTuple):
    """Upstream gradients and normalisers of each row, [T] each."""

    column: torch.Tensor
    """int64: this rank's column of the token, -1 where another rank has it."""

    on_token: torch.Tensor
    """Gradient of the token's log-probability."""

    whole: LogSumExp
    """Log-sum-exp over all columns of all shards."""

    on_mass: torch.Tensor | None = None
    """Gradient of the set's log-mass; None: there is no set."""

    members: LogSumExp | None = None
    """Log-sum-exp over the set's columns of all shards."""


def write_token_gradient(
    logits: torch.Tensor,
    members: torch.Tensor | None,
    row: RowGradient,
    shard: VocabShard,
    gradient: torch.Tensor,
    *,
    temperature: float = 1.0,
    written: torch.Tensor | None = None,
    implementation: Implementation = "auto",
) -> None:
    """Write equation (3) of the README into ``gradient`` [T, Vp], which may be ``logits``.

    A row without an upstream gradient gets exactly 0, whatever it holds. No collectives. The kernel
    reads and writes a row once.

    Args:
        logits: [T, Vp], any float dtype, contiguous in its columns.
        members: bool [Vp], the set's columns; None: there is no set.
        written: bool [T]; the gradient of other rows stays as it is. None: all.
    """
    if uses_triton(implementation, logits):
        by = _by_kernel
    elif uses_compiled(implementation, logits, gradient):
        by = _by_loops
    else:
        by = _by_torch
    by(logits, members, row, shard, gradient, temperature, written)


def _by_torch(
    logits: torch.Tensor,
    members: torch.Tensor | None,
    row: RowGradient,
    shard: VocabShard,
    gradient: torch.Tensor,
    temperature: float,
    written: torch.Tensor | None,
) -> None:
    excluded = shard.excluded_columns(logits.device)
    on_token = row.on_token / temperature
    on_mass = torch.zeros_like(on_token) if row.on_mass is None else row.on_mass / temperature
    picked = torch.where(row.column >= 0, on_token, 0.0)[:, None]
    unused = ((on_token == 0) & (on_mass == 0))[:, None]
    total = (on_token + on_mass)[:, None]
    for rows in row_slices(*logits.shape, device=logits.device):
        scaled = scaled_logits(logits[rows], temperature, excluded)
        part = row.whole.normalise_(scaled, rows).exp_().mul_(-total[rows])
        if members is not None and row.members is not None:
            outside = shard.excluded_columns(logits.device, members)
            inside = scaled_logits(logits[rows], temperature, outside)
            shares = row.members.normalise_(inside, rows).exp_().mul_(on_mass[rows, None])
            part.add_(shares.masked_fill_(on_mass[rows, None] == 0, 0.0))
        part.scatter_add_(-1, row.column[rows, None].clamp(min=0), picked[rows])
        part.masked_fill_(unused[rows], 0.0)
        if written is not None:
            # Cast first: what another dtype holds stays to the bit.
            part = torch.where(written[rows, None], part.to(gradient.dtype), gradient[rows])
        gradient[rows] = part


def _by_loops(
    logits: torch.Tensor,
    members: torch.Tensor | None,
    row: RowGradient,
    shard: VocabShard,
    gradient: torch.Tensor,
    temperature: float,
    written: torch.Tensor | None,
) -> None:
    from megatron_ext.ops import row_loops as loops

    on_token = row.on_token / temperature
    on_mass, inside = torch.zeros_like(on_token), row.whole
    is_member = logits.new_zeros(0, dtype=torch.bool)
    if members is not None and row.members is not None and row.on_mass is not None:
        on_mass, inside = row.on_mass / temperature, row.members
        is_member = members[: shard.valid_width]
    arguments = (
        loops.flat_rows(logits, shard.valid_width, temperature),
        loops.normaliser(row.whole),
        (is_member.numpy(), loops.normaliser(inside)),
        (row.column.numpy(), on_token.float().numpy(), on_mass.float().numpy()),
        logits.new_zeros(0, dtype=torch.bool).numpy() if written is None else written.numpy(),
        loops.flat_rows(gradient),
    )
    loops.in_threads(lambda a, b: loops.token_gradient(a, b, *arguments), len(logits))


def _by_kernel(
    logits: torch.Tensor,
    members: torch.Tensor | None,
    row: RowGradient,
    shard: VocabShard,
    gradient: torch.Tensor,
    temperature: float,
    written: torch.Tensor | None,
) -> None:
    from megatron_ext.ops.chunk_kernels import token_gradient_kernel

    rows, padded_width = logits.shape
    has_members = members is not None and row.members is not None and row.on_mass is not None
    vectors = [*row.whole, *(row.members or row.whole), row.on_token]
    vectors.append(row.on_token if row.on_mass is None else row.on_mass)
    if temperature != 1.0:
        vectors[4:] = [vector / temperature for vector in vectors[4:]]
    packed = torch.stack([vector.float() for vector in vectors])

    def launch(config: LaunchConfig, out: torch.Tensor) -> None:
        token_gradient_kernel[(len(out),)](
            logits,
            members,
            packed,
            row.column,
            written,
            out,
            logits.stride(0),
            out.stride(0),
            shard.valid_width,
            padded_width,
            rows,
            temperature,
            HAS_MEMBERS=has_members,
            HAS_TEMPERATURE=temperature != 1.0,
            BLOCK=config.block,
            num_warps=config.num_warps,
        )

    if written is not None:
        # Few as a rule, whose time says nothing of a configuration.
        if logits.numel():
            launch(fitting_config(ROW_CONFIGS[0], padded_width), gradient)
        return
    launch_rows(("token_gradient", logits.dtype, has_members, temperature != 1.0), launch, gradient)


class TokenRows(NamedTuple):
    """One model's rows, with the token and the set of tokens that are asked for."""

    logits: torch.Tensor
    """[T, Vp], any float dtype, contiguous in its columns."""

    token_id: torch.Tensor
    """int64 [T]; negative: not asked."""

    members: torch.Tensor | None
    """bool [Vp], this rank's columns of a set of tokens; None: not asked. Padding is no member."""

    shard: VocabShard


class TokenLikelihood(NamedTuple):
    """Log-probabilities [T], replicated over the group."""

    log_prob: torch.Tensor
    """log p of the row's token; 0 where not asked, NaN beyond the vocabulary."""

    log_mass: torch.Tensor
    """log p of any member of the set, -inf where all of them are masked; 0 where not asked."""

    log_sum: torch.Tensor | None = None
    """Logarithm of the row's sum, asked or not, NaN where the row has NaN or +inf; None where
    likelihoods are given."""


class EvaluatedLikelihood(NamedTuple):
    """Likelihoods of both models, and the normalisers that the student's gradient needs."""

    student: TokenLikelihood
    teacher: TokenLikelihood | None

    whole: LogSumExp
    """[Ts] over all the student's columns."""

    members: LogSumExp
    """[Ts] over the columns of its set; ``whole`` without a set."""

    column: torch.Tensor
    """int64 [Ts]: this rank's column of the student's token, -1 where it has none."""

    top_column: torch.Tensor | None
    """int64 [Ts]: global column of the student's largest logit, the first of equals; None where it
    was not asked for."""


@torch.no_grad()
def evaluate_token_likelihood(
    student: TokenRows,
    teacher: TokenRows | None = None,
    *,
    with_top_column: bool = False,
    implementation: Implementation = "auto",
) -> EvaluatedLikelihood:
    """Log-probabilities of the rows' tokens and log-masses of the models' sets of tokens.

    Each logit is read once for all these numbers, with a peak of its own for the set, so that a
    mass of exp(-1e4) still has its logarithm. fp32, fp64 where the student's logits are.

    Args:
        teacher: None where its likelihoods are known. Its shard has the student's group.
        with_top_column: Compute ``EvaluatedLikelihood.top_column``.

    Collectives: two all-reduces of at most [3 (Ts + Tt)], 24 (Ts + Tt) bytes in fp32; one of [Ts]
    more with the top column.

    Raises:
        LossError: The implementation is unknown or cannot run here.
    """
    check_implementation("token_likelihood", implementation)
    sides = [student] if teacher is None else [student, teacher]
    sums = [1 if side.members is None else 2 for side in sides]
    lengths = [count * len(side.logits) for count, side in zip(sums, sides, strict=True)]
    lengths += [len(side.logits) for side in sides]
    dtype = accumulation_dtype(student.logits.dtype)
    peak, total = student.logits.new_empty(2, sum(lengths), dtype=dtype)
    places = list(map(ExpSums, peak.split(lengths), total.split(lengths)))
    local = [
        _local_sums(side, sets, token, with_top_column and side is student, implementation)
        for side, sets, token in zip(sides, places, places[len(sides) :], strict=False)
    ]
    merged = merge_log_sum_exp(peak, total, student.shard.group)
    normalisers = list(map(LogSumExp, *(part.split(lengths) for part in merged)))
    likelihoods, split = [], []
    for side, sets, token in zip(sides, normalisers, normalisers[len(sides) :], strict=False):
        rows = len(side.logits)
        whole = LogSumExp(*(part[:rows] for part in sets))
        members = LogSumExp(*(part[len(part) - rows :] for part in sets))
        likelihoods.append(_likelihood(side, token, whole, members, implementation))
        split.append((whole, members))
    top_column = None
    if with_top_column:
        own = ExpSums(*(part[: len(student.logits)] for part in places[0]))
        (top_column,) = merge_top_columns([local[0][1]], [own], [split[0][0]], [student.shard])
    other = likelihoods[1] if teacher is not None else None
    return EvaluatedLikelihood(likelihoods[0], other, *split[0], local[0][0], top_column)


def _local_sums(
    side: TokenRows,
    sets: ExpSums,
    token: ExpSums,
    with_top_column: bool,
    implementation: Implementation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill the sums over all columns and over the set, and the token's; returns the columns of the
    token, and of the largest logit if it is asked for."""
    statistics = row_statistics(
        side.logits,
        side.shard,
        members=side.members,
        with_column=with_top_column,
        into=sets,
        implementation=implementation,
    )
    looked_up = label_rows(
        side.logits.detach(), side.token_id, side.shard, 1.0, token, implementation=implementation
    )
    return looked_up.column, statistics.column


def _likelihood(
    side: TokenRows,
    token: LogSumExp,
    whole: LogSumExp,
    members: LogSumExp,
    implementation: Implementation,
) -> TokenLikelihood:
    """Log-probabilities of a model's rows from merged sums. By kernel one launch."""
    if token.peak.dtype != torch.float32 or not uses_triton(implementation, token.peak):
        log_prob = token_log_probs(token, whole, side.token_id, side.shard)
        log_mass = torch.zeros_like(log_prob)
        if side.members is not None:
            log_mass = (members.peak - whole.peak).add_(members.log_sum).sub_(whole.log_sum)
        return TokenLikelihood(log_prob, log_mass, whole.log_sum)
    from megatron_ext.ops.likelihood_kernels import token_likelihoods_kernel

    rows = len(side.token_id)
    log_prob, log_mass = token.peak.new_empty(2, rows)
    if rows:
        block = small_block(rows, _BLOCK)
        token_likelihoods_kernel[(-(-rows // block),)](
            *token,
            *whole,
            *members,
            side.token_id.contiguous(),
            side.shard.vocab_size,
            rows,
            log_prob,
            log_mass,
            HAS_MEMBERS=side.members is not None,
            BLOCK=block,
        )
    return TokenLikelihood(log_prob, log_mass, whole.log_sum)


def write_likelihood_gradient(
    student: TokenRows,
    found: EvaluatedLikelihood,
    on_token: torch.Tensor,
    on_mass: torch.Tensor,
    gradient: torch.Tensor,
    *,
    implementation: Implementation = "auto",
) -> None:
    """Write d(on_token . log_prob + on_mass . log_mass)/d logits into ``gradient`` [Ts, Vp].

    ``gradient`` may be the logits themselves. Rows without an upstream gradient get exactly 0,
    whatever they hold. No collectives.

    Args:
        found: Of these rows.
        on_token: [Ts], ignored where the token is not asked.
        on_mass: [Ts], ignored where the set is not asked.
    """
    arrives = RowGradient(
        found.column,
        on_token.masked_fill(student.token_id < 0, 0.0),
        found.whole,
        None if student.members is None else on_mass,
        None if student.members is None else found.members,
    )
    write_token_gradient(
        student.logits.detach(),
        student.members,
        arrives,
        student.shard,
        gradient,
        implementation=implementation,
    )


def token_likelihood_reference(
    logits: torch.Tensor, token_id: torch.Tensor, members: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense log p [T] of ``token_id``, 0 where it is negative, and of ``members`` bool [V]."""
    log_probs = torch.log_softmax(logits, dim=-1)
    picked = log_probs.gather(-1, token_id.clamp(min=0)[:, None])[:, 0]
    return torch.where(token_id >= 0, picked, 0.0), torch.logsumexp(log_probs[:, members], dim=-1)
