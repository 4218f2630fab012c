"""Device functions of the matched divergence: P^ and Q^ at a block of columns, terms and slopes."""

import triton
import triton.language as tl

from megatron_ext.ops.chunk_kernels import mean_probabilities, row_probabilities
from megatron_ext.ops.triton_math import LN_2, LOG2_E, LOWEST, divergence_terms, scaled


@triton.jit
def _log(probabilities):
    """Logarithm, at least -87.3, that of the smallest normal number; NaN stays."""
    return tl.where(probabilities < 1.1754944e-38, -87.33654, tl.log(probabilities))


@triton.jit
def pair_terms(p, q, mixture, DIRECTION: tl.constexpr):
    """Terms of the divergence and their derivatives by ``q`` (``ops/divergence``)."""
    log_p = _log(p)
    log_q = _log(q)
    if DIRECTION == "jensen_shannon":
        log_mix = _log(mixture * p + (1.0 - mixture) * q)
        log_p -= log_mix
        log_q -= log_mix
    no_mass = q < 1.1754944e-38
    value, slope = divergence_terms(p, q, log_p, log_q, no_mass, mixture, DIRECTION)
    # 1024 times the smallest normal number, as in torch.
    return value, slope / tl.where(q < 1.2037062e-35, 1.2037062e-35, q)


@triton.jit
def _bits(values, peak, log_sum):
    """Logarithms to base 2; ``log_sum`` is to base 2 too."""
    # The difference first, which is exact for large logits where their product is not.
    return (values - peak) * LOG2_E - log_sum


