"""Sorted L1 of probabilities, or of the logits of chunks: value, gradient and dense reference.

T rows, C rows or chunks, Vp local columns, U compared places. Equations and bytes are in the
README.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron_ext.distributed.shard_collectives import all_reduce_sum, group_size
from megatron_ext.distributed.vocab_parallel import row_slices
from megatron_ext.ops.chunk_rows import ChunkedLogits
from megatron_ext.ops.labels import RowLabels
from megatron_ext.ops.launch import (
    Implementation,
    check_implementation,
    uses_triton,
    without_kernels,
)
from megatron_ext.ops.model_rows import (
    GradientLoops,
    ModelRows,
    chunk_means,
    host_offsets,
    pair_of_models,
    row_scale,
    write_by_loops,
    write_row_gradients,
    write_rows_of_no_chunk,
)
from megatron_ext.ops.sorted_l1.comparison import (
    Candidates,
    add_signs_,
    compare_sorted,
    select_largest,
)
from megatron_ext.ops.sorted_l1.kernel_steps import (
    capacity_of,
    keep_chosen,
    select_by_kernel,
    spread_centre,
    write_chosen,
)
from megatron_ext.ops.unit_gradient import kept_gradient

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ChunkSortedL1(NamedTuple):
    """Result by chunk, fp32 [C] each (fp64 for fp64 logits), the same on every rank."""

    chunk_loss: torch.Tensor
    """L1 over the compared places, 0 to 2."""

    discarded_mass: torch.Tensor
    """Mass of both sides beyond these places, an upper bound of the error of ``chunk_loss``."""

    student_log_sum: torch.Tensor | None = None
    """[Ts] logarithm of the row's sum, NaN where it has NaN or +inf."""

    teacher_log_sum: torch.Tensor | None = None
    """[Tt]"""

    cross_entropy: torch.Tensor | None = None
    """[Ts] of each label at temperature 1, 0 where there is none; None without labels."""

    top_column: torch.Tensor | None = None
    """int64 [Ts]: global column of the student's largest logit, with labels."""


@torch.no_grad()
def evaluate_sorted_l1(
    student: ChunkedLogits,
    teacher: ChunkedLogits,
    *,
    temperature: float = 1.0,
    top_u: int | None = None,
    labels: RowLabels | None = None,
    grad_scale: torch.Tensor | None = None,
    gradient: torch.Tensor | None = None,
    implementation: Implementation = "auto",
) -> ChunkSortedL1:
    """Sorted L1 of both models' chunk distributions, and the gradient of the student's logits.

    Args:
        top_u: U, places compared, of the largest probabilities; None: all, which is exact. That is
            a sort of slices of chunks, in torch whatever the ``implementation``.
        labels: Of the student's rows, whose cross-entropy is evaluated, too; None: it is not.
        grad_scale: [C], the upstream gradient of each chunk's loss; None: 1.
        gradient: [Ts, Vps] in the student's dtype, which receives the gradient of ``sum_c
            grad_scale_c chunk_loss_c``, and of the labels, rounded once; it may be the logits
            themselves. Rows of no chunk and of chunks of scale 0 that have no label get exactly 0.
            None: no gradient is computed.

    Temporaries over a vocabulary are slices of chunks in torch; by kernel there are none, but
    [Ts, 5 U / 4] logits where a gradient is asked for. In torch the host waits for the device once.

    Collectives on the shards' group: those of ``model_rows.pair_of_models``; a slice of C' chunks
    adds an all-gather of [C', U_s + U_t + 2] (a quarter more by kernel), and for the gradient an
    all-reduce of [Ts] by kernel, in torch one of [T'] a slice of its rows.

    Raises:
        LossError: ``triton`` was asked for and cannot run.
    """
    check_implementation("sorted_l1", implementation)
    by_kernel = uses_triton(implementation, student.logits, teacher.logits) and top_u is not None
    by: Implementation = "triton" if by_kernel else without_kernels(implementation)
    student_rows, teacher_rows = pair_of_models(
        student, teacher, temperature=temperature, labels=labels, implementation=by
    )
    scale = row_scale(student_rows, grad_scale)
    if by_kernel:
        assert top_u is not None
        out = _by_kernel(student_rows, teacher_rows, top_u, scale, gradient)
    else:
        out = _by_torch(student_rows, teacher_rows, top_u, scale, gradient)
    if gradient is not None:
        write_rows_of_no_chunk(gradient, student_rows, by_kernel=by_kernel)
    labelled = student_rows.labelled
    return out._replace(
        student_log_sum=student_rows.lse.log_sum,
        teacher_log_sum=teacher_rows.lse.log_sum,
        cross_entropy=None if labelled is None else labelled.loss,
        top_column=None if labelled is None else labelled.top_column,
    )


