"""Arithmetic of compiled loops: fp32 exponentials and logarithms that vectorise, bf16 in uint16.

No function here branches, so that a loop over it becomes vector instructions. Sums are left to the
caller, whose own flags allow them to be reordered.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy import float32, int32

loop_part = partial(njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Compiles what compiled loops alone call: without entries for Python and C, which take a quarter
of the time that compiling takes."""

LOG2_E = float32(1.4426950408889634)
LN2_HIGH = float32(0.693359375)
LN2_LOW = float32(-2.12194440e-4)
ROUNDER = float32(12582912.0)
"""1.5 * 2^23: a sum with a number below 2^22 has that number, rounded, in its last bits."""

SMALLEST = float32(-87.33654)
"""Logarithm of the smallest normal number; exponentials of less are 0."""

FLOOR = float32(1024 * 1.1754943508222875e-38)
"""``probability_floor`` of fp32."""

ONE, HALF, ZERO = float32(1), float32(0.5), float32(0)
E0, E1, E2 = float32(1.9875691500e-4), float32(1.3981999507e-3), float32(8.3334519073e-3)
E3, E4, E5 = float32(4.1665795894e-2), float32(1.6666665459e-1), float32(5.0000001201e-1)
L0, L1, L2 = float32(7.0376836292e-2), float32(-1.1514610310e-1), float32(1.1676998740e-1)
L3, L4, L5 = float32(-1.2420140846e-1), float32(1.4249322787e-1), float32(-1.6668057665e-1)
L6, L7, L8 = float32(2.0000714765e-1), float32(-2.4999993993e-1), float32(3.3333331174e-1)
SQRT_HALF = float32(0.70710678118654752)


@intrinsic
def float_of_bits(context, bits):
    """The fp32 number with these bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def bits_of_float(context, number):
    """The bits of an fp32 number."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


_FIRST = ir.Constant(ir.IntType(32), 0)


@intrinsic
def reached(context, keys, first, least):
    """Bits of the 32 keys int32 from ``first`` on that are ``least`` or more, the lowest first."""
    vector = ir.VectorType(ir.IntType(32), 32)

    def generate(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.bitcast(builder.gep(array.data, [arguments[1]]), vector.as_pointer())
        spread = builder.insert_element(ir.Constant(vector, ir.Undefined), arguments[2], _FIRST)
        every = ir.Constant(vector, [0] * 32)
        spread = builder.shuffle_vector(spread, ir.Constant(vector, ir.Undefined), every)
        is_reached = builder.icmp_signed(">=", builder.load(address, align=4), spread)
        return builder.bitcast(is_reached, ir.IntType(32))

    return types.uint32(keys, types.intp, types.int32), generate


@intrinsic
def lowest_bit(context, bits):
    """Place of the lowest bit of a number that is not 0."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint32(types.uint32), generate


@loop_part(fastmath={"contract"}, inline="never")
def exp(x):
    """``e^x`` of an fp32 number up to 88, within two units in the last place; 0 below -87.3.

    NaN stays NaN. Coefficients of the polynomial: Cephes, ``expf``.
    """
    shifted = x * LOG2_E + ROUNDER
    power = shifted - ROUNDER
    rest = x - power * LN2_HIGH
    rest = rest - power * LN2_LOW
    value = E0 * rest + E1
    value = value * rest + E2
    value = value * rest + E3
    value = value * rest + E4
    value = value * rest + E5
    value = value * (rest * rest) + rest + ONE
    scale = float_of_bits(int32((bits_of_float(shifted) + int32(127)) << int32(23)))
    return ZERO if x < SMALLEST else value * scale


@loop_part(fastmath={"contract"}, inline="never")
def log(x):
    """Natural logarithm of a positive normal fp32 number, within two units in the last place.

    NaN stays NaN. Coefficients of the polynomial: Cephes, ``logf``.
    """
    bits = bits_of_float(x)
    exponent = float32(int32(bits >> int32(23)) - int32(126))
    part = float_of_bits(int32((bits & int32(0x007FFFFF)) | int32(0x3F000000)))
    low = part < SQRT_HALF
    exponent = exponent - (ONE if low else ZERO)
    part = part + (part if low else ZERO) - ONE
    square = part * part
    value = L0 * part + L1
    value = value * part + L2
    value = value * part + L3
    value = value * part + L4
    value = value * part + L5
    value = value * part + L6
    value = value * part + L7
    value = value * part + L8
    value = value * part * square + exponent * LN2_LOW - HALF * square
    value = part + value + exponent * LN2_HIGH
    return value if x == x else x
