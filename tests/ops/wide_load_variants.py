"""Kernels whose rows are as far apart as wide loads need, for ``test_kernels_compile.py``."""

from __future__ import annotations

from tests.ops.compile_kernel import Variant

ROW = {"logits_ptr": "*bf16:16", "row_stride": "i32:16", "width": "i32", "temperature": "fp32"}
PAIR = {"student_ptr": "*bf16:16", "teacher_ptr": "*bf16:16", "width": "i32", "rows": "i32"}
PAIR |= {"student_stride": "i32:16", "teacher_stride": "i32:16", "temperature": "fp32"}
SUMS = {"peak_ptr": "*fp32", "total_ptr": "*fp32", "column_ptr": "*i64"}
PLAIN = {"HAS_TEMPERATURE": False, "BLOCK": 4096}


def wide_variants() -> list[tuple[str, Variant]]:
    """Module and variant, at vocabularies that end anywhere in a padded row."""
    no_sets = {"members_ptr": None, "read_ptr": None, "HAS_MEMBERS": False, "HAS_READ": False}
    row = ROW | SUMS | {"held_width": "i32:16", "rows": "i32"}
    pair = PAIR | SUMS | {"held_width": "i32:16"}
    no_read = {"read_ptr": None, "HAS_READ": False, "HAS_PLAIN": False}
    bits = {"set_ptr": "*i32", "bits_ptr": "*i32", "sums_ptr": "*fp32", "masked_ptr": "*i1"}
    bits |= {"padded_width": "i32:16", "words": "i32", "rows": "i32", "column_ptr": "*i64"}
    means = {"order_ptr": "*i32", "offsets_ptr": "*i32", "out_ptr": "*fp32", "valid_width": "i32"}
    means |= {"peak_ptr": "*fp32", "log_sum_ptr": "*fp32", "first_chunk": "i32"}
    return [
        ("softmax_kernels", ("row_statistics_kernel", row, no_sets | PLAIN)),
        ("vocab_kl.triton_kernels", ("pair_statistics_kernel", pair, no_read | PLAIN)),
        (
            "partition_kl.triton_kernels",
            (
                "split_statistics_kernel",
                ROW | bits,
                {"HAS_UNSCALED": False, "EVERY_ROW": True} | PLAIN,
            ),
        ),
        (
            "chunk_kernels",
            ("chunk_means_kernel", ROW | means | {"width": "i32:16"}, PLAIN),
        ),
    ]
