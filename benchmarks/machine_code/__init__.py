"""Machine code of kernels, read without a GPU; see ``benchmarks/kernel_code.py``."""
