"""Every kernel compiles to machine code for a Hopper GPU, which interpreting does not show."""

from __future__ import annotations

import pytest
from compile_kernel import compiles

LOGITS = ("*fp32", "*bf16")


@pytest.mark.parametrize("logits", LOGITS)
def test_softmax_statistics(logits: str) -> None:
    types = {
        "logits_ptr": logits,
        "members_ptr": "*i1",
        "peak_ptr": "*fp32",
        "total_ptr": "*fp32",
        "column_ptr": "*i64",
        "row_stride": "i32",
        "width": "i32",
        "rows": "i32",
        "temperature": "fp32",
    }
    flags = {"HAS_MEMBERS": True, "HAS_TEMPERATURE": True, "BLOCK": 4096}
    compiles("softmax_statistics", [("row_statistics_kernel", types, flags)])


@pytest.mark.parametrize("logits", LOGITS)
def test_unit_gradient(logits: str) -> None:
    types = {"gradient_ptr": logits, "scale_ptr": "*fp32", "row_stride": "i32", "width": "i32"}
    compiles("unit_gradient", [("scale_rows_kernel", types, {"BLOCK": 8192})])
