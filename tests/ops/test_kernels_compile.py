"""Every kernel compiles to machine code for a Hopper GPU, which interpreting does not show."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ops.compile_kernel import Variant, compiles
from tests.ops.projected_kl_variants import sum_variants, sweep_variants
from tests.ops.wide_load_variants import wide_variants

LOGITS = ("*bf16", "*fp32")


def test_softmax_statistics() -> None:
    types = {
        "members_ptr": "*i1",
        "read_ptr": "*i1",
        "peak_ptr": "*fp32",
        "total_ptr": "*fp32",
        "column_ptr": "*i64",
        "row_stride": "i32",
        "width": "i32",
        "held_width": "i32",
        "rows": "i32",
        "temperature": "fp32",
    }
    flags = {"HAS_MEMBERS": True, "HAS_READ": True, "HAS_TEMPERATURE": True, "BLOCK": 4096}
    compiles(
        "softmax_kernels",
        [("row_statistics_kernel", {"logits_ptr": kind, **types}, flags) for kind in LOGITS],
    )


def test_unit_gradient() -> None:
    types = {"scale_ptr": "*fp32", "row_stride": "i32", "width": "i32"}
    compiles(
        "triton_math",
        [
            ("scale_rows_kernel", {"gradient_ptr": kind, **types}, {"BLOCK": 8192})
            for kind in LOGITS
        ],
    )


def _mean_rows(*more: str) -> dict[str, str]:
    """Types of what a kernel needs of a model's rows, and of ``more`` integers."""
    pointers = {"order_ptr": "*i32", "offsets_ptr": "*i32"}
    pointers |= {"peak_ptr": "*fp32", "log_sum_ptr": "*fp32"}
    return pointers | {"temperature": "fp32"} | dict.fromkeys(more, "i32")


def test_chunk_distributions() -> None:
    types = _mean_rows("first_chunk", "row_stride", "width", "valid_width") | {"out_ptr": "*fp32"}
    flags = {"HAS_TEMPERATURE": True, "BLOCK": 4096}
    compiles(
        "chunk_kernels",
        [("chunk_means_kernel", {"logits_ptr": kind, **types}, flags) for kind in LOGITS],
    )


def test_sorted_l1() -> None:
    candidates = {"columns_ptr": "*i32", "signs_ptr": "*i8", "centre_ptr": "*fp32"}
    flags = {"HAS_TEMPERATURE": True, "BLOCK": 1024}
    variants: list[Variant] = []
    for kind in LOGITS:
        select = _mean_rows(
            "first_chunk", "row_stride", "width", "padded_width", "places", "capacity"
        )
        select |= {
            "logits_ptr": kind,
            "excluded_ptr": "*i1",
            "values_ptr": "*fp32",
            "columns_ptr": "*i32",
            "rest_ptr": "*fp32",
        }
        variants.append(("select_kernel", select, flags | {"HAS_EXCLUDED": True, "BLOCK": 4096}))
        keep = _mean_rows("first_chunk", "row_stride", "capacity") | candidates
        keep |= {"logits_ptr": kind, "kept_ptr": kind}
        variants.append(("keep_chosen_kernel", keep, flags))
        spread = _mean_rows("first_chunk", "row_stride", "gradient_stride", "width", "valid_width")
        spread |= {"logits_ptr": kind, "gradient_ptr": kind}
        spread |= {"centre_ptr": "*fp32", "scale_ptr": "*fp32"}
        variants.append(("spread_kernel", spread, flags | {"BLOCK": 4096}))
        write = _mean_rows("first_chunk", "gradient_stride", "capacity") | candidates
        write |= {"kept_ptr": kind, "gradient_ptr": kind, "weight": "fp32"}
        write |= {"base_ptr": "*fp32", "scale_ptr": "*fp32"}
        variants.append(("write_chosen_kernel", write, flags | {"HAS_BASE": True}))
    compiles("sorted_l1.triton_kernels", variants)


