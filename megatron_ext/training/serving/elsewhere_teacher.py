"""A teacher elsewhere as the trainer has it: asked ahead, measured, and left at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch.distributed as dist

from megatron_ext.losses import TeacherTargets
from megatron_ext.teachers import Teacher, TokenInputs
from megatron_ext.teachers.serving import RemoteTeacher


class ElsewhereTeacher:
    """A ``Teacher`` in other processes than the student's.

    Args:
        remote: This rank's side of it.
        prefetch: Global batches that it is asked for ahead.
        finish: Tells its processes that the student needs them no more.
        end: Ends its processes, where the student's rank has started any.
    """

    def __init__(
        self,
        remote: RemoteTeacher,
        *,
        prefetch: int,
        finish: Callable[[], None] = lambda: None,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self.remote = remote
        self.prefetch = prefetch
        self._finish = finish
        self._end = end
        self._asked = 0

    def targets(self, microbatches: Sequence[TokenInputs]) -> list[TeacherTargets]:
        """See ``RemoteTeacher.targets``."""
        return self.remote.targets(microbatches)

    def ask_ahead(self, batches: Sequence[tuple[int, Sequence[TokenInputs]]]) -> None:
        """Ask for what was not asked for, at most ``prefetch`` global batches ahead.

        No collectives.

        Args:
            batches: Iteration and microbatches of the global batch that is trained on next, and of
                those behind it.
        """
        for iteration, microbatches in batches[: 1 + self.prefetch] if self.prefetch else ():
            if iteration > self._asked:
                self.remote.ask(microbatches)
                self._asked = iteration

    def close(self, *, is_finished: bool) -> None:
        """Leave it.

        Args:
            is_finished: Whether the run has ended well.
        """
        with ExitStack() as stack:
            stack.callback(self._end)
            stack.callback(self.remote.close)
            if is_finished:
                self._finish()


def elsewhere(teachers: Mapping[str, Teacher]) -> dict[str, ElsewhereTeacher]:
    """Those of a run that are elsewhere, by name."""
    return {name: its for name, its in teachers.items() if isinstance(its, ElsewhereTeacher)}


def leave(teachers: Mapping[str, ElsewhereTeacher], *, is_finished: bool) -> None:
    """Close all of them.

    Collectives: one barrier where there are any and the run has ended well, so that no replica's
    leaving looks to a teacher as if all had left.
    """
    if teachers and is_finished:
        dist.barrier()
    for teacher in teachers.values():
        teacher.close(is_finished=is_finished)
