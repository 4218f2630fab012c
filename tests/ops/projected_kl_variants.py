"""The kernels of the projected KL in each of their forms, for ``test_kernels_compile.py``."""

import pytest

from tests.ops.compile_kernel import arguments
from tests.ops.kernel_case import DIRECTIONS

triton_kernels = pytest.importorskip("megatron_ext.ops.projected_kl.triton_kernels")
single_kernel = pytest.importorskip("megatron_ext.ops.projected_kl.single_kernel")
summed_kernels = pytest.importorskip("megatron_ext.ops.projected_kl.summed_kernels")
number_kernels = pytest.importorskip("megatron_ext.ops.projected_kl.number_kernels")

LOGITS = ("*bf16", "*fp32")

FLOATS = {"temperature": "fp32", "mixture": "fp32", "scale": "fp32", "weight": "fp32"}
POINTERS = arguments(
    "lse student_lse carried_lse teacher_lse plain_lse weight out slope values scratch crossed "
    "value residual mass row_mass partial dots grad_scale label_weight peak log_sum left_out "
    "loss single sums largest threshold rest: *fp32; is_scaled compared: *i1; "
    "label row column student_column teacher_column: *i64"
)


ALL_COLUMNS = {"HAS_REST": False, "threshold_ptr": None, "rest_ptr": None}


def variant(name, logits, **constants):
    """Types of every argument of a kernel that ``constants`` does not name."""
    types = {}
    modules = (triton_kernels, single_kernel, summed_kernels, number_kernels)
    module = next(each for each in modules if name in vars(each))
    for argument in getattr(module, name).arg_names:
        if argument in ("logits_ptr", "student_ptr", "teacher_ptr", "gradient_ptr"):
            types[argument] = logits
        elif argument.endswith("_ptr"):
            types[argument] = POINTERS.get(argument, "*i32")
        else:
            types[argument] = FLOATS.get(argument, "i32")
    return name, {key: kind for key, kind in types.items() if key not in constants}, constants


def other_variants():
    found = [variant("outside_kernel", logits, HAS_LABELS=True, BLOCK=1024) for logits in LOGITS]
    unlabelled = dict.fromkeys(("plain_lse_ptr", "label_ptr", "label_weight_ptr"), None)
    block = {"BLOCK": 1024}
    learned = {"DIRECTION": "reverse", "HAS_TEMPERATURE": True, "CHUNKS": 32}
    return [
        *found,
        variant("outside_kernel", "*bf16", HAS_LABELS=False, **unlabelled, **block),
        variant("entry_gradient_kernel", "*bf16", **learned, **block),
    ]


def number_variants():
    both = {"HAS_SINGLES": True, "PARTS": 16, "BLOCK": 128}
    sweep_alone = {"HAS_SINGLES": False, "PARTS": 1, "BLOCK": 128}
    without = ("single_ptr", "single_best_ptr", "chunk_ptr", "is_scaled_ptr", "grad_scale_ptr")
    sweep_alone |= dict.fromkeys(without, None)
    return [
        variant("chunk_numbers_kernel", "*bf16", BLOCK=128),
        variant("chunk_numbers_kernel", "*bf16", weight_ptr=None, BLOCK=128),
        *(variant("label_numbers_kernel", logits, BLOCK=1024) for logits in LOGITS),
        variant("label_numbers_kernel", "*bf16", weight_ptr=None, BLOCK=1024),
        variant("chunk_values_kernel", "*bf16", **both, HAS_DIAGNOSTICS=True),
        variant("chunk_values_kernel", "*bf16", **sweep_alone, HAS_DIAGNOSTICS=False),
    ]


