"""One microbatch, with all that the student learns from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron_ext.losses import KnownAhead, TeacherTargets
from megatron_ext.training.data.microbatch import Microbatch


class Lesson(NamedTuple):
    """What the student's schedule gets of each microbatch."""

    batch: Microbatch

    targets: Mapping[str, TeacherTargets]
    """By teacher, on the last stage; nothing elsewhere."""

    known: Mapping[str, KnownAhead]
    """What each teacher's objective is given, without the rows that another teacher was chosen for;
    on every stage, but chosen for on the last alone."""
