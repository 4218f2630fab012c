"""Kernels whose rows are as far apart as wide loads need, for ``test_kernels_compile.py``."""

from tests.ops.compile_kernel import arguments

ROW = "logits: *bf16:16; row_stride: i32:16; width: i32; temperature: fp32; "
PAIR = "student teacher: *bf16:16; width rows: i32; student_stride teacher_stride: i32:16; "
SUMS = "peak total: *fp32; column: *i64; held_width: i32:16"
PLAIN = {"HAS_TEMPERATURE": False, "BLOCK": 4096}


def wide_variants():
    """Module and variant, at vocabularies that end anywhere in a padded row."""
    no_sets = {"members_ptr": None, "read_ptr": None, "HAS_MEMBERS": False, "HAS_READ": False}
    row = arguments(f"{ROW} rows: i32; {SUMS}")
    pair = arguments(f"{PAIR} temperature: fp32; {SUMS}")
    no_read = {"read_ptr": None, "HAS_READ": False, "HAS_PLAIN": False}
    bits = arguments(
        f"{ROW} set bits: *i32; sums: *fp32; masked: *i1; padded_width: i32:16; "
        "words rows leading members_end: i32; column: *i64"
    )
    means = arguments(
        f"{ROW} order offsets: *i32; out peak log_sum: *fp32; valid_width first_chunk: i32"
    )
    every = {"HAS_UNSCALED": False, "top_ptr": None}
    return [
        ("softmax_kernels", ("row_statistics_kernel", row, no_sets | PLAIN)),
        ("vocab_kl.triton_kernels", ("pair_statistics_kernel", pair, no_read | PLAIN)),
        ("partition_kl.triton_kernels", ("split_statistics_kernel", bits, every | PLAIN)),
        (
            "chunk_kernels",
            ("chunk_means_kernel", means | {"width": "i32:16"}, PLAIN),
        ),
    ]
