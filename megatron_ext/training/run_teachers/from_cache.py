"""A teacher whose targets are in files."""

from __future__ import annotations

from megatron_ext.training.first_weights import teacher_vocab_shard
from megatron_ext.training.learning_step import TaughtBy, run_projection
from megatron_ext.training.run_teachers.teacher_parts import StudentParts, TeacherParts
from megatron_ext.training.teacher_cache.opening import open_cached_teacher


def teacher_from_cache(name: str, run: StudentParts) -> TeacherParts:
    """Open its cache.

    Collectives: those of ``teacher_vocab_shard``, ``open_cached_teacher`` and ``run_projection``.
    """
    shard = teacher_vocab_shard(run.config, name, run.tokenizer(name), run.groups)
    cached = open_cached_teacher(run.config, name, shard=shard, groups=run.groups)
    projection = run_projection(run.config, run.inputs, name, run.groups)
    return TeacherParts(TaughtBy(name, None, shard, projection, None), cached=cached)
