"""Whole rows of tokens on the host, as a teacher elsewhere is sent them.

B rows, T positions, S those of one rank, G texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ext.distributed.context_parallel import ContextRank


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
