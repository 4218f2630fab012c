"""Rows of both models as probabilities, their means by chunk, and gradients from these.

A few rows at a time. T rows, C chunks, C' of a slice, Vp local columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import (
    LogSumExp,
    VocabShard,
    accumulation_dtype,
    merge_log_sum_exp,
    row_slices,
    scaled_logits,
)
from megatron_ext.ops.chunk_rows import ChunkedLogits, ChunkRows, ExpSums
from megatron_ext.ops.labels import LabelledRows, RowLabels
from megatron_ext.ops.launch import Implementation, uses_compiled
from megatron_ext.ops.softmax_statistics import row_statistics
from megatron_ext.ops.token_likelihood import RowGradient, write_token_gradient
from megatron_ext.ops.unit_gradient import scale_rows_

if TYPE_CHECKING:
    from megatron_ext.ops.row_loops import FlatRows, LabelPart, Normaliser


class ModelRows(NamedTuple):
    """One model's logits, the rows of each chunk, and their log-normalisers."""

    logits: torch.Tensor
    """[T, Vp] without a graph, any float dtype; rows may be strided."""

    rows: ChunkRows

    shard: VocabShard

    temperature: float

    lse: LogSumExp
    """[T] over every shard, of ``logits / temperature``."""

    members: LogSumExp
    """[T] over the ``members`` of ``pair_of_models``; ``lse`` without them."""

    by_loops: bool = False
    """Whether compiled loops read the logits."""

    labelled: LabelledRows | None = None
    """The cross-entropy beside, whose gradient is written with that of the chunks."""

    @property
    def member_mass(self) -> torch.Tensor:
        """[T]: probability of the members."""
        whole, inside = self.lse, self.members
        return ((inside.peak - whole.peak) + inside.log_sum - whole.log_sum).exp_()

    def for_loops(self) -> tuple[FlatRows, Normaliser]:
        """Arguments of compiled loops for these rows."""
        from megatron_ext.ops import row_loops as loops

        rows = loops.flat_rows(self.logits, self.shard.valid_width, self.temperature)
        return rows, loops.normaliser(self.lse)

    def label_vectors(self) -> tuple[torch.Tensor | None, ...]:
        """Arguments of kernels that write gradients: columns, weights, peaks and sums of the rows
        with labels, None without."""
        if self.labelled is None:
            return None, None, None, None
        term = self.labelled.term
        return term.column, term.weight, *term.whole

    def labels_for_loops(self) -> LabelPart:
        """``labelled`` for compiled loops."""
        from megatron_ext.ops import row_loops as loops

        plain = loops.flat_rows(self.logits, self.shard.valid_width)
        if self.labelled is None:
            nothing = self.lse.peak[:0].float()
            return loops.LabelPart(
                nothing.long().numpy(), nothing.numpy(), plain, loops.normaliser(self.lse)
            )
        term = self.labelled.term
        return loops.LabelPart(
            term.column.numpy(),
            term.weight.float().numpy(),
            plain,
            loops.normaliser(term.whole),
        )

    def probabilities(self, row: torch.Tensor) -> torch.Tensor:
        """``softmax(logits / temperature)`` [T', Vp] of rows int64 [T'], 0 in padding."""
        excluded = self.shard.excluded_columns(self.logits.device)
        scaled = scaled_logits(self.logits[row], self.temperature, excluded)
        return scaled.sub_(self.lse.peak[row, None]).sub_(self.lse.log_sum[row, None]).exp_()


