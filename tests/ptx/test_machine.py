"""The machine on programs of a few lines: what they give, and the mistakes that it finds."""

import numpy as np
import pytest
import torch

from tests.ptx.code import UnknownInstruction
from tests.ptx.machine import Machine
from tests.ptx.memory import bytes_at
from tests.ptx.program import parsed
from tests.ptx.region import AccessError

THREADS = 64


def run(lines, *tensors, programs=1, **options):
    """Run instructions that know their thread as ``%r0``, in bytes ``%r1``, and their program as
    ``%r2``; ``%rd0`` and ``%rd1`` are where each has its word of two tensors."""
    begin = """
        ld.param.b64 %rd0, [out]; ld.param.b64 %rd1, [in]; mov.u32 %r0, %tid.x;
        shl.b32 %r1, %r0, 2; cvt.u64.u32 %rd2, %r1; mov.u32 %r2, %ctaid.x;
        add.s64 %rd0, %rd0, %rd2; add.s64 %rd1, %rd1, %rd2;
    """
    text = f"""
        .extern .shared .align 16 .b8 held[];
        .visible .entry example(.param .u64 .ptr .global out, .param .u64 .ptr .global in)
        .reqntid {THREADS}
        {{
        .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<20>; .reg .b64 %rd<9>;
        {begin}
        {lines}
        ret;
        }}
    """
    storages = [(t.data_ptr(), bytes_at(t.data_ptr(), 4 * len(t)), 4) for t in tensors]
    pointers = [t.data_ptr() for t in (tensors * 2)[:2]]
    Machine(parsed(text)).launch((programs, 1, 1), pointers, storages, 4 * THREADS, **options)


def words(values=0):
    return torch.full((THREADS,), values, dtype=torch.int32)


def result(line, kind, *given):
    """What an instruction makes of ``%r3`` and ``%r4``."""
    out, inputs = words(), torch.tensor(given, dtype=kind).view(torch.int32)
    inputs = torch.cat([inputs[0].expand(THREADS), inputs[-1].expand(THREADS)])
    load = f"ld.global.b32 %r3, [%rd1]; ld.global.b32 %r4, [%rd1+{4 * THREADS}];"
    run(f"{load} {line} st.global.b32 [%rd0], %r5;", out, inputs)
    assert len(out.unique()) == 1
    return out[:1]


INTEGERS = {
    "products wrap": ("mul.lo.s32 %r5, %r3, %r4;", (1 << 20, 1 << 11), -(1 << 31)),
    "quotients are cut off": ("div.s32 %r5, %r3, %r4;", (-7, 2), -3),
    "rests have the sign of the first": ("rem.s32 %r5, %r3, %r4;", (-7, 2), -1),
    "no bit is left": ("shl.b32 %r5, %r3, %r4;", (1, 32), 0),
    "the sign is left": ("shr.s32 %r5, %r3, %r4;", (-5, 40), -1),
    "unsigned order": ("max.u32 %r5, %r3, %r4;", (-1, 1), -1),
    "twice as wide": (
        "mul.wide.s32 %rd3, %r3, %r4; shr.s64 %rd3, %rd3, 32; cvt.u32.u64 %r5, %rd3;",
        (-(1 << 20), 1 << 20),
        -256,
    ),
    "bytes": ("prmt.b32 %r5, %r3, %r4, 0x7610;", (0x03020100, 0x07060504), 0x07060100),
    "sign of a byte": ("prmt.b32 %r5, %r3, 0, 0x7778;", (0x80,), 0xFF),
    "field with its sign": ("bfe.s32 %r5, %r3, 4, 8;", (0xF80,), -8),
    "bits": ("popc.b32 %r5, %r3;", (-1,), 32),
    "halves": ("mov.b32 {%rs1, %rs2}, %r3; mov.b32 %r5, {%rs2, %rs1};", (0x00010002,), 0x00020001),
}


@pytest.mark.parametrize(("line", "given", "expected"), INTEGERS.values(), ids=INTEGERS)
def test_integers(line, given, expected):
    assert result(line, torch.int32, *given).item() == expected


NAN, INF = float("nan"), float("inf")
FLOATS = {
    "a number beats NaN": ("max.f32 %r5, %r3, %r4;", (NAN, 1.0), 1.0),
    "unless it is asked for": ("max.NaN.f32 %r5, %r3, %r4;", (NAN, 1.0), NAN),
    "rounded once": ("fma.rn.f32 %r5, %r3, %r3, %r4;", (1 + 2**-12, -1 - 2**-11), 2**-24),
    "denormals are flushed": ("mul.ftz.f32 %r5, %r3, %r4;", (1e-38, 0.5), 0.0),
    "and kept": ("mul.f32 %r5, %r3, %r4;", (2.0**-126, 0.5), 2.0**-127),
    "powers of two": ("ex2.approx.ftz.f32 %r5, %r3;", (-3.0,), 0.125),
    "to bf16 and back": ("cvt.rn.bf16.f32 %rs1, %r3; cvt.f32.bf16 %r5, %rs1;", (1.01,), 1.0078125),
    "from an integer": ("mov.b32 %r6, 16777217; cvt.rn.f32.s32 %r5, %r6;", (0.0,), 16777216.0),
    "unordered": (
        "setp.neu.f32 %p1, %r3, %r3; selp.f32 %r5, 0f3F800000, 0f00000000, %p1;",
        (NAN,),
        1,
    ),
    "ordered": (
        "setp.ne.f32 %p1, %r3, %r4; selp.f32 %r5, 0f3F800000, 0f00000000, %p1;",
        (NAN, 1),
        0,
    ),
}


