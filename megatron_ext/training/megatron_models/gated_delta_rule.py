"""The gated delta rule, the recurrence of linear attention in Qwen3-Next and Qwen3.5.

B rows, T positions, H heads, K width of a key, V width of a value, N chunks of C positions.

A head has a state ``S`` [K, V], which a position first decays, then corrects where its key reads
another value than its own, and then reads by its query:

    S = exp(g) S;  S = S + k (beta (v - k S));  o = q S

Source: Yang, Kautz, Hatamizadeh, Gated Delta Networks (arXiv:2412.06464), equation 10 and section
3.3, of which the second has the form in chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Final, NamedTuple

import torch
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_ext.constants import DELTA_CHUNK


class Heads(NamedTuple):
    """What the rule reads of every position and head; in fp32 at least."""

    query: torch.Tensor
    """[B, T, H, K], with any factor of the output."""

    key: torch.Tensor
    """[B, T, H, K] of length 1 or less."""

    value: torch.Tensor
    """[B, T, H, V]"""

    log_decay: torch.Tensor
    """[B, T, H], 0 or less."""

    beta: torch.Tensor
    """[B, T, H] in [0, 1]: how far a value is corrected."""


def gated_delta_rule(
    heads: Heads, state: torch.Tensor | None = None, documents: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of all positions, and the state behind the last; differentiable.

    It takes matrix products over chunks, and a step from one chunk to the next. With ``c`` the sum
    of the logarithms of decays up to a position of a chunk, the chunk's corrections ``u`` solve
    ``u_i + beta_i sum_(j < i) exp(c_i - c_j) (k_i k_j) u_j = beta_i (v_i - exp(c_i) k_i S)``. The
    right-hand side is linear in the state ``S`` before the chunk, so that both of its parts are
    solved for in all chunks at once.

    Equivalent: ``gated_delta_rule_reference``.

    Args:
        state: [B, H, K, V] before the first position; None for zeros.
        documents: [B or 1, T] int64, in ascending order: a position sees those of its own number
            alone, and a new one begins with a state of zeros. None for rows of one document.

    Returns:
        [B, T, H, V] and [B, H, K, V], in the dtype of ``heads``.
    """
    query, key, value, log_decay, beta = heads
    positions = query.shape[1]
    size = min(DELTA_CHUNK, positions)
    query, key, value = (_chunks(part, size) for part in (query, key, value))
    decay, beta = (_chunks(part.unsqueeze(-1), size) for part in (log_decay, beta))
    sums = decay.squeeze(-1).cumsum(-1)
    seen, carried, kept = _seen(documents, positions, size, device=sums.device)
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(~seen, -torch.inf).exp()
    from_start = (sums.exp() * carried).unsqueeze(-1)
    to_end = ((sums[..., -1:] - sums).exp() * kept).unsqueeze(-1)
    products = key @ key.transpose(-1, -2)
    sides = torch.cat((value, key * from_start), dim=-1) * beta
    # The diagonal is taken for 1, and nothing above it is read.
    corrections, of_state = torch.linalg.solve_triangular(
        products * between * beta, sides, upper=False, unitriangular=True
    ).split((value.shape[-1], key.shape[-1]), dim=-1)
    reads = (query @ key.transpose(-1, -2)) * between
    query, key = query * from_start, key * to_end
    left = from_start[..., -1:, :]
    if state is None:
        state = value.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1])
    outputs = []
    for chunk in range(value.shape[2]):
        correction = corrections[:, :, chunk] - of_state[:, :, chunk] @ state
        outputs.append(query[:, :, chunk] @ state + reads[:, :, chunk] @ correction)
        update = key[:, :, chunk].transpose(-1, -2) @ correction
        state = left[:, :, chunk] * state + update
    return torch.cat(outputs, dim=2)[:, :, :positions].transpose(1, 2), state


@cache
def has_fused_rule() -> bool:
    """Whether flash-linear-attention is installed."""
    return find_spec("fla") is not None


