"""What single instructions make of the values of all threads, as NVIDIA's PTX defines it."""

import numpy as np

from tests.ptx.region import AccessError

_TINY = np.finfo(np.float32).tiny


def flushed(x):
    """``x`` in fp32 with zeros for what is denormal."""
    return np.where(np.abs(x) < _TINY, np.copysign(np.float32(0), x), x)


def fused(a, b, c):
    """The product and sum in fp32, rounded once but for one value in 2**29: fp64 holds the product,
    and rounds the sum before fp32 does."""
    return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float32)


def from_bf16(bits):
    """bf16 as fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x):
    """The nearest bf16 to fp32, as bits."""
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


_ROUNDINGS = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def to_integer(x, kind, rounding):
    """Floats as integers: the nearest of the type, and 0 for NaN."""
    bounds = np.iinfo(kind)
    whole = _ROUNDINGS[rounding](x.astype(np.float64))
    inside = (whole > float(bounds.min)) & (whole < float(bounds.max))
    clipped = np.where(whole > 0, kind(bounds.max), kind(bounds.min))
    out = np.where(inside, np.where(inside, whole, 0).astype(kind), clipped)
    return np.where(np.isnan(x), kind(0), out)


def shifted(x, count, left):
    """Bits by ``count`` places, of which more than there are leave none, or the sign."""
    width = 8 * x.dtype.itemsize
    count = np.asarray(count).astype(np.uint32)
    safe = np.minimum(count, width - 1).astype(x.dtype)
    if not left:
        out = x >> safe
        return out if x.dtype.kind == "i" else np.where(count < width, out, x.dtype.type(0))
    return np.where(count < width, x << safe, x.dtype.type(0))


def quotient(a, b, is_rest):
    """Integers divided towards zero, or what is left."""
    if np.any(b == 0):
        raise AccessError("an integer is divided by zero")
    rest = np.fmod(a, b)
    return rest if is_rest else (a - rest) // b


def field(x, start, length):
    """``length`` bits from ``start`` on, with their sign where ``x`` is signed."""
    width = 8 * x.dtype.itemsize
    start, length = int(start) & 255, int(length) & 255
    if length == 0 or start >= width:
        return np.zeros_like(x)
    length = min(length, width - start)
    up = x.dtype.type(width - length - start)
    return (x << up) >> x.dtype.type(width - length)


def permuted(a, b, selector):
    """Bytes of two registers, each by four bits of the selector."""
    both = a.astype(np.uint64) | (np.asarray(b).astype(np.uint64) << np.uint64(32))
    selector = np.asarray(selector).astype(np.uint64)
    out = np.uint64(0)
    for place in range(4):
        choice = (selector >> np.uint64(4 * place)) & np.uint64(15)
        byte = (both >> (np.uint64(8) * (choice & np.uint64(7)))) & np.uint64(255)
        byte = np.where(choice & np.uint64(8), np.uint64(255) * (byte >> np.uint64(7)), byte)
        out = out | (byte << np.uint64(8 * place))
    return out.astype(np.uint32)


def sources(mode, lane_or_distance, clamp, threads):
    """Threads that ``shfl`` reads: one's own where the one that is asked for is elsewhere."""
    lane = np.arange(threads) % 32
    given, clamp = np.asarray(lane_or_distance).astype(np.int64) & 31, int(clamp)
    segment, limit = (clamp >> 8) & 31, clamp & 31
    first = lane & segment
    last = first | (limit & ~segment)
    chosen = {
        "up": lane - given,
        "down": lane + given,
        "bfly": lane ^ given,
        "idx": first | (given & ~segment),
    }[mode]
    inside = chosen >= last if mode == "up" else chosen <= last
    return np.arange(threads) - lane + np.where(inside, chosen, lane)


def reduced(x, operation):
    """What the lanes of each warp have together."""
    whole = operation.reduce(x.reshape(-1, 32), axis=1, dtype=x.dtype)
    return np.repeat(whole, 32)


def matrices(shared, address, count, transposed):
    """What ``ldmatrix`` gives each thread of ``count`` matrices of 8 x 8 halves."""
    out = []
    for matrix in range(count):
        parts = [
            shared.load(row, None, size, 1)[0] for row, size in _rows(address, matrix, transposed)
        ]
        whole = [part.astype(np.uint32) << np.uint32(16 * k) for k, part in enumerate(parts)]
        out.append(whole[0] if len(whole) == 1 else whole[0] | whole[1])
    return out


def store_matrices(shared, address, given, transposed):
    """Store what threads hold of matrices of 8 x 8 halves, as ``stmatrix`` does."""
    for matrix, whole in enumerate(given):
        for k, (row, size) in enumerate(_rows(address, matrix, transposed)):
            part = whole if size == 4 else (whole >> np.uint32(16 * k)).astype(np.uint16)
            shared.store(row, None, [part])


def _rows(address, matrix, transposed):
    """Where a thread's two halves of a matrix are, and their bytes: together, or one by one.

    Every eight lanes of a warp have the addresses of a matrix's rows.
    """
    threads = np.arange(len(address))
    first, lane = threads - threads % 32 + 8 * matrix, threads % 32
    if not transposed:
        return [(address[first + lane // 4] + (4 * (lane % 4)).astype(address.dtype), 4)]
    column = (2 * (lane // 4)).astype(address.dtype)
    return [(address[first + 2 * (lane % 4) + k] + column, 2) for k in (0, 1)]
