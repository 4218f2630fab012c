"""Every kernel compiles to machine code for a Hopper GPU, which interpreting does not show."""

from __future__ import annotations

from compile_kernel import compiles

LOGITS = ("*fp32", "*bf16")


def test_softmax_statistics() -> None:
    types = {
        "members_ptr": "*i1",
        "read_ptr": "*i1",
        "peak_ptr": "*fp32",
        "total_ptr": "*fp32",
        "column_ptr": "*i64",
        "row_stride": "i32",
        "width": "i32",
        "rows": "i32",
        "temperature": "fp32",
    }
    flags = {"HAS_MEMBERS": True, "HAS_READ": True, "HAS_TEMPERATURE": True, "BLOCK": 4096}
    compiles(
        "softmax_statistics",
        [("row_statistics_kernel", {"logits_ptr": kind, **types}, flags) for kind in LOGITS],
    )


def test_unit_gradient() -> None:
    types = {"scale_ptr": "*fp32", "row_stride": "i32", "width": "i32"}
    compiles(
        "unit_gradient",
        [
            ("scale_rows_kernel", {"gradient_ptr": kind, **types}, {"BLOCK": 8192})
            for kind in LOGITS
        ],
    )
