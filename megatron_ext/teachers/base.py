"""What a teacher is. B batch, T tokens of whole rows, S those that this rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from megatron_ext.losses.targets import TeacherTargets
    from megatron_ext.teachers.token_rows import TokenRows


class TokenInputs(Protocol):
    """One microbatch in the teacher's tokens."""

    @property
    def tokens(self) -> torch.Tensor:
        """[B, S] int64"""

    @property
    def position_ids(self) -> torch.Tensor:
        """[B, S] int64"""

    @property
    def attention_mask(self) -> torch.Tensor | None:
        """[B, 1, S, T] bool: what a position does not see; None where that is all behind it."""

    @property
    def rows(self) -> TokenRows | None:
        """The same rows whole, on the host; only a teacher elsewhere reads them."""


class Teacher(Protocol):
    """A frozen model that predicts every position of the microbatches it is given."""

    def targets(self, microbatches: Sequence[TokenInputs]) -> list[TeacherTargets]:
        """Targets of each microbatch on the last pipeline stage; an empty list on the others.

        Every rank of the layout calls it with its own replica's microbatches.
        """
