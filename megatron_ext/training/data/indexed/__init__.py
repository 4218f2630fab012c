"""Megatron's indexed datasets, ``.bin`` with ``.idx``, as texts that a run reads."""
