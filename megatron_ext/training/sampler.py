"""Which windows a data-parallel rank reads at an iteration: a pure function of the iteration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSampler:
    """Shuffled epochs, cut into global batches; nothing to save, so a resumed run reads on exactly.

    The windows of a global batch do not depend on the layout, only their spread over ranks and
    microbatches does.
    """

    sample_count: int
    global_batch_size: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    seed: int

    @property
    def microbatch_count(self) -> int:
        """Microbatches per iteration on each rank."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def microbatches(self, iteration: int) -> list[list[int]]:
        """Window indices of this rank's microbatches at a zero-based iteration."""
        batch = self._global_batch(iteration)
        per_rank = batch.reshape(self.microbatch_count, self.dp_size, self.micro_batch_size)
        return [row.tolist() for row in per_rank[:, self.dp_rank]]

    def _global_batch(self, iteration: int) -> np.ndarray:
        positions = np.arange(self.global_batch_size) + iteration * self.global_batch_size
        epochs, places = np.divmod(positions, self.sample_count)
        batch = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs):
            order = np.random.default_rng((self.seed, int(epoch))).permutation(self.sample_count)
            batch[epochs == epoch] = order[places[epochs == epoch]]
        return batch