def _by_torch(
    student: ModelRows,
    teacher: ModelRows,
    top_u: int | None,
    scale: torch.Tensor,
    gradient: torch.Tensor | None,
) -> ChunkSortedL1:
    out = ChunkSortedL1(torch.empty_like(scale), torch.empty_like(scale))
    models = (student, teacher)
    ends, group = host_offsets(*models), student.shard.group
    widths, by_loops = [model.shard.width for model in models], student.by_loops
    candidates = [
        Candidates.of(
            top_u,
            model.shard.width,
            model.shard.excluded_columns(scale.device),
            group=group,
            by_loops=by_loops,
        )
        for model in models
    ]
    widest = max(*widths, (sum(side.kept for side in candidates) + 2) * group_size(group))
    for chunks in row_slices(len(scale), widest, device=scale.device):
        student_top, teacher_top = (
            select_largest(chunk_means(model, offsets, chunks).to(scale.dtype), side)
            for model, offsets, side in zip(models, ends, candidates, strict=True)
        )
        compared = compare_sorted(student_top, teacher_top, top_u, group, by_loops=by_loops)
        out.chunk_loss[chunks], out.discarded_mass[chunks] = compared.value, compared.left_out
        if gradient is not None and by_loops and gradient.stride(-1) == 1:
            from megatron_ext.ops.selection_loops import sign_gradients, sign_products

            # Slopes are the signs at the candidates, and 0 elsewhere.
            signs = student_top.columns.numpy(), compared.signs.numpy()
            loops = GradientLoops(sign_products, sign_gradients)
            write_by_loops(student, ends[0], chunks, signs, scale, gradient, loops)
        elif gradient is not None:
            slope = scale.new_zeros(len(compared.signs), widths[0])
            add_signs_(slope, student_top, compared, 1.0, by_loops=False)
            write_row_gradients(student, ends[0], chunks, slope, scale, gradient)
    return out


def _by_kernel(
    student: ModelRows,
    teacher: ModelRows,
    top_u: int,
    scale: torch.Tensor,
    gradient: torch.Tensor | None,
) -> ChunkSortedL1:
    out = ChunkSortedL1(torch.empty_like(scale), torch.empty_like(scale))
    group = student.shard.group
    widths = [capacity_of(top_u, model.shard.width) for model in (student, teacher)]
    if gradient is not None:
        chosen_logits = gradient.new_empty(len(gradient), widths[0])
    for chunks in row_slices(
        len(scale), (sum(widths) + 2) * group_size(group), device=scale.device
    ):
        student_top, teacher_top = (
            select_by_kernel(model, chunks, top_u, None) for model in (student, teacher)
        )
        out.chunk_loss[chunks], out.discarded_mass[chunks], signs = compare_sorted(
            student_top, teacher_top, top_u, group, by_kernel=True
        )
        if gradient is not None:
            own = torch.zeros_like(student.lse.peak)
            keep_chosen(student, chunks, student_top.columns, signs, chosen_logits, own)
            centre = all_reduce_sum(own, group)
            spread_centre(student, chunks, centre, scale, gradient)
            write_chosen(
                student, chunks, student_top.columns, signs, chosen_logits, centre, scale, gradient
            )
    return out


class SortedL1(NamedTuple):
    """Result by row, [C] each, replicated over the group; only ``value`` has a graph."""

    value: torch.Tensor

    left_out: torch.Tensor
    """Mass of both sides beyond the compared places, an upper bound of the error of ``value``."""


