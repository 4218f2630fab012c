"""The ``Teacher`` protocol, its inputs, and the texts in packed rows.

B rows, T positions of a row, S those of one rank, G texts, N texts of a batch, L positions of its
longest.
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
    """One microbatch in the teacher's tokens, as one rank has it."""

    @property
    def tokens(self) -> torch.Tensor:
        """[B, S] int64"""

    @property
    def position_ids(self) -> torch.Tensor:
        """[B, S] int64"""

    @property
    def attention_mask(self) -> torch.Tensor | None:
        """[B, 1, S, T] bool, True where attention is masked; None for a plain causal mask."""

    @property
    def rows(self) -> TokenRows | None:
        """The same rows whole, on the host; read by remote and HuggingFace teachers."""


class Teacher(Protocol):
    """A frozen model that predicts every position of the microbatches it is given."""

    def targets(self, microbatches: Sequence[TokenInputs]) -> list[TeacherTargets]:
        """Targets of each microbatch on the last pipeline stage; an empty list on the others.

        Every rank of the layout calls it, with the microbatches of its replica.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """One microbatch as whole rows, on the host."""

    tokens: torch.Tensor
    """[B, T] int64"""

    position_ids: torch.Tensor
    """[B, T] int64"""

    labels: torch.Tensor | None = None
    """[B, T] int64 targets, negative where there is none; None if no form needs them."""

    cu_seqlens: torch.Tensor | None = None
    """[G + 1] bounds of the texts in the concatenated rows; None for plain causal attention over
    whole rows."""

    def attention_mask(
        self, device: torch.device | None = None, context: ContextRank | None = None
    ) -> torch.Tensor | None:
        """[B, 1, S, T] bool mask, True for later positions and for positions of other texts.

        Args:
            device: Device of the mask.
            context: Context-parallel rank whose positions are the queries; None for all.
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


class InputRows(NamedTuple):
    """Rows of one microbatch on the device; see ``TokenInputs``."""

    tokens: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None = None
    rows: TokenRows | None = None


def whole_rows(batch: TokenInputs) -> TokenRows:
    """The host rows of a batch; those of a run have them."""
    assert batch.rows is not None
    return batch.rows


class TextBatch(NamedTuple):
    """Texts of similar length from a microbatch; on the host."""

    places: NDArray[np.int64]
    """[N, L] indices of the texts' positions in the concatenated rows; behind the end of a text its
    last one is repeated."""

    lengths: NDArray[np.int64]
    """[N] positions of each text."""

    def mask(self) -> NDArray[np.bool_] | None:
        """[N, L] mask of positions within a text; None if all are."""
        longest = self.places.shape[1]
        if (self.lengths == longest).all():
            return None
        return np.arange(longest) < self.lengths[:, None]


def text_batches(rows: TokenRows) -> Iterator[TextBatch]:
    """Batches of all texts of a microbatch that have labels, grouped by similar length.

    A padded batch has at most as many positions as the microbatch. Padding has no labels and is
    skipped; without ``labels`` it counts as a text.
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
    """``values`` on a device, copied without synchronisation."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
