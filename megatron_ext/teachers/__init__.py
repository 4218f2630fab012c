"""Frozen teachers and their targets: on the student's ranks, or in other processes."""

from megatron_ext.teachers.base import Teacher, TokenInputs

__all__ = ["Teacher", "TokenInputs"]