def fused_delta_rule(
    heads: Heads,
    state: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``gated_delta_rule`` by the kernels of flash-linear-attention, on a GPU.

    Of packed rows the state is not given, and the boundaries of texts wait for the device, once for
    all layers.

    Args:
        dtype: Dtype of queries, keys and values.
    """
    rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    rows, length = heads.key.shape[:2]
    boundaries = None
    if documents is not None:
        assert state is None
        boundaries = once_of(documents, lambda: _boundaries(documents, rows))
        heads = Heads(*(part.flatten(0, 1).unsqueeze(0) for part in heads))
    output, last = rule(
        *(part.to(dtype) for part in heads[:3]),
        g=heads.log_decay,
        beta=heads.beta,
        # The queries have it.
        scale=1.0,
        initial_state=state,
        output_final_state=documents is None,
        cu_seqlens=boundaries,
    )
    return output.view(rows, length, *output.shape[2:]), last


def _boundaries(documents: torch.Tensor, rows: int) -> torch.Tensor:
    """[texts + 1] starts of the texts of ``rows`` rows, joined, and the end."""
    begins = functional.pad(documents.diff(dim=1) != 0, (1, 0), value=True).expand(rows, -1)
    return functional.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=begins.numel())


_MADE: Final = WeakTensorKeyDictionary()


def once_of(source: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What is made of a tensor, by the first layer that asks; kept as long as the tensor is.

    Args:
        make: Makes it, always in the same way of one tensor.
    """
    made: torch.Tensor | None = _MADE.get(source)
    if made is None:
        made = _MADE[source] = make()
    return made


def gated_delta_rule_reference(
    heads: Heads, state: torch.Tensor | None = None, documents: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``gated_delta_rule``, position by position."""
    rows, positions, count, width = heads.key.shape
    if state is None:
        state = heads.value.new_zeros(rows, count, width, heads.value.shape[-1])
    outputs = []
    for place in range(positions):
        query, key, value, log_decay, beta = (part[:, place] for part in heads)
        if documents is not None and place:
            is_same = documents[:, place] == documents[:, place - 1]
            state = state * is_same.view(-1, 1, 1, 1)
        state = state * log_decay.exp()[..., None, None]
        correction = beta.unsqueeze(-1) * (value - torch.einsum("bhk,bhkv->bhv", key, state))
        state = state + torch.einsum("bhk,bhv->bhkv", key, correction)
        outputs.append(torch.einsum("bhk,bhkv->bhv", query, state))
    return torch.stack(outputs, dim=1), state


def _chunks(part: torch.Tensor, size: int) -> torch.Tensor:
    """[B, H, N, C, width] of [B, T, H, width], with zeros behind the last position."""
    padded = functional.pad(part, (0, 0, 0, 0, 0, -part.shape[1] % size))
    chunks: torch.Tensor = padded.transpose(1, 2).unflatten(2, (-1, size))
    return chunks


def _seen(
    documents: torch.Tensor | None, positions: int, size: int, *, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which positions see which, by chunks.

    Returns:
        [B or 1, 1, N or 1, C, C] whether a position (row) sees one of its chunk (column);
        [B or 1, 1, N or 1, C] whether it is of the document before the chunk; the same of the
        document at the end of the chunk.
    """
    causal = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    if documents is None:
        every = causal.new_ones(1, 1, 1, size)
        return causal, every, every
    behind = -positions % size
    numbers = torch.cat((documents, documents[:, -1:].expand(-1, behind)), dim=1)
    numbers = numbers.unflatten(1, (-1, size)).unsqueeze(1)
    before = torch.cat((numbers[:, :, :1, :1], numbers[:, :, :-1, -1:]), dim=2)
    seen = causal & (numbers.unsqueeze(-1) == numbers.unsqueeze(-2))
    return seen, numbers == before, numbers == numbers[..., -1:]
