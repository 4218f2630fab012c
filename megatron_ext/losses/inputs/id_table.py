"""Token ids by their places in a vocabulary layout. V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_ext.projection.layout import VocabularyOrder


@dataclass(frozen=True, slots=True)
class IdTable:
    """Looks up the place of each id on the device; what losses take instead of ids.

    It is for labels, chosen ids and top-k ids, and for input ids where the head is tied to the
    embeddings.
    """

    places: torch.Tensor
    """[V] int64, padding included."""

    @classmethod
    def of(cls, order: VocabularyOrder, device: torch.device | str = "cpu") -> IdTable:
        """The table of one vocabulary."""
        return cls(torch.from_numpy(order.places.copy()).to(device))

    def places_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The place of each of ``ids``, any shape, int32 or int64; what is negative stays.

        Waits for nothing and allocates three tensors of the ids' size.
        """
        places = self.places[ids.clamp_min(0)].to(ids.dtype)
        return torch.where(ids < 0, ids, places)
