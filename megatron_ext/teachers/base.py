"""What a teacher is. B batch, T tokens of whole rows, S those that this rank has.

Whole rows of tokens on the host, and the texts in them.

B rows, T positions, S those of one rank, G texts, N texts of a batch, L positions of its longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.distributed.context_parallel import ContextRank

if TYPE_CHECKING:
    from megatron_ext.losses.targets import TeacherTargets


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """One microbatch, of no rank's in particular."""

    tokens: torch.Tensor
    """[B, T] int64"""

    position_ids: torch.Tensor
    """[B, T] int64"""

    labels: torch.Tensor | None = None
    """[B, T] int64 what each position predicts, negative for nothing; None where nobody asks."""

    cu_seqlens: torch.Tensor | None = None
    """[G + 1] where texts begin and end when rows follow one another; None where a position may see
    all that is behind it."""

    def attention_mask(
        self, device: torch.device | None = None, context: ContextRank | None = None
    ) -> torch.Tensor | None:
        """[B, 1, S, T] bool: True where a position would look ahead, or into another text.

        Args:
            device: Where it is made.
            context: Whose part of the rows; None for whole ones.
        """
        if self.cu_seqlens is None:
            return None
        bounds = self.cu_seqlens.to(device or self.cu_seqlens.device).long()
        places = torch.arange(self.tokens.numel(), device=bounds.device).view(self.tokens.shape)
        text = torch.searchsorted(bounds, places, right=True)
        own_places, own_text = places, text
        if context is not None:
            own_places, own_text = context.cut(places), context.cut(text)
        ahead = own_places[:, None, :, None] < places[:, None, None]
        return ahead | (own_text[:, None, :, None] != text[:, None, None])


class TextBatch(NamedTuple):
    """Some texts of a microbatch; on the host."""

    places: NDArray[np.int64]
    """[N, L] where their positions stand when rows follow one another. Behind the end of a text its
    last place is repeated."""

    lengths: NDArray[np.int64]
    """[N]"""

    def mask(self) -> NDArray[np.bool_] | None:
        """[N, L] what is of a text; None where all of it is."""
        longest = self.places.shape[1]
        if (self.lengths == longest).all():
            return None
        return np.arange(longest) < self.lengths[:, None]


def text_batches(rows: TokenRows) -> Iterator[TextBatch]:
    """The texts of a microbatch that predict something, those of like length together, each once.

    No batch has more positions, filled up, than the microbatch. Padding predicts nothing; where
    nothing is known of labels, it counts as a text.
    """
    positions = rows.position_ids.numpy()
    begins = positions == 0
    begins[:, :1] = True
    starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=positions.size)
    order = np.argsort(-lengths, kind="stable")
    if rows.labels is not None:
        trained = np.add.reduceat(rows.labels.numpy().ravel() >= 0, starts, dtype=np.int64)
        order = order[trained[order] > 0]
    first = 0
    while first < len(order):
        longest = int(lengths[order[first]])
        own = order[first : first + positions.size // longest]
        inside = np.minimum(np.arange(longest), lengths[own, None] - 1)
        yield TextBatch(starts[own, None] + inside, lengths[own])
        first += len(own)


def device_tensor(values: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """``values`` on a device that does not wait for them."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
