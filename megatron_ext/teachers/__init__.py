"""Frozen models to learn from."""

from megatron_ext.teachers.base import Teacher, TokenInputs

__all__ = ["Teacher", "TokenInputs"]
