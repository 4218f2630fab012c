"""Value and gradient of the partition KL without a graph.

T rows, Vp local columns, C singles, H chains, R rows and N chosen columns of chains. Equations and
memory are in the README.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard
from megatron_ext.errors import LossError
from megatron_ext.ops.chunk_rows import ExpSums, merge_exp_sums, merge_top_columns
from megatron_ext.ops.labels import LabelRows, LabelTerm, label_losses, label_rows
from megatron_ext.ops.launch import Implementation, uses_compiled, uses_triton
from megatron_ext.ops.partition_kl.chain_chunks import (
    ChainGradient,
    ChosenLogits,
    compare_chains,
    compare_chains_by_kernel,
    write_other_rows_,
    write_other_rows_by_kernel_,
)
from megatron_ext.ops.partition_kl.chain_masses import ChosenColumns, RowMasses
from megatron_ext.ops.partition_kl.kernel_numbers import (
    SideSums,
    SplitRows,
    chain_logits,
    single_agreement,
    single_norms,
    split_by_kernel,
    whole_rows,
)
from megatron_ext.ops.partition_kl.operands import (
    EventComparison,
    PartitionPlan,
    PartitionValues,
)
from megatron_ext.ops.partition_kl.single_chunks import (
    PartitionNorm,
    SingleChunks,
    partition_norm,
    single_divergences,
    single_divergences_by_kernel,
    single_divergences_by_loops,
)
from megatron_ext.ops.partition_kl.split_statistics import (
    RowSplit,
    SplitStatistics,
    split_statistics,
)


@torch.no_grad()
def evaluate_partition_kl(
    student_logits: torch.Tensor,
    teacher: torch.Tensor | RowMasses,
    plan: PartitionPlan,
    *,
    grad_scale: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    ce_weight: torch.Tensor | float = 1.0,
    gradient: torch.Tensor | None = None,
    chain_masses: RowMasses | None = None,
    told: Sequence[torch.Tensor | bool] = (),
    implementation: Implementation = "auto",
) -> PartitionValues:
    """D(P_c || Q_c) of each chunk, and d(sum grad_scale * D + sum ce_weight * CE)/d student_logits.

    Args:
        student_logits: [Ts, Vps], any float dtype, contiguous in its columns.
        teacher: Logits [Tt, Vpt], any float dtype, contiguous in its columns. Or the teacher's
            log-masses at the rows of the chains, the same on every rank; then there are no singles.
        grad_scale: [C + H] upstream gradient of each divergence, of the singles and then of the
            chains; a chunk at 0 gets none, whatever its rows hold. None: 1.
        labels: int64 [Ts]: cross-entropy of these tokens is evaluated too, at temperature 1;
            negative for none. One beyond the vocabulary gives NaN.
        ce_weight: fp32 [Ts] upstream gradient of each cross-entropy, likewise, or that of all.
            Ignored without ``labels``.
        gradient: [Ts, Vps], overwritten in its dtype; can be ``student_logits`` itself. None: no
            gradient is computed.
        chain_masses: The teacher's log-masses at the rows of the chains, where its logits are
            those of the singles alone.
        told: bool [Ts], and [Tt] of logits: rows of which ``PartitionValues.bad`` has to tell, even
            if they belong to no chunk; () for none. With ``labels`` all of the student's are.
        implementation: See ``ops.launch``.

    Accumulates in fp32 (fp64 for fp64 logits). No fp32 tensor is as large as the logits.
    Collectives on the shards' group, as many on every rank: two all-reduces of the statistics of
    both models' rows and of N chosen logits and Ts labels, side by side; one of [2 C] columns of
    the most probable events; with ``labels`` one of [Ts] for the largest columns; and for each
    slice of C' singles one all-reduce of [2, C'] and, where shared tokens cross ranks, an
    all-to-all of those. By kernel, forward KL with a gradient takes an all-reduce of [C'] more.

    Raises:
        LossError: Columns are not contiguous, or kernels were asked for and cannot run.
    """
    singles, temperature = plan.singles, plan.options.temperature
    given = [student_logits.detach()]
    if isinstance(teacher, torch.Tensor):
        given.append(teacher.detach())
    _check_columns(given)
    by: Implementation = "torch"
    if uses_triton(implementation, *given):
        by = "triton"
    elif uses_compiled(implementation, *given):
        by = "cpu"
    masses = teacher if isinstance(teacher, RowMasses) else chain_masses
    asked: list[torch.Tensor | bool] = [*told, *[False] * (len(given) - len(told))]
    labelled = None if labels is None else (labels, ce_weight)
    models = [_Model.read(given[0], plan, asked[0], is_student=True, labelled=labelled, by=by)]
    models += [
        _Model.read(
            logits, plan, read, is_student=False, has_chains=masses is None, labelled=None, by=by
        )
        for logits, read in zip(given[1:], asked[1:], strict=True)
    ]
    merged = _merge(models, plan)
    tokens, token_loss = _token_term(models[0], merged[0], labels, plan.student_shard, by)

    count = len(singles.student)
    first = second = None
    if grad_scale is not None:
        first, second = grad_scale[:count], grad_scale[count:]
    if len(models) == 2:
        norms = None
        if by == "triton":
            own, its = (
                SideSums(sums.members, sums.others, model.statistics.column)
                for sums, model in zip(merged, models, strict=True)
            )
            norms = single_norms(own, its, plan)
            sides = _norms_of(norms.numbers)
        else:
            sides = (
                _norm(merged[0], singles.student, temperature),
                _norm(merged[1], singles.teacher, temperature),
            )
        pair = SingleChunks(
            given[0], given[1], plan, *sides, models[0].statistics.is_masked, tokens, norms
        )
        agreement = _agreement(models, merged, pair)
        divergences = {
            "triton": single_divergences_by_kernel,
            "cpu": single_divergences_by_loops,
        }.get(by, single_divergences)
        single = EventComparison(
            divergences(pair, first, gradient),
            pair.student.log_rest.exp() if norms is None else norms.numbers[6],
            pair.teacher.log_rest.exp() if norms is None else norms.numbers[11],
            agreement,
        )
    else:
        none = merged[0].members.peak[:0]
        single = EventComparison(none, none, none, none.bool())

    compare = _chains_by_kernel if by == "triton" else _chains
    chain = compare(models, merged, masses, plan, second, tokens, given[0], gradient)
    return PartitionValues(
        single,
        chain,
        token_loss,
        _top_column(models[0], tokens, plan.student_shard),
        lambda: _told(merged, tokens),
    )


def _chains(
    models: list[_Model],
    merged: list[_Merged],
    masses: RowMasses | None,
    plan: PartitionPlan,
    grad_scale: torch.Tensor | None,
    tokens: LabelTerm | None,
    logits: torch.Tensor,
    gradient: torch.Tensor | None,
) -> EventComparison:
    """Comparison of the chains, and the gradient of all rows but singles'."""
    chosen = [
        ChosenLogits.of(sums.picked, sums.at_chains(model), model.split.chosen)
        for sums, model in zip(merged, models, strict=True)
    ]
    teacher = chosen[1] if masses is None else masses
    with_gradient = gradient is not None
    chain, grads = compare_chains(chosen[0], teacher, plan, grad_scale, with_gradient=with_gradient)
    if gradient is not None:
        rest = merged[0].at_chains(models[0])
        rows = ChainGradient(models[0].split, rest, grads, merged[0].picked, tokens)
        write_other_rows_(gradient, logits, rows, plan.student_shard)
    return chain


def _chains_by_kernel(
    models: list[_Model],
    merged: list[_Merged],
    masses: RowMasses | None,
    plan: PartitionPlan,
    grad_scale: torch.Tensor | None,
    tokens: LabelTerm | None,
    logits: torch.Tensor,
    gradient: torch.Tensor | None,
) -> EventComparison:
    """``_chains`` by kernels."""
    edges = plan.chains.found_edges()
    plan = plan._replace(chains=plan.chains._replace(edges=edges))
    read = models if masses is None else models[:1]
    sides = [
        chain_logits(
            sums.picked,
            sums.others,
            model.split.chosen,
            edges.completions,
            with_rests=gradient is not None and model is models[0],
        )
        for sums, model in zip(merged, read, strict=False)
    ]
    chosen = [ChosenLogits(side.chosen, side.rest) for side in sides]
    chain, grads = compare_chains_by_kernel(
        chosen[0],
        chosen[1] if masses is None else masses,
        plan,
        grad_scale,
        with_gradient=gradient is not None,
    )
    if gradient is not None:
        split, picked, rests = models[0].split, merged[0].picked, sides[0].rests
        rows = ChainGradient(split, merged[0].others, grads, picked, tokens, rests)
        write_other_rows_by_kernel_(gradient, logits, rows, plan.student_shard)
    return chain


def _check_columns(given: list[torch.Tensor]) -> None:
    for side, logits in zip(("student", "teacher"), given, strict=False):
        if logits.shape[1] > 1 and logits.stride(1) != 1:
            raise LossError(
                f"the {side}'s logits [T, Vp] are not contiguous in their columns",
                got=f"strides {logits.stride()}",
                expected="a last stride of 1",
                fix="call contiguous() on them",
            )


class _Model(NamedTuple):
    """Statistics of one model's rows on this rank."""

    split: RowSplit
    statistics: SplitStatistics
    picked: ExpSums
    """[N]"""
    label: ExpSums | None
    """[T] logit of the label; None for the teacher or without labels."""
    looked_up: LabelRows | None
    unscaled: ExpSums | None
    """[T] members at temperature 1; None where not needed."""

    @classmethod
    def read(
        cls,
        logits: torch.Tensor,
        plan: PartitionPlan,
        told: torch.Tensor | bool,
        *,
        is_student: bool,
        labelled: tuple[torch.Tensor, torch.Tensor | float] | None,
        by: Implementation,
        has_chains: bool = True,
    ) -> _Model:
        side = 0 if is_student else 1
        shard = (plan.student_shard, plan.teacher_shard)[side]
        rows = (plan.chains.student, plan.chains.teacher)[side]
        shared = (plan.shared.student, plan.shared.teacher)[side]
        has_labels = labelled is not None
        read = True if has_labels else told
        picked = None
        if by == "triton":
            part = SplitRows(plan.singles[side], rows, plan.chains, has_chains, shared, shard)
            split, picked = split_by_kernel(logits, part, read)
        else:
            chosen = ChosenColumns.of if has_chains else ChosenColumns.none
            columns = chosen(rows, plan.chains, shard)
            split = RowSplit.of(len(logits), plan.singles[side], shared, columns, read)
        statistics = split_statistics(
            logits,
            split,
            shard,
            temperature=plan.options.temperature,
            for_labels=has_labels,
            by=by,
        )
        if picked is None:
            picked = _picked(logits, split.chosen, statistics.members.peak.dtype)
        label = looked_up = None
        if labelled is not None:
            peak = statistics.members.peak
            label = ExpSums(torch.empty_like(peak), torch.empty_like(peak))
            looked_up = label_rows(
                logits, labelled[0], shard, labelled[1], label, implementation=by
            )
        return cls(
            split,
            statistics,
            picked,
            label,
            looked_up,
            statistics.unscaled if has_labels and plan.options.temperature != 1.0 else None,
        )


def _picked(logits: torch.Tensor, chosen: ChosenColumns, dtype: torch.dtype) -> ExpSums:
    """Logits of the chosen columns [N] as sums of one column each."""
    here = chosen.local >= 0
    picked = logits[chosen.at_rows(), chosen.local.clamp(min=0)].to(dtype)
    return ExpSums(torch.where(here, picked, 0.0), here.to(dtype))


class _Merged(NamedTuple):
    """Statistics of one model's rows over all shards."""

    members: LogSumExp
    """[T] at the temperature."""
    others: LogSumExp
    """[T]"""
    picked: LogSumExp
    """[N]"""
    label: LogSumExp | None
    unscaled: LogSumExp | None

    def at_chains(self, model: _Model) -> LogSumExp:
        """Log-sum-exp at the rows of chains [R], without their chosen columns."""
        row = model.split.chosen.row
        return LogSumExp(self.others.peak[row], self.others.log_sum[row])

    def told(self) -> torch.Tensor:
        """[T], NaN of rows with NaN or +inf in a column of any rank: no sum's logarithm is +inf."""
        return self.members.log_sum + self.others.log_sum

    def whole(self) -> LogSumExp:
        """Log-sum-exp [T] over all columns at temperature 1."""
        members = self.unscaled or self.members
        first, second = (
            part.peak.masked_fill(part.log_sum == -torch.inf, -torch.inf)
            for part in (members, self.others)
        )
        top = torch.maximum(first, second)
        top = top.masked_fill(top == -torch.inf, 0.0)
        parts = (first - top + members.log_sum, second - top + self.others.log_sum)
        return LogSumExp(top, torch.logaddexp(*parts))


def _told(merged: list[_Merged], tokens: LabelTerm | None) -> list[torch.Tensor]:
    """``PartitionValues.bad``; what a row with labels has in all has been added up."""
    if tokens is None:
        return [part.told() for part in merged]
    return [tokens.whole.log_sum, *(part.told() for part in merged[1:])]


def _merge(models: list[_Model], plan: PartitionPlan) -> list[_Merged]:
    """Merge all statistics over the shards; two all-reduces."""
    sums = [
        (
            model.statistics.members,
            model.statistics.others,
            model.picked,
            model.label,
            model.unscaled,
        )
        for model in models
    ]
    dtype = models[0].picked.peak.dtype
    local = [ExpSums(*(x.to(dtype) for x in part)) for own in sums for part in own if part]
    merged = iter(merge_exp_sums(local, plan.student_shard))
    return [
        _Merged(
            next(merged), next(merged), next(merged), *(part and next(merged) for part in own[3:])
        )
        for own in sums
    ]


def _norm(merged: _Merged, rows: torch.Tensor, temperature: float) -> PartitionNorm:
    members, others = (
        LogSumExp(part.peak[rows], part.log_sum[rows]) for part in (merged.members, merged.others)
    )
    return partition_norm(members, others, temperature)


def _norms_of(numbers: torch.Tensor) -> tuple[PartitionNorm, PartitionNorm]:
    """Both models' parts of ``SingleNorms.numbers``."""
    own, its, rest, its_rest = (LogSumExp(*numbers[i : i + 2]) for i in (0, 2, 4, 9))
    student = PartitionNorm(own, rest, numbers[7], numbers[8])
    return student, PartitionNorm(its, its_rest, numbers[12], numbers[13])


def _agreement(models: list[_Model], merged: list[_Merged], pair: SingleChunks) -> torch.Tensor:
    """Chunks with the same most probable event in both models, bool [C]. One all-reduce."""
    plan, norms = pair.plan, pair.norms
    tokens = plan.shared.student_token
    if norms is not None and plan.student_shard.group is None:
        return single_agreement(norms, norms.columns[0], norms.columns[1], tokens)
    sums, wholes, columns = [], [], []
    for model, part, rows in zip(models, merged, plan.singles, strict=True):
        local = model.statistics
        peak = local.members.peak[rows].to(part.members.peak)
        sums.append(ExpSums(peak, local.members.total[rows]))
        wholes.append(LogSumExp(part.members.peak[rows], part.members.log_sum[rows]))
        columns.append(local.column[rows])
    shards = [plan.student_shard, plan.teacher_shard]
    student, teacher = merge_top_columns(columns, sums, wholes, shards)
    if norms is not None:
        return single_agreement(norms, student, teacher, tokens)
    # Without a shared token that has any mass, no column of the vocabulary comes back.
    teacher = tokens[teacher.clamp(max=len(tokens) - 1)]
    is_rest = [side.log_rest > side.best for side in (pair.student, pair.teacher)]
    return torch.where(is_rest[0] | is_rest[1], is_rest[0] & is_rest[1], student == teacher)


def _top_column(
    student: _Model, tokens: LabelTerm | None, shard: VocabShard
) -> torch.Tensor | None:
    """``PartitionValues.top_column``; one all-reduce."""
    column = student.statistics.top_column
    if column is None or tokens is None or shard.group is None:
        return column
    largest = student.statistics.largest()
    return merge_top_columns([column], [largest], [tokens.whole], [shard])[0]


def _token_term(
    student: _Model,
    merged: _Merged,
    labels: torch.Tensor | None,
    shard: VocabShard,
    by: Implementation,
) -> tuple[LabelTerm | None, torch.Tensor | None]:
    """Term of the labels in the gradient, and their cross-entropies [T]."""
    if labels is None:
        return None, None
    assert student.label is not None
    assert student.looked_up is not None
    assert merged.label is not None
    column, weight = student.looked_up.column, student.looked_up.weight
    if by == "triton":
        numbers = whole_rows(merged.unscaled or merged.members, merged.others, weight)
        whole = LogSumExp(numbers[0], numbers[1])
        term = LabelTerm(labels, column, numbers[2], whole, numbers)
    else:
        whole = merged.whole()
        term = LabelTerm(labels, column, weight, whole)
    loss = label_losses(merged.label, whole, labels, None, shard, implementation=by)
    return term, loss