@pytest.mark.parametrize(("line", "given", "expected"), FLOATS.values(), ids=FLOATS)
def test_floats(line, given, expected):
    found = result(line, torch.float32, *given).view(torch.float32)
    torch.testing.assert_close(
        found, torch.tensor([float(expected)]), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize(
    ("given", "expected"), [(-1.5, -1), (NAN, 0), (INF, (1 << 31) - 1), (-1e10, -(1 << 31))]
)
def test_floats_become_the_nearest_integer_that_there_is(given, expected):
    assert result("cvt.rzi.s32.f32 %r5, %r3;", torch.float32, given).item() == expected


def test_lanes_add_up_what_they_have():
    out = words()
    steps = "".join(
        f"shfl.sync.bfly.b32 %r4, %r3, {k}, 31, -1; add.s32 %r3, %r3, %r4;"
        for k in (16, 8, 4, 2, 1)
    )
    run(f"mov.u32 %r3, %tid.x; {steps} st.global.b32 [%rd0], %r3;", out)
    assert out.tolist() == [sum(range(32))] * 32 + [sum(range(32, 64))] * 32


EXCHANGE = """
    mov.b32 %r3, held; add.s32 %r3, %r3, %r1; st.shared.b32 [%r3], %r0; {}
    xor.b32 %r4, %r1, 128; ld.shared.b32 %r5, [%r4]; st.global.b32 [%rd0], %r5;
"""


def test_warps_exchange_words_behind_a_barrier():
    out = words()
    run(EXCHANGE.format("bar.sync 0;"), out)
    assert out.tolist() == [thread ^ 32 for thread in range(THREADS)]


def test_a_missing_barrier_is_found():
    with pytest.raises(
        AccessError, match=r"a warp reads .* without a barrier, in shared .*ld.shared"
    ):
        run(EXCHANGE.format(""), words())
    with pytest.raises(AccessError, match="a warp writes what was read"):
        run(EXCHANGE.format("bar.sync 0;") + "st.shared.b32 [%r3], %r5;", words())


COPY = """
    mov.b32 %r3, held; add.s32 %r3, %r3, %r1; cp.async.ca.shared.global [%r3], [%rd1], 0x4, {};
    cp.async.commit_group; {} ld.shared.b32 %r5, [%r3]; st.global.b32 [%rd0], %r5;
"""


def test_copies_arrive_when_they_are_waited_for():
    out = words()
    run(COPY.format(4, "cp.async.wait_group 0;"), out, words(7))
    assert out.tolist() == [7] * THREADS
    run(COPY.format(0, "cp.async.wait_group 0;"), out, words(7))
    assert out.tolist() == [0] * THREADS
    with pytest.raises(AccessError, match="a copy to it is under way"):
        run(COPY.format(4, "cp.async.wait_group 1;"), out, words(7))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ld.global.b32 %r3, [%rd0+4];", r"outside of every tensor: ld\.global\.b32 .*line"),
        ("ld.global.b32 %r3, [%rd0+-4];", "outside of every tensor"),
        ("ld.global.b32 %r3, [%rd0+2];", "not aligned"),
        ("ld.shared.b32 %r3, [held+256];", "outside of every tensor"),
    ],
)
def test_accesses_out_of_bounds_are_found(line, message):
    with pytest.raises(AccessError, match=message):
        run(line, words())


def test_a_thread_that_is_masked_may_point_anywhere():
    out = words()
    run("setp.lt.u32 %p1, %r0, 63; @%p1 st.global.b32 [%rd0+4], %r0;", out)
    assert out.tolist() == [0, *range(63)]


@pytest.mark.parametrize("backwards", [False, True])
def test_programs_that_depend_on_each_other_are_found(backwards):
    with pytest.raises(AccessError, match="a program writes what was written by another"):
        run("st.global.b32 [%rd0], %r2;", words(), programs=2, backwards=backwards)
    out = words()
    run("atom.global.gpu.acq_rel.add.u32 %r3, [%rd0], 1;", out, programs=3, backwards=backwards)
    assert out.tolist() == [3] * THREADS


APART = """
    setp.lt.u32 %p1, %r0, {}; mov.b32 %r3, 5; @%p1 bra $SMALL; mov.b32 %r3, 9; bra.uni $MET;
    $SMALL:
    {} add.s32 %r3, %r3, %r0;
    $MET:
    {} st.global.b32 [%rd0], %r3;
"""


def test_threads_that_go_different_ways_meet():
    out = words()
    run(APART.format(3, "", "bar.sync 0;"), out)
    assert out.tolist() == [5, 6, 7] + [9] * (THREADS - 3)


def test_a_barrier_to_which_not_all_come_is_found():
    with pytest.raises(AccessError, match="not all threads come to a barrier"):
        run(APART.format(32, "bar.sync 0;", ""), words())
    with pytest.raises(AccessError, match="not all lanes come"):
        run(APART.format(3, "shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1;", ""), words())


def test_instructions_that_are_not_known_are_named():
    with pytest.raises(UnknownInstruction, match=r"mma\.sync\.aligned\.m16n8k8 .*line"):
        run("mma.sync.aligned.m16n8k8 %r3, %r4, %r5, %r6;", words())


def test_registers_begin_with_what_no_kernel_may_use():
    out = words()
    run("st.global.b32 [%rd0], %r9;", out)
    assert np.isnan(out.view(torch.float32).numpy()).all()