def pair_of_models(
    student: ChunkedLogits,
    teacher: ChunkedLogits,
    *,
    temperature: float,
    members: tuple[torch.Tensor, torch.Tensor] | None = None,
    labels: RowLabels | None = None,
    implementation: Implementation = "auto",
) -> tuple[ModelRows, ModelRows]:
    """The student's and the teacher's rows; each model's logits are read once, the student's twice
    for ``labels`` at another temperature than 1.

    Args:
        members: bool [Vps] and [Vpt], columns whose probability is summed.
        labels: Of the student's rows, whose cross-entropy is evaluated, too.

    Two all-reduces of [Ts + Tt], twice as long with ``members``; with ``labels`` longer by [Ts],
    or [2 Ts] at another temperature than 1, and one of int64 [Ts] in addition.
    """
    pair = (student, teacher)
    sums = 1 if members is None else 2
    lengths = [sums * len(model.logits) for model in pair]
    if labels is not None:
        lengths += [len(student.logits)] * labels.sums(temperature)
    dtypes = [accumulation_dtype(model.logits.dtype) for model in pair]
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    peak, total = student.logits.new_empty(2, sum(lengths), dtype=dtype)
    places = [
        ExpSums(*both) for both in zip(peak.split(lengths), total.split(lengths), strict=True)
    ]
    statistics = [
        row_statistics(
            model.logits.detach(),
            model.shard,
            temperature=temperature,
            members=None if members is None else members[number],
            with_column=labels is not None and number == 0,
            into=places[number],
            implementation=implementation,
        )
        for number, model in enumerate(pair)
    ]
    found = None
    if labels is not None:
        found = labels.look_up(student, places[2:], implementation=implementation)
    merged = merge_log_sum_exp(peak, total, student.shard.group)
    wholes = [LogSumExp(*both) for both in zip(*(x.split(lengths) for x in merged), strict=True)]
    models = []
    for model, lse in zip(pair, wholes, strict=False):
        peaks, log_sums = (part.view(sums, -1) for part in lse)
        inside, whole = LogSumExp(peaks[-1], log_sums[-1]), LogSumExp(peaks[0], log_sums[0])
        logits = model.logits.detach()
        by_loops = uses_compiled(implementation, logits)
        models.append(
            ModelRows(logits, model.rows, model.shard, temperature, whole, inside, by_loops)
        )
    if labels is None or found is None:
        return models[0], models[1]
    rows = len(student.logits)
    labelled = LabelledRows.of(
        student,
        labels.labels,
        found,
        (statistics[0].column, ExpSums(*(part[:rows] for part in places[0]))),
        [models[0].lse, *wholes[2:]],
        implementation=implementation,
    )
    return models[0]._replace(labelled=labelled), models[1]


def host_offsets(*models: ModelRows) -> list[list[int]]:
    """``ChunkRows.offsets`` of each model on the host, which waits for the device once."""
    ends: list[list[int]] = torch.stack([model.rows.offsets for model in models]).tolist()
    return ends


def rows_of(model: ModelRows, ends: list[int], chunks: slice) -> Iterator[torch.Tensor]:
    """Rows int64 [T'] of these chunks, few enough at a time for a temporary [T', Vp].

    Args:
        ends: This model's offsets, from ``host_offsets``.
    """
    first, last = ends[chunks.start], ends[chunks.stop]
    for part in row_slices(last - first, model.shard.width, device=model.logits.device):
        yield model.rows.order[first + part.start : first + part.stop].long()


_BLOCK: Final = 4096


def chunk_means(model: ModelRows, ends: list[int], chunks: slice) -> torch.Tensor:
    """Mean of ``softmax(logits / temperature)`` over the rows of each chunk (README, 2).

    Returns:
        [C', Vp] fp32 (fp64 for fp64 logits); 0 in padding and for chunks without rows. No
        collectives.
    """
    count, dtype = chunks.stop - chunks.start, model.lse.peak.dtype
    if model.by_loops:
        return _chunk_means_by_loops(model, chunks)
    sums = torch.zeros(count, model.shard.width, dtype=dtype, device=model.logits.device)
    for row in rows_of(model, ends, chunks):
        sums.index_add_(0, model.rows.slots[row] - chunks.start, model.probabilities(row))
    return sums.div_(model.rows.sizes()[chunks].clamp(min=1)[:, None])


def _chunk_means_by_loops(model: ModelRows, chunks: slice) -> torch.Tensor:
    from megatron_ext.ops import row_loops as loops

    out = torch.empty(chunks.stop - chunks.start, model.shard.width, dtype=torch.float32)
    order, offsets, _ = model.rows
    arguments = (
        *model.for_loops(),
        order.numpy(),
        offsets.numpy(),
        out.numpy(),
    )
    loops.in_threads(
        lambda a, b: loops.chunk_means(
            chunks.start + a, chunks.start + b, chunks.start, *arguments
        ),
        len(out),
    )
    return out


class GradientLoops(NamedTuple):
    """Compiled loops that write the gradient of rows, for slopes in one form."""

    products: Callable[..., None]
    """Adds up slope times probability of each row."""

    gradients: Callable[..., None]
    """Writes the rows, given these sums."""


def write_by_loops(
    model: ModelRows,
    ends: list[int],
    chunks: slice,
    slope: Any,
    scale: torch.Tensor,
    gradient: torch.Tensor,
    loops: GradientLoops,
) -> None:
    """``write_row_gradients`` by ``loops``, with ``slope`` as they read it. One all-reduce of
    [T']."""
    from megatron_ext.ops.row_loops import flat_rows, in_threads

    order = model.rows.order[ends[chunks.start] : ends[chunks.stop]]
    slot = model.rows.slots[order.long()]
    places = (*model.for_loops(), order.numpy(), (slot - chunks.start).numpy(), slope)
    centre = torch.empty(len(order), dtype=torch.float32)
    in_threads(lambda a, b: loops.products(a, b, *places, centre.numpy()), len(order))
    centre = all_reduce_sum(centre, model.shard.group)
    factors = centre.numpy(), scale[slot].float().numpy()
    last = factors, model.labels_for_loops(), flat_rows(gradient)
    in_threads(lambda a, b: loops.gradients(a, b, *places, *last), len(order))


