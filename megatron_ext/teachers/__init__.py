"""Frozen models to learn from."""

from megatron_ext.teachers.base import Teacher, TokenInputs
from megatron_ext.teachers.megatron_teacher import MegatronTeacher

__all__ = ["MegatronTeacher", "Teacher", "TokenInputs"]
