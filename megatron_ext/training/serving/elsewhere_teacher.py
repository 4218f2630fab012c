"""A teacher elsewhere as the trainer has it: asked ahead, measured, and left at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ext.losses import TeacherTargets
from megatron_ext.teachers import TokenInputs
from megatron_ext.teachers.serving import RemoteTeacher


@dataclass(frozen=True, slots=True, kw_only=True)
class ElsewhereTeacher:
    """A ``Teacher`` in other processes than the student's."""

    remote: RemoteTeacher

    prefetch: int
    """Global batches that it is asked for ahead."""

    finish: Callable[[], None] = lambda: None
    """Tells its processes that the student needs them no more."""

    end: Callable[[], None] = lambda: None
    """Ends its processes, where the student's rank has started any."""

    def targets(self, microbatches: Sequence[TokenInputs]) -> list[TeacherTargets]:
        """See ``RemoteTeacher.targets``."""
        return self.remote.targets(microbatches)

    def close(self, *, is_finished: bool) -> None:
        """Leave it.

        Args:
            is_finished: Whether the run has ended well.
        """
        if is_finished:
            self.finish()
        self.remote.close()
        self.end()