@triton.jit
def _normal(bits):
    """Logarithms to base 2, at least -126, that of the smallest normal number; NaN stays."""
    return tl.maximum(bits, -126.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def single_pair(
    sides,
    columns,
    temperature,
    IS_ALIGNED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """Logarithms of P^ and Q^ to base 2 at columns that are all real, and which are common.

    ``sides`` are the starts of the student's row and of the teacher's, the pairs, and for either
    row its peak and the logarithm of its sum, to base 2 and with that of the used mass. Where a
    column is not common, P^ is 0, and Q^ is the row's probability over the used mass. Aligned
    columns are common, each with the teacher's column of the same number.
    """
    start_of_own, start_of_other, pairs_ptr, own_peak, own_log_sum, other_peak, other_log_sum = (
        sides
    )
    own = scaled(tl.load(start_of_own + columns), temperature, HAS_TEMPERATURE)
    if IS_ALIGNED:
        common = columns >= 0
        other = tl.load(start_of_other + columns)
    else:
        pair = tl.load(pairs_ptr + columns)
        common = pair >= 0
        other = tl.load(start_of_other + pair, mask=common, other=-float("inf"))
    log_p = _bits(scaled(other, temperature, HAS_TEMPERATURE), other_peak, other_log_sum)
    return log_p, _bits(own, own_peak, own_log_sum), common


@triton.jit
def _single_terms(log_p, log_q, common, mixture, DIRECTION: tl.constexpr):
    """Terms of the divergence to base 2, and of ``q f_q``, as ``pair_terms`` has them; and Q^."""
    p = tl.exp2(log_p)
    q = tl.exp2(log_q)
    log_p = _normal(log_p)
    log_q = _normal(log_q)
    # 1 but where Q is less than 1024 times the smallest normal number, as in torch.
    share = tl.minimum(q * (1.0 / 1.2037062e-35), 1.0)
    if DIRECTION == "forward":
        value = p * (log_p - log_q)
        slope = -p * tl.where(log_q > -126.0, share, 0.0)
    else:
        if DIRECTION == "reverse":
            value = q * (log_q - log_p)
            slope = (value * LN_2 + q) * share
        else:
            log_mix = _normal(tl.log2(mixture * p + (1.0 - mixture) * q))
            of_q = q * (log_q - log_mix) * (1.0 - mixture)
            value = mixture * p * (log_p - log_mix) + of_q
            slope = of_q * share * LN_2
        value = tl.where(common, value, 0.0)
        slope = tl.where(common, slope, 0.0)
    return value, slope, q


@triton.jit
def compared_block(
    found,
    start,
    block,
    sides,
    temperature,
    mixture,
    IS_ALIGNED: tl.constexpr,
    DIRECTION: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    """What lanes have found after a block: sums, peaks of log P^ and log Q^, and their blocks."""
    values, wholes, p_peak, q_peak, p_first, q_first = found
    log_p, log_q, common = single_pair(
        sides,
        start + block,
        temperature,
        IS_ALIGNED,
        HAS_TEMPERATURE,
    )
    value, slope, _ = _single_terms(log_p, log_q, common, mixture, DIRECTION)
    values += tl.sum(value, axis=1)
    wholes += tl.sum(slope, axis=1)
    top = tl.max(log_p, axis=1)
    p_first = tl.where(top > p_peak, start, p_first)
    p_peak = tl.maximum(p_peak, top)
    top = tl.max(log_q if IS_ALIGNED else tl.where(common, log_q, LOWEST), axis=1)
    q_first = tl.where(top > q_peak, start, q_first)
    q_peak = tl.maximum(q_peak, top)
    return values, wholes, p_peak, q_peak, p_first, q_first


@triton.jit
def block_gradient(
    columns,
    sides,
    on_common,
    on_others,
    scale,
    label,
    temperature,
    mixture,
    IS_ALIGNED: tl.constexpr,
    DIRECTION: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_LABEL: tl.constexpr,
):
    """Gradient of a chunk's only row at ``columns``, but for that of its label's logit.

    ``label`` is the weight of its cross-entropy, and the row's peak and logarithm to base 2 of the
    sum at temperature 1. At that temperature ``on_common`` and ``on_others`` hold the weight.
    """
    log_p, log_q, common = single_pair(
        sides,
        columns,
        temperature,
        IS_ALIGNED,
        HAS_TEMPERATURE,
    )
    _, slope, q = _single_terms(log_p, log_q, common, mixture, DIRECTION)
    factor = on_common if IS_ALIGNED else tl.where(common, on_common, on_others)
    out = q * factor + slope * scale
    if HAS_LABEL and HAS_TEMPERATURE:
        weight, plain_peak, plain_log_sum = label
        plain = tl.load(sides[0] + columns).to(tl.float32)
        out += tl.exp2(_bits(plain, plain_peak, plain_log_sum)) * weight
    return out


@triton.jit
def add_label_part(
    out,
    probabilities,
    labels,
    logits_ptr,
    row,
    row_stride,
    columns,
    held,
    inside,
    HAS_TEMPERATURE: tl.constexpr,
):
    """Add the gradient of a row's label to that of its chunk at ``columns``.

    ``probabilities`` are the row's at the chunk's temperature; ``labels`` are pointers to the
    column int64 [T] of each label, -1 where another rank has it, to its weight, and to the row's
    peak and logarithm of the sum at temperature 1.
    """
    column_ptr, weight_ptr, peak_ptr, log_sum_ptr = labels
    weight = tl.load(weight_ptr + row)
    column = tl.load(column_ptr + row).to(tl.int32)
    if HAS_TEMPERATURE:
        probabilities = row_probabilities(
            logits_ptr, row, row_stride, peak_ptr, log_sum_ptr, columns, held, inside, 1.0, False
        )
    out += tl.where(weight == 0.0, 0.0, probabilities * weight)
    return out - tl.where(columns == column, weight, 0.0)


@triton.jit
def both_sides(
    student_ptr,
    student_order_ptr,
    student_peak_ptr,
    student_log_sum_ptr,
    student_stride,
    student_begin,
    student_end,
    student_used,
    teacher_ptr,
    teacher_order_ptr,
    teacher_peak_ptr,
    teacher_log_sum_ptr,
    teacher_stride,
    teacher_begin,
    teacher_end,
    teacher_used,
    pairs_ptr,
    moved_row_ptr,
    columns,
    held,
    inside,
    temperature,
    MOVED: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """P^ and Q^ at a block of student columns, 0 where not common, and the mask of common ones."""
    pair = tl.load(pairs_ptr + columns, mask=held, other=-1)
    common = inside & (pair >= 0)
    q = mean_probabilities(
        student_ptr,
        student_order_ptr,
        student_begin,
        student_end,
        student_stride,
        student_peak_ptr,
        student_log_sum_ptr,
        columns,
        held,
        common,
        temperature,
        HAS_TEMPERATURE,
    )
    if MOVED:
        p = tl.where(common, tl.load(moved_row_ptr + columns, mask=held, other=0.0), 0.0)
    else:
        p = mean_probabilities(
            teacher_ptr,
            teacher_order_ptr,
            teacher_begin,
            teacher_end,
            teacher_stride,
            teacher_peak_ptr,
            teacher_log_sum_ptr,
            pair,
            common,
            common,
            temperature,
            HAS_TEMPERATURE,
        )
    return p / teacher_used, q / student_used, common
