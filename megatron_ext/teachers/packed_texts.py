"""The texts of packed rows, each in a row of its own: for models that read one text a row.

B rows, T positions, N texts of a batch, L positions of its longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.teachers.token_rows import TokenRows


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
