"""The columns that chains choose from their rows. R rows of chains, N chosen columns, Vp local."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.ops.partition_kl.chains import ChainRows, Chains
from megatron_ext.ops.row_sums import local_column


class ChosenColumns(NamedTuple):
    """Some columns of some rows of a [T, Vp] tensor; steps first, then last rows."""

    row: torch.Tensor
    """int64 [R]: rows of the logits, each once."""

    column: torch.Tensor
    """int64 [N]: chosen columns over all shards, those of a row together and each once; negative
    for none."""

    local: torch.Tensor
    """int64 [N]: this rank's column, -1 where it has none."""

    place: torch.Tensor
    """int64 [N] ascending: which of the R rows each belongs to."""

    pointers: tuple[int, ...]
    """[R + 1] where the columns of each row start, on the host."""

    @classmethod
    def of(cls, rows: ChainRows, chains: Chains, shard: VocabShard) -> ChosenColumns:
        """The label of every step and the completions of every last row, S + H rows."""
        steps = len(rows.step_row)
        device = rows.step_row.device
        column = torch.cat([rows.step_label, rows.completion])
        return cls(
            row=torch.cat([rows.step_row, rows.last_row]),
            column=column,
            local=local_column(column, shard),
            place=torch.cat([torch.arange(steps, device=device), chains.completion_chain + steps]),
            pointers=(
                *range(steps),
                *(steps + pointer for pointer in chains.completion_pointers),
            ),
        )

    def at_rows(self) -> torch.Tensor:
        """int64 [N]: the row of the logits of each."""
        return self.row[self.place]

    def entries(self, part: slice) -> slice:
        """The chosen columns of some of the R rows."""
        return slice(self.pointers[part.start], self.pointers[part.stop])

    def mask(self, part: slice, width: int) -> torch.Tensor:
        """bool [R', width]: this rank's chosen columns of some of the R rows."""
        entries = self.entries(part)
        local = self.local[entries]
        # Those of other ranks are written beyond the end, where nothing reads them.
        column = torch.where(local < 0, width, local)
        shape = (part.stop - part.start, width + 1)
        found = torch.zeros(shape, dtype=torch.bool, device=local.device)
        found[self.place[entries] - part.start, column] = True
        return found[:, :width]
