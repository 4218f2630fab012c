"""Triton kernels that look labels up, and add up what a loss has found of chunks and rows.

C chunks, K columns, T rows.
"""

import triton
import triton.language as tl

from megatron_ext.ops.kernel import kernel


@kernel(do_not_specialize=["chunks"])
def chunk_sums_kernel(
    values_ptr,
    used_ptr,
    class_ptr,
    offsets_ptr,
    chunks,
    sums_ptr,
    counts_ptr,
    kept_ptr,
    HAS_USED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CLASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums over the used chunks, a program for each, in the order of the chunks.

    ``values`` are [K, C], the first column the loss; ``offsets`` int32 [C + 1] those of a side's
    rows. Writes ``sums`` fp32: [K] of the columns, then by class the number of used chunks and
    their loss; ``counts`` int64: of used chunks and of their rows, then by class of used chunks and
    of all; and the used chunks' loss, if some are not used.
    """
    program = tl.program_id(0)
    number = program - COLUMNS
    is_column = program < COLUMNS
    column = values_ptr + tl.where(is_column, program, 0).to(tl.int64) * chunks
    total = tl.zeros((BLOCK,), tl.float32)
    counted = tl.zeros((BLOCK,), tl.int32)
    others = tl.zeros((BLOCK,), tl.int32)
    rows = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        exists = chunk < chunks
        used = exists
        if HAS_USED:
            used = tl.load(used_ptr + chunk, mask=exists, other=0) != 0
        chosen = used
        if CLASSES > 0:
            its_class = tl.load(class_ptr + chunk, mask=exists, other=-1).to(tl.int32)
            is_member = its_class == number - 1
            chosen = used & (is_member | (program <= COLUMNS))
            others += tl.where(is_member, 1, 0)
        if HAS_ROWS:
            begin = tl.load(offsets_ptr + chunk, mask=used, other=0)
            rows += tl.load(offsets_ptr + chunk + 1, mask=used, other=0) - begin
        counted += tl.where(chosen, 1, 0)
        # A value of NaN is that of its own chunk alone.
        value = tl.load(column + chunk, mask=chosen, other=0.0)
        total += value
        if HAS_USED:
            tl.store(kept_ptr + chunk, value, mask=exists & (program == 0))
    count = tl.sum(counted, axis=0)
    if is_column:
        tl.store(sums_ptr + program, tl.sum(total, axis=0))
    elif program == COLUMNS:
        tl.store(counts_ptr, count.to(tl.int64))
        tl.store(counts_ptr + 1, tl.sum(rows, axis=0).to(tl.int64))
    else:
        tl.store(sums_ptr + program - 1, count.to(tl.float32))
        tl.store(sums_ptr + program - 1 + CLASSES, tl.sum(total, axis=0))
        tl.store(counts_ptr + 1 + number, count.to(tl.int64))
        tl.store(counts_ptr + 1 + CLASSES + number, tl.sum(others, axis=0).to(tl.int64))


@kernel(do_not_specialize=["rows"])
def label_sums_kernel(
    row_loss_ptr,
    column_ptr,
    label_ptr,
    rows,
    sums_ptr,
    count_ptr,
    NO_LABEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum of the rows' loss, and the number of hits [2]; number of labels. One program."""
    total = tl.zeros((BLOCK,), tl.float32)
    hits = tl.zeros((BLOCK,), tl.int32)
    labels = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        exists = row < rows
        label = tl.load(label_ptr + row, mask=exists, other=NO_LABEL)
        labels += tl.where(label != NO_LABEL, 1, 0)
        total += tl.load(row_loss_ptr + row, mask=exists, other=0.0)
        column = tl.load(column_ptr + row, mask=exists, other=NO_LABEL - 1)
        hits += tl.where(column == label, 1, 0)
    tl.store(sums_ptr, tl.sum(total, axis=0))
    tl.store(sums_ptr + 1, tl.sum(hits, axis=0).to(tl.float32))
    tl.store(count_ptr, tl.sum(labels, axis=0).to(tl.int64))


@triton.jit
def has_bad_rows(
    told_ptr,
    label_ptr,
    chunk_ptr,
    rows,
    NO_LABEL: tl.constexpr,
    NO_CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """1 where a row that is read is told to have bad numbers, else 0."""
    found = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        exists = row < rows
        is_read = exists
        if label_ptr is not None:
            is_read = tl.load(label_ptr + row, mask=exists, other=NO_LABEL) != NO_LABEL
        if chunk_ptr is not None:
            in_chunk = tl.load(chunk_ptr + row, mask=exists, other=NO_CHUNK) != NO_CHUNK
            is_read = in_chunk if label_ptr is None else is_read | in_chunk
        told = tl.load(told_ptr + row, mask=exists, other=0)
        is_bad = told != 0
        if told.dtype.is_floating():
            is_bad = told != told
        found = tl.where(is_read & is_bad, 1, found)
    return tl.max(found, axis=0)


@kernel(do_not_specialize=["student_rows", "teacher_rows"])
def bad_rows_kernel(
    student_told_ptr,
    student_label_ptr,
    student_chunk_ptr,
    student_rows,
    teacher_told_ptr,
    teacher_label_ptr,
    teacher_chunk_ptr,
    teacher_rows,
    flags_ptr,
    NO_LABEL: tl.constexpr,
    NO_CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Flags int32 [2] of the student's rows and of the teacher's, a program for each."""
    if tl.program_id(0) == 0:
        found = has_bad_rows(
            student_told_ptr, student_label_ptr, student_chunk_ptr, student_rows, NO_LABEL,
            NO_CHUNK, BLOCK,
        )  # fmt: skip
        tl.store(flags_ptr, found)
    else:
        found = has_bad_rows(
            teacher_told_ptr, teacher_label_ptr, teacher_chunk_ptr, teacher_rows, NO_LABEL,
            NO_CHUNK, BLOCK,
        )  # fmt: skip
        tl.store(flags_ptr + 1, found)


@kernel(
    do_not_specialize=["start", "rows"],
    do_not_specialize_on_alignment=["label_ptr", "weight_ptr", "peak_ptr", "total_ptr"],
)
def label_rows_kernel(
    logits_ptr,
    row_stride,
    label_ptr,
    weight_ptr,
    weight,
    start,
    width,
    rows,
    temperature,
    column_ptr,
    read_ptr,
    label_weight_ptr,
    peak_ptr,
    total_ptr,
    BLOCK: tl.constexpr,
):
    """Column and logit over the temperature of BLOCK labels, -1 and 0 where this rank has none.

    ``start`` is the rank's first column. A row is read where it has a label and a weight that is
    not 0; rows have the ``weight`` of all where they have none of their own.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < rows
    label = tl.load(label_ptr + row, mask=exists, other=-1)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + row, mask=exists, other=0.0)
    is_read = (label >= 0) & (weight != 0.0)
    column = label - start
    is_here = (column >= 0) & (column < width) & (label >= 0)
    place = row.to(tl.int64) * row_stride + column
    picked = tl.load(logits_ptr + place, mask=is_here, other=0.0).to(tl.float32)
    tl.store(column_ptr + row, tl.where(is_here, column, -1), mask=exists)
    tl.store(read_ptr + row, is_read, mask=exists)
    tl.store(label_weight_ptr + row, tl.where(is_read, weight, 0.0), mask=exists)
    tl.store(peak_ptr + row, picked / temperature, mask=exists)
    tl.store(total_ptr + row, tl.where(is_here, 1.0, 0.0), mask=exists)


@kernel(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=[
        "peak_ptr", "log_sum_ptr", "whole_peak_ptr", "whole_log_sum_ptr", "label_ptr",
    ],
)  # fmt: skip
def label_losses_kernel(
    peak_ptr,
    log_sum_ptr,
    whole_peak_ptr,
    whole_log_sum_ptr,
    label_ptr,
    read_ptr,
    vocab_size,
    rows,
    loss_ptr,
    BLOCK: tl.constexpr,
):
    """Cross-entropy of BLOCK labels from merged sums: 0 of rows that are not read, NaN of a label
    beyond the vocabulary."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < rows
    label = tl.load(label_ptr + row, mask=exists, other=-1)
    is_read = label >= 0
    if read_ptr is not None:
        is_read = tl.load(read_ptr + row, mask=exists, other=0) != 0
    # Peaks first: the difference of two large numbers is exact, their sums are not.
    peaks = tl.load(peak_ptr + row, mask=exists) - tl.load(whole_peak_ptr + row, mask=exists)
    log_sum = tl.load(log_sum_ptr + row, mask=exists)
    loss = -(peaks + log_sum - tl.load(whole_log_sum_ptr + row, mask=exists))
    loss = tl.where(label >= vocab_size, float("nan"), loss)
    tl.store(loss_ptr + row, tl.where(is_read, loss, 0.0), mask=exists)
