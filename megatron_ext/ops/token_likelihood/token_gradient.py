"""What a row's logits get for its token and its set of tokens. T rows, Vp local columns."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.distributed.vocab_parallel import LogSumExp, VocabShard, row_slices, scaled_logits
from megatron_ext.ops.launch import Implementation, LaunchConfig, launch_rows, uses_triton


class RowGradient(NamedTuple):
    """What arrives for each row and what is known of it, [T] each."""

    column: torch.Tensor
    """int64: this rank's column of the token, -1 where it is not here."""

    on_token: torch.Tensor
    """For the token's log-probability."""

    whole: LogSumExp
    """Over all columns of all shards."""

    on_mass: torch.Tensor | None = None
    """For the set's log-mass; None: there is no set."""

    members: LogSumExp | None = None
    """Over the set's columns of all shards."""


def write_token_gradient(
    logits: torch.Tensor,
    members: torch.Tensor | None,
    row: RowGradient,
    shard: VocabShard,
    gradient: torch.Tensor,
    *,
    temperature: float = 1.0,
    implementation: Implementation = "auto",
) -> None:
    """Write equation (3) of the README into ``gradient`` [T, Vp], which may be ``logits``.

    A row that gets nothing gives exactly 0, whatever it holds. No collectives. By kernel one read
    and one write of a row.

    Args:
        logits: [T, Vp], any float dtype, contiguous in its columns.
        members: bool [Vp], the set's columns; None: there is no set.
    """
    if uses_triton(implementation, logits):
        _by_kernel(logits, members, row, shard, gradient, temperature)
    else:
        _by_torch(logits, members, row, shard, gradient, temperature)


def _by_torch(
    logits: torch.Tensor,
    members: torch.Tensor | None,
    row: RowGradient,
    shard: VocabShard,
    gradient: torch.Tensor,
    temperature: float,
) -> None:
    excluded = shard.excluded_columns(logits.device)
    on_token = row.on_token / temperature
    on_mass = torch.zeros_like(on_token) if row.on_mass is None else row.on_mass / temperature
    picked = torch.where(row.column >= 0, on_token, 0.0)[:, None]
    unused = ((on_token == 0) & (on_mass == 0))[:, None]
    total = (on_token + on_mass)[:, None]
    for rows in row_slices(*logits.shape, device=logits.device):
        scaled = scaled_logits(logits[rows], temperature, excluded)
        part = row.whole.normalise_(scaled, rows).exp_().mul_(-total[rows])
        if members is not None and row.members is not None:
            outside = shard.excluded_columns(logits.device, members)
            inside = scaled_logits(logits[rows], temperature, outside)
            shares = row.members.normalise_(inside, rows).exp_().mul_(on_mass[rows, None])
            part.add_(shares.masked_fill_(on_mass[rows, None] == 0, 0.0))
        part.scatter_add_(-1, row.column[rows, None].clamp(min=0), picked[rows])
        gradient[rows] = part.masked_fill_(unused[rows], 0.0)


def _by_kernel(
    logits: torch.Tensor,
    members: torch.Tensor | None,
    row: RowGradient,
    shard: VocabShard,
    gradient: torch.Tensor,
    temperature: float,
) -> None:
    from megatron_ext.ops.token_likelihood.triton_kernels import token_gradient_kernel

    rows, padded_width = logits.shape
    has_members = members is not None and row.members is not None and row.on_mass is not None
    vectors = [*row.whole, *(row.members or row.whole), row.on_token / temperature]
    vectors.append(vectors[-1] if row.on_mass is None else row.on_mass / temperature)
    packed = torch.stack([vector.float() for vector in vectors])

    def launch(config: LaunchConfig, out: torch.Tensor) -> None:
        token_gradient_kernel[(len(out),)](
            logits,
            members,
            packed,
            row.column,
            out,
            logits.stride(0),
            out.stride(0),
            shard.valid_width,
            padded_width,
            rows,
            temperature,
            HAS_MEMBERS=has_members,
            HAS_TEMPERATURE=temperature != 1.0,
            BLOCK=config.block,
            num_warps=config.num_warps,
        )

    launch_rows(("token_gradient", logits.dtype, has_members, temperature != 1.0), launch, gradient)