def sorted_l1(
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    student_excluded: torch.Tensor | None = None,
    teacher_excluded: torch.Tensor | None = None,
    largest: int | None = None,
    group: ProcessGroup | None = None,
) -> SortedL1:
    """``(student.sort().values - teacher.sort().values).abs().sum(-1)``, padded with zeros.

    Args:
        student: [C, Vps] probabilities, none negative; the only argument with a gradient.
        teacher: [C, Vpt] probabilities; Vpt may differ from Vps.
        student_excluded: bool [Vps], columns that are left out; None: none.
        teacher_excluded: bool [Vpt].
        largest: U, places compared, of the largest probabilities; None: all, which is exact.

    Keeps int32 columns and int8 signs [C, min(U, Vps)] for backward. Collectives: forward one
    all-gather of [C', U_s + U_t + 2] a slice of C' rows; backward none.
    """
    outputs = _SortedL1.apply(
        student, teacher, (student_excluded, teacher_excluded), largest, group
    )
    return SortedL1(*outputs)


class _SortedL1(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: torch.Tensor,
        teacher: torch.Tensor,
        excluded: tuple[torch.Tensor | None, torch.Tensor | None],
        largest: int | None,
        group: ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sides = (student.detach(), teacher.to(student.dtype))
        candidates = [
            Candidates.of(largest, side.shape[1], without)
            for side, without in zip(sides, excluded, strict=True)
        ]
        counts = [side.kept for side in candidates]
        count = student.shape[0]
        value, left_out = student.new_empty(2, count)
        columns = torch.empty(count, counts[0], dtype=torch.int32, device=student.device)
        signs = torch.empty(count, counts[0], dtype=torch.int8, device=student.device)
        widest = max(*(side.shape[1] for side in sides), (sum(counts) + 2) * group_size(group))
        for rows in row_slices(count, widest, device=student.device):
            parts = [
                select_largest(side[rows], of_side)
                for side, of_side in zip(sides, candidates, strict=True)
            ]
            value[rows], left_out[rows], signs[rows] = compare_sorted(
                parts[0], parts[1], largest, group
            )
            columns[rows] = parts[0].columns
        ctx.save_for_backward(columns, signs)
        ctx.width, ctx.dtype = student.shape[1], student.dtype
        ctx.mark_non_differentiable(left_out)
        return value, left_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        columns, signs = ctx.saved_tensors
        out = torch.zeros(len(columns), ctx.width, dtype=ctx.dtype, device=columns.device)
        out.scatter_(1, columns.to(torch.int64), signs.to(ctx.dtype).mul_(grad[:, None]))
        return out, None, None, None, None


def chunk_sorted_l1(
    student: ChunkedLogits,
    teacher: ChunkedLogits,
    *,
    temperature: float = 1.0,
    top_u: int | None = None,
    grad_scale: torch.Tensor | None = None,
    in_place: bool = False,
    implementation: Implementation = "auto",
) -> ChunkSortedL1:
    """``evaluate_sorted_l1`` with a graph from ``chunk_loss`` to the student's logits.

    Args:
        in_place: Write the gradient over the student's logits, which must not be read afterwards.

    Keeps the gradient [Ts, Vps] for backward, which has no collectives.
    """

    def evaluate(logits: torch.Tensor, gradient: torch.Tensor | None) -> ChunkSortedL1:
        return evaluate_sorted_l1(
            student._replace(logits=logits),
            teacher,
            temperature=temperature,
            top_u=top_u,
            grad_scale=grad_scale,
            gradient=gradient,
            implementation=implementation,
        )

    values = kept_gradient(
        student.logits,
        evaluate,
        grad_scale=grad_scale,
        slots=student.rows.chunk_id,
        in_place=in_place,
        implementation=implementation,
    )
    return ChunkSortedL1(*values)


def sorted_l1_reference(
    student: torch.Tensor, teacher: torch.Tensor, *, largest: int | None = None
) -> torch.Tensor:
    """``sum_i |sort(student)_i - sort(teacher)_i|`` [C] over the ``largest`` places.

    Args:
        student: [C, Vs]
        teacher: [C, Vt]; the narrower side is padded with zeros.
    """
    width = max(student.shape[1], teacher.shape[1])
    first, second = (
        torch.nn.functional.pad(side, (0, width - side.shape[1])).sort(
            dim=-1, descending=True, stable=True
        )[0]
        for side in (student, teacher)
    )
    return (first - second)[:, :largest].abs().sum(dim=-1)
