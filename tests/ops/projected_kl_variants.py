"""The kernels of the projected KL in each of their forms, for ``test_kernels_compile.py``."""

import pytest

from tests.ops.compile_kernel import arguments
from tests.ops.kernel_case import DIRECTIONS

triton_kernels = pytest.importorskip("megatron_ext.ops.projected_kl.triton_kernels")
single_kernel = pytest.importorskip("megatron_ext.ops.projected_kl.single_kernel")

LOGITS = ("*bf16", "*fp32")

FLOATS = {"temperature": "fp32", "mixture": "fp32"}
POINTERS = arguments(
    "lse student_lse carried_lse teacher_lse plain_lse weight out slope values scratch crossed "
    "residual mass row_mass partial dots grad_scale label_weight: *fp32; "
    "is_scaled: *i1; label row column student_column teacher_column: *i64"
)


def variant(name, logits, **constants):
    """Types of every argument of a kernel that ``constants`` does not name."""
    types = {}
    module = single_kernel if name == "single_kernel" else triton_kernels
    for argument in getattr(module, name).arg_names:
        if argument in ("logits_ptr", "student_ptr", "teacher_ptr", "gradient_ptr"):
            types[argument] = logits
        elif argument.endswith("_ptr"):
            types[argument] = POINTERS.get(argument, "*i32")
        else:
            types[argument] = FLOATS.get(argument, "i32")
    return name, {key: kind for key, kind in types.items() if key not in constants}, constants


def sum_variants():
    group = {"CHUNKS": 64, "COLUMNS": 32}
    found = [
        variant("sparse_sums_kernel", "*bf16", CHUNKS=64, SUMS=32, BY_CHUNK=by_chunk)
        for by_chunk in (False, True)
    ]
    for logits in LOGITS:
        found.append(variant("residual_means_kernel", logits, HAS_TEMPERATURE=True, **group))
        found.append(variant("outside_kernel", logits, HAS_LABELS=True, BLOCK=1024))
    unlabelled = dict.fromkeys(("plain_lse_ptr", "label_ptr", "label_weight_ptr"), None)
    block = {"BLOCK": 1024}
    learned = {"DIRECTION": "reverse", "HAS_TEMPERATURE": True, "CHUNKS": 64}
    return [
        *found,
        variant("outside_kernel", "*bf16", HAS_LABELS=False, **unlabelled, **block),
        variant("chunk_sums_kernel", "*bf16", **block),
        variant("crossing_teacher_kernel", "*bf16", HAS_TEMPERATURE=True, **group),
        variant("entry_gradient_kernel", "*bf16", **learned, **block),
    ]


def single_variants():
    found = []
    for logits in LOGITS:
        flags = ("IS_ALIGNED", "SEVERAL", "HAS_GRADIENT", "HAS_DIAGNOSTICS", "HAS_LABELS")
        whole = dict.fromkeys(flags, True)
        sizes = {"HAS_TEMPERATURE": True, "BLOCK": 1024, "PLACES": 64}
        found.append(variant("single_kernel", logits, **sizes, **whole))
    nothing = ("gradient_ptr", "plain_lse_ptr", "label_ptr", "label_weight_ptr")
    alone = dict.fromkeys(flags, False) | dict.fromkeys(nothing, None)
    return [*found, variant("single_kernel", "*bf16", **sizes, **alone)]


def sweep_variants():
    shared = {"HAS_TEMPERATURE": True, "HAS_DIAGNOSTICS": True, "BLOCK": 1024}
    wanted = shared | {"HAS_DOTS": True, "HAS_GRADIENT": True, "HAS_LABELS": True}
    found = [
        variant("sweep_kernel", logits, DIRECTION="forward", PASS="values", **wanted)
        for logits in LOGITS
    ]
    for direction in DIRECTIONS:
        chosen = {"DIRECTION": direction}
        group = {"HAS_CROSSING": True, "CHUNKS": 64, "COLUMNS": 32}
        found.append(variant("slopes_kernel", "*bf16", **group, **shared, **chosen))
        found.append(variant("sweep_kernel", "*bf16", PASS="gradient", **wanted, **chosen))
    nothing = ("dots_ptr", "gradient_ptr", "plain_lse_ptr", "label_ptr", "label_weight_ptr")
    alone = dict.fromkeys(("HAS_DOTS", "HAS_GRADIENT", "HAS_LABELS"), False)
    alone |= dict.fromkeys(nothing, None)
    found.append(
        variant("sweep_kernel", "*bf16", DIRECTION="reverse", PASS="values", **shared, **alone)
    )
    return found
