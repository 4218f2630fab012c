"""The projections that a run trains, as files that another run can start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.losses import LearnedProjection
from megatron_ext.training.config import TEACHER
from megatron_ext.training.teacher_term import TeacherTerm


def learned_projection_file(teacher: str) -> str:
    """Name of the file with what a run has made of its projection to a teacher's vocabulary."""
    suffix = "" if teacher == TEACHER else f"-{teacher}"
    return f"learned_projection{suffix}.safetensors"


@dataclass(frozen=True, slots=True)
class LearnedProjections:
    """Those of one run."""

    run_dir: Path

    of_teachers: Mapping[str, LearnedProjection]
    """By teacher, on the last stage; none elsewhere."""

    @classmethod
    def of(cls, run_dir: Path, term: TeacherTerm) -> LearnedProjections:
        """Those among what the objectives of ``term`` read."""
        found = {name: constants.learned for name, constants in term.constants.items()}
        return cls(run_dir, {name: its for name, its in found.items() if its is not None})

    def write(self) -> None:
        """Replace each file by the shares of now; one rank of the last stage calls it.

        Raises:
            ProjectionError: It cannot be written.
        """
        for name, learned in self.of_teachers.items():
            learned.to_projection().save(self.run_dir / learned_projection_file(name))
