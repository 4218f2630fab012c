"""The kernels of the projected KL on one rank, for ``test_projected_kl_shards.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tests.ops.projected_kl_case import Case, paired_projection

OPTIONS: dict[str, dict[str, Any]] = {
    "forward": {},
    "reverse": {"direction": "reverse", "temperature": 1.4},
    "by torch": {"direction": "jensen_shannon", "implementation": "torch"},
    "scaled up": {"direction": "reverse"},
    "scaled up by torch": {"implementation": "torch"},
}

Result = tuple[list[torch.Tensor], torch.Tensor]
"""Everything that is said of chunks, and the gradient of this rank's columns."""


def evaluated(rank: int, ranks: int, group: Any, name: str) -> Result:
    case = Case.random(vocabs=(47, 41), lengths=(5, 4), chunk_count=2)
    case = replace(case, projection=paired_projection(47, 41))
    if name.startswith("scaled up"):
        case = case.dominated(120.0)
    options = {"implementation": "triton"} | OPTIONS[name]
    out, grad = case.run(
        dtype=torch.float32,
        padding=(15, 5),
        pad_value=1e4,
        rank=rank,
        ranks=ranks,
        group=group,
        planned=True,
        **options,
    )
    return [x.detach() for x in out if x is not None], grad


def on_shards(rank: int) -> dict[str, Result]:
    """By groups of two for the first case, of all four for the others."""
    pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
    everyone = dist.new_group(list(range(4)))
    found = {"forward": evaluated(rank % 2, 2, pairs[rank // 2], "forward")}
    for name in list(OPTIONS)[1:]:
        found[name] = evaluated(rank, 4, everyone, name)
    return found