def test_token_likelihood() -> None:
    types = {
        "members_ptr": "*i1",
        "vectors_ptr": "*fp32",
        "column_ptr": "*i64",
        "logits_stride": "i32",
        "gradient_stride": "i32",
        "width": "i32",
        "padded_width": "i32",
        "rows": "i32",
        "temperature": "fp32",
    }
    flags = {"HAS_MEMBERS": True, "HAS_TEMPERATURE": True, "BLOCK": 4096}
    variants = []
    for kind in LOGITS:
        pointers = {"logits_ptr": kind, "gradient_ptr": kind}
        variants += [("token_gradient_kernel", {**pointers, **types}, flags)]
    alone = {"members_ptr": None, "HAS_MEMBERS": False, "HAS_TEMPERATURE": False, "BLOCK": 4096}
    del types["members_ptr"]
    variants += [("token_gradient_kernel", {**pointers, **types}, alone)]
    compiles("token_likelihood_kernels", variants)


def test_vocab_kl() -> None:
    numbers = {
        "student_stride": "i32",
        "teacher_stride": "i32",
        "width": "i32",
        "held_width": "i32",
        "rows": "i32",
        "temperature": "fp32",
    }
    statistics = {
        **numbers,
        "read_ptr": "*i1",
        "peak_ptr": "*fp32",
        "total_ptr": "*fp32",
        "column_ptr": "*i64",
    }
    sweep = {
        **numbers,
        "vectors_ptr": "*fp32",
        "column_ptr": "*i64",
        "sums_ptr": "*fp32",
        "gradient_stride": "i32",
        "padded_width": "i32",
        "mixture": "fp32",
    }
    both = {"HAS_READ": True, "HAS_PLAIN": True, "HAS_TEMPERATURE": True, "BLOCK": 4096}
    flags = {"HAS_LABELS": True, "HAS_TEMPERATURE": True, "BLOCK": 4096}
    passes = [
        ("forward", True, True),
        ("reverse", True, False),
        ("reverse", False, True),
        ("jensen_shannon", False, True),
    ]
    variants = []
    for kind in LOGITS:
        pair = {"student_ptr": kind, "teacher_ptr": kind}
        variants += [("pair_statistics_kernel", {**pair, **statistics}, both)]
        pair["gradient_ptr"] = kind
        for direction, sums, gradient in passes:
            parts = {"DIRECTION": direction, "HAS_SUMS": sums, "HAS_GRADIENT": gradient}
            variants += [("vocab_kl_kernel", {**pair, **sweep}, {**parts, **flags})]
    compiles("vocab_kl.triton_kernels", variants)


def test_partition_kl() -> None:
    sizes = dict.fromkeys(("row_stride", "width", "rows"), "i32")
    split = {"set_ptr": "*i32", "bits_ptr": "*i32", "sums_ptr": "*fp32", "column_ptr": "*i64"}
    split |= {
        **sizes,
        "padded_width": "i32",
        "masked_ptr": "*i1",
        "words": "i32",
        "temperature": "fp32",
    }
    pair = {
        "partner_ptr": "*i32",
        "student_row_ptr": "*i64",
        "teacher_row_ptr": "*i64",
        "norms_ptr": "*fp32",
        "row_stride": "i32",
        "teacher_stride": "i32",
        "arrived_stride": "i32",
        "width": "i32",
        "chunks": "i32",
        "temperature": "fp32",
    }
    tokens = {"label_ptr": "*i64", "tokens_ptr": "*fp32", "gradient_stride": "i32"}
    tokens |= {"padded_width": "i32", "rows": "i32"}
    single = {**pair, **tokens, "factors_ptr": "*fp32", "sums_ptr": "*fp32", "mixture": "fp32"}
    lost = {**pair, "is_masked_ptr": "*i1", "lost_ptr": "*fp32"}
    others = {**sizes, **tokens, "set_ptr": "*i32", "rests_ptr": "*fp32"}
    entries = {"row_ptr": "*i64", "column_ptr": "*i64", "value_ptr": "*fp32", "count": "i32"}
    entries |= {"gradient_stride": "i32"}

    block = {"BLOCK": 4096}
    every = {"HAS_TEMPERATURE": True, "HAS_UNSCALED": True, "EVERY_ROW": True, **block}
    few = {"HAS_TEMPERATURE": False, "HAS_UNSCALED": False, "EVERY_ROW": False, **block}
    alone = {"HAS_TEMPERATURE": False, "HAS_ARRIVED": False, **block}
    sent = {"HAS_TEMPERATURE": True, "HAS_ARRIVED": True, **block}
    variants = []
    for kind in LOGITS:
        logits, written = {"logits_ptr": kind}, {"gradient_ptr": kind}
        both = logits | {"teacher_ptr": kind, "arrived_ptr": kind}
        variants += [
            ("split_statistics_kernel", logits | split, every),
            ("split_statistics_kernel", logits | split, few),
            ("masked_mass_kernel", both | lost, sent),
            ("other_rows_kernel", logits | written | others, {"HAS_LABELS": True, **block}),
            ("store_entries_kernel", written | entries, {"BLOCK": 256}),
        ]
        for direction, sums, gradient, labels, flags in (
            ("forward", True, True, True, alone),
            ("reverse", True, False, False, sent),
            ("reverse", False, True, True, sent),
            ("jensen_shannon", False, True, False, alone),
        ):
            passes = {"DIRECTION": direction, "STORES_SUMS": sums, "STORES_GRADIENT": gradient}
            flags = {**passes, "HAS_LABELS": labels, **flags}
            variants += [("single_rows_kernel", both | written | single, flags)]
    compiles("partition_kl.triton_kernels", variants)


