"""The next token of each row. B rows, V columns of a whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ext.evaluation.language_model import GenerationOptions


def next_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, options: GenerationOptions
) -> torch.Tensor:
    """[B] int64: the first choice, or a draw.

    A draw is the inverse of the cumulative distribution at the row's number, over the likeliest
    tokens whose probabilities reach ``top_p``: it depends on that row alone.

    Args:
        logits: [B, V], -inf where a column is no token.
        uniforms: [B] fp64 in [0, 1).
        options: Temperature and top-p.
    """
    if options.temperature == 0:
        return logits.argmax(dim=-1)
    scaled = logits.double() / options.temperature
    probs, columns = torch.softmax(scaled, dim=-1).sort(dim=-1, descending=True, stable=True)
    reached = probs.cumsum(dim=-1)
    kept = probs.masked_fill(reached - probs >= options.top_p, 0.0).cumsum(dim=-1)
    wanted = uniforms * kept[:, -1]
    place = torch.searchsorted(kept, wanted[:, None], right=True).clamp_(max=logits.shape[-1] - 1)
    return columns.gather(1, place)[:, 0]


def draws(places: Sequence[int], options: GenerationOptions) -> torch.Tensor:
    """[B, max_new_tokens] fp64 on the host: the numbers of each prompt, by its place among all."""
    rows = []
    for place in places:
        generator = torch.Generator()
        generator.manual_seed((options.seed << 31) + place)
        rows.append(torch.rand(options.max_new_tokens, dtype=torch.float64, generator=generator))
    return torch.stack(rows)