def chunk_means_by_kernel(model: ModelRows, chunks: slice) -> torch.Tensor:
    """``chunk_means`` by a Triton kernel; the host waits for nothing."""
    from megatron_ext.ops.chunk_kernels import chunk_means_kernel

    count, width = chunks.stop - chunks.start, model.shard.width
    out = torch.empty(count, width, dtype=torch.float32, device=model.logits.device)
    if count and width:
        chunk_means_kernel[(count, -(-width // _BLOCK))](
            model.logits,
            model.rows.order,
            model.rows.offsets,
            *model.lse,
            out,
            chunks.start,
            model.logits.stride(0),
            width,
            model.shard.valid_width,
            model.temperature,
            HAS_TEMPERATURE=model.temperature != 1.0,
            BLOCK=_BLOCK,
        )
    return out


def row_scale(model: ModelRows, grad_scale: torch.Tensor | None) -> torch.Tensor:
    """``grad_scale_c / (|S_c| tau)`` [C], the factor of README 3."""
    sizes = model.rows.sizes().clamp(min=1).to(model.lse.peak.dtype)
    return (1.0 if grad_scale is None else grad_scale) / (sizes * model.temperature)


def write_row_gradients(
    model: ModelRows,
    ends: list[int],
    chunks: slice,
    slope: torch.Tensor,
    scale: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """Write the gradient, README 3, into the rows of these chunks, with that of their labels.

    Args:
        slope: [C', Vp], dL/dQ of the chunks.
        scale: [C] from ``row_scale``; rows of a chunk at 0 get exactly 0, but for their labels.
        gradient: [T, Vp], may be the logits.

    One all-reduce of [T'] a slice of T' rows.
    """
    if model.by_loops and gradient.stride(-1) == 1:
        from megatron_ext.ops.row_loops import slope_gradients, slope_products

        values, loops = slope.float().contiguous().numpy(), (slope_products, slope_gradients)
        write_by_loops(model, ends, chunks, values, scale, gradient, GradientLoops(*loops))
        return
    for row in rows_of(model, ends, chunks):
        slot = model.rows.slots[row]
        probs, factor = model.probabilities(row), scale[slot, None]
        row_slope = slope[slot - chunks.start]
        centre = all_reduce_sum((probs * row_slope).sum(dim=-1, keepdim=True), model.shard.group)
        out = probs.mul_(row_slope.sub_(centre)).mul_(factor).masked_fill_(factor == 0, 0.0)
        if model.labelled is not None:
            excluded = model.shard.excluded_columns(model.logits.device)
            plain = scaled_logits(model.logits[row], 1.0, excluded)
            out.add_(model.labelled.term.gradient(plain, row))
        gradient[row] = out.to(gradient.dtype)


def write_rows_of_no_chunk(gradient: torch.Tensor, model: ModelRows, *, by_kernel: bool) -> None:
    """Write the gradient of these rows' labels, exactly 0 where they have none.

    Args:
        gradient: [T, Vp], may be the logits.
    """
    outside = model.rows.chunk_id < 0
    if model.labelled is None:
        used = (~outside).to(model.lse.peak.dtype)
        scale_rows_(gradient, used, "triton" if by_kernel else "torch")
        return
    term = model.labelled.term
    by: Implementation = "triton" if by_kernel else "torch"
    if model.by_loops and gradient.stride(-1) == 1:
        by = "cpu"
    write_token_gradient(
        model.logits,
        None,
        RowGradient(term.column, -term.weight, term.whole),
        model.shard,
        gradient,
        written=outside,
        implementation=by,
    )


def chunk_mean_softmax_reference(
    logits: torch.Tensor, chunk_id: torch.Tensor, chunk_count: int, *, temperature: float = 1.0
) -> torch.Tensor:
    """Mean of ``softmax(logits / temperature)`` over the rows of each chunk: [C, V]."""
    probs = torch.softmax(logits / temperature, dim=-1)
    means = [probs[chunk_id == chunk].mean(dim=0) for chunk in range(chunk_count)]
    return torch.stack(means) if means else probs[:0]