def test_matched_divergence() -> None:
    pointers = dict.fromkeys(
        f"{side}_{name}_ptr" for side in ("student", "teacher") for name in ("order", "offsets")
    )
    types = dict.fromkeys(pointers, "*i32") | {"pairs_ptr": "*i32", "column_ptr": "*i64"}
    for side in ("student", "teacher"):
        types |= {f"{side}_{name}_ptr": "*fp32" for name in ("peak", "log_sum", "used")}
    vectors = ("value", "row_slope", "best", "base", "shift", "centre", "scale")
    types |= {f"{name}_ptr": "*fp32" for name in vectors}
    strides = ("student_stride", "teacher_stride", "gradient_stride", "moved_stride")
    sizes = ("first_chunk", "width", "padded_width", "valid_width", "column_start")
    types |= dict.fromkeys((*strides, *sizes), "i32")
    types |= {"temperature": "fp32", "mixture": "fp32"}
    variants: list[Variant] = []
    for kind, direction, is_moved in (
        ("*bf16", "reverse", True),
        ("*fp32", "forward", False),
        ("*bf16", "jensen_shannon", False),
    ):
        flags = {"DIRECTION": direction, "MOVED": is_moved, "HAS_TEMPERATURE": True, "BLOCK": 4096}
        own = types | {"student_ptr": kind, "teacher_ptr": kind, "gradient_ptr": kind}
        if is_moved:
            own["moved_ptr"] = "*fp32"
        else:
            flags["moved_ptr"] = None
        for kernel, left_out in (("compare_kernel", _NOT_COMPARED), ("gradient_kernel", _VALUES)):
            taken = {name: value for name, value in own.items() if name not in left_out}
            variants.append((kernel, taken, flags))
    compiles("matched_divergence.triton_kernels", variants)


@pytest.mark.parametrize("variants", [sum_variants, sweep_variants])
def test_projected_kl(variants: Callable[[], list[Variant]]) -> None:
    compiles("projected_kl.triton_kernels", variants())


@pytest.mark.parametrize(("module", "variant"), wide_variants())
def test_rows_are_read_16_bytes_at_once(module: str, variant: Variant) -> None:
    compiles(module, [variant], containing="ld.global.v4")


_VALUES = ("value_ptr", "row_slope_ptr", "best_ptr", "column_ptr", "column_start", "padded_width")
_NOT_COMPARED = (
    "gradient_ptr",
    "gradient_stride",
    "base_ptr",
    "shift_ptr",
    "centre_ptr",
    "scale_ptr",
    "valid_width",
)