def summed_variants():
    tempered = {"CHUNKS": 32, "HAS_TEMPERATURE": True}
    means = tempered | {"COLUMNS": 32, "BLOCK": 128}
    slopes = tempered | {"COLUMNS": 8, "BLOCK": 64}
    rows = tempered | {"SUMS": 32, "BLOCK": 128}
    flags = ("HAS_SINGLES", "IS_ALIGNED", "HAS_GRADIENT", "HAS_LABELS")
    nothing = ("gradient_ptr", "plain_lse_ptr", "label_ptr", "label_weight_ptr")
    alone = dict.fromkeys(flags, False) | dict.fromkeys(nothing, None)
    crossing = {"HAS_CROSSING": True, "HAS_DIAGNOSTICS": True, "DIRECTION": "jensen_shannon"}
    own = {"HAS_CROSSING": False, "HAS_DIAGNOSTICS": False, "DIRECTION": "forward"}
    own |= {"crossed_ptr": None}
    every = {"PASS": "values", **ALL_COLUMNS}
    return [
        *(variant("residual_means_kernel", x, IS_ALIGNED=x == "*bf16", **means) for x in LOGITS),
        variant("column_sums_kernel", "*bf16", CHUNKS=32, SUMS=32, ENTRIES=64),
        variant("summed_slopes_kernel", "*fp32", **slopes, **crossing, **every),
        variant("summed_slopes_kernel", "*bf16", **slopes, **own, **every),
        *(
            variant("summed_slopes_kernel", "*bf16", HAS_REST=True, PASS=which, **slopes, **own)
            for which in ("rest", "values")
        ),
        *(
            variant("residual_gradients_kernel", x, **rows, **dict.fromkeys(flags, True))
            for x in LOGITS
        ),
        variant("residual_gradients_kernel", "*bf16", **rows, **alone),
        variant("crossing_teacher_kernel", "*bf16", COLUMNS=32, **tempered),
    ]


def single_variants():
    flags = ("IS_ALIGNED", "HAS_GRADIENT", "HAS_DIAGNOSTICS", "HAS_LABELS")
    sizes = {"HAS_TEMPERATURE": True, "BLOCK": 512, "PARTS": 16}
    found = [
        variant("single_kernel", logits, **sizes, **dict.fromkeys(flags, True)) for logits in LOGITS
    ]
    nothing = ("gradient_ptr", "plain_lse_ptr", "label_ptr", "label_weight_ptr")
    alone = dict.fromkeys(flags, False) | dict.fromkeys(nothing, None)
    return [*found, variant("single_kernel", "*bf16", **sizes, **alone)]


def sweep_variants():
    shared = {"HAS_TEMPERATURE": True, "HAS_DIAGNOSTICS": True, "BLOCK": 1024}
    every = shared | ALL_COLUMNS
    wanted = {"HAS_DOTS": True, "HAS_GRADIENT": True, "HAS_LABELS": True}
    found = [
        variant("sweep_kernel", logits, DIRECTION="forward", PASS="values", **wanted, **every)
        for logits in LOGITS
    ]
    for direction in DIRECTIONS:
        chosen = {"DIRECTION": direction}
        found.append(variant("sweep_kernel", "*bf16", PASS="gradient", **wanted, **every, **chosen))
    nothing = ("dots_ptr", "gradient_ptr", "plain_lse_ptr", "label_ptr", "label_weight_ptr")
    alone = dict.fromkeys(("HAS_DOTS", "HAS_GRADIENT", "HAS_LABELS"), False)
    alone |= dict.fromkeys(nothing, None)
    reverse = {"DIRECTION": "reverse"}
    return [
        *found,
        variant("sweep_kernel", "*bf16", PASS="values", **every, **alone, **reverse),
        variant("sweep_kernel", "*bf16", PASS="rest", HAS_REST=True, **shared, **alone, **reverse),
        variant(
            "sweep_kernel", "*bf16", PASS="values", HAS_REST=True, **shared, **wanted, **reverse
        ),
    ]


def learned_variants():
    """Of learned entries alone, without a gradient of the logits."""
    nothing = ("gradient_ptr", "plain_lse_ptr", "label_ptr", "label_weight_ptr")
    flags = {"HAS_DOTS": True, "HAS_GRADIENT": False, "HAS_LABELS": False, "BLOCK": 1024}
    flags |= {"HAS_TEMPERATURE": True, "HAS_DIAGNOSTICS": True, "PASS": "values", **ALL_COLUMNS}
    return [
        variant("sweep_kernel", "*bf16", DIRECTION=direction, **flags, **dict.fromkeys(nothing))
        for direction in ("forward", "reverse")
    ]
