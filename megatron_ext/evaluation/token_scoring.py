"""Log-probabilities of given tokens, under any layout. B rows, T tokens, N scored, Vp columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import VocabShard, log_softmax, vocab_argmax
from megatron_ext.evaluation.language_model import LogLikelihood, TokenRequest
from megatron_ext.teachers.megatron_teacher import MegatronTeacher
from megatron_ext.teachers.token_rows import TokenRows

_TILE_ROWS: Final = 512
"""Positions whose logits are there at a time."""


class _Rows(NamedTuple):
    """Rows of one microbatch; see ``TokenInputs``."""

    tokens: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    rows: TokenRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScorer:
    """Scores requests with megatron-core's forward-only schedule; no cache."""

    chunk: GPTModel
    """This rank's part of the model, frozen."""

    shard: VocabShard
    groups: ProcessGroups
    micro_batch_size: int
    max_length: int

    def log_likelihoods(self, requests: Sequence[TokenRequest]) -> list[LogLikelihood]:
        """Of each request, in order; the same on every rank of a replica.

        No continuation may be longer than ``max_length``.

        Collectives: for every global batch the schedule's, five all-reduces a tile over ``tp``
        and one broadcast over ``pp``.
        """
        # Rows of like length together, the longest first: what does not fit shows at once.
        order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i])))
        size = self.micro_batch_size * self.groups.pp.size()
        scored: list[torch.Tensor] = [
            self._scores([requests[i] for i in order[start : start + size]])
            for start in range(0, len(order), size)
        ]
        found: list[LogLikelihood] = [LogLikelihood(0.0, True)] * len(requests)
        # One wait for the device, at the end.
        for i, (nats, misses) in zip(order, _rows(scored), strict=True):
            found[i] = LogLikelihood(nats, misses == 0)
        return found

    @torch.no_grad()
    def _scores(self, requests: Sequence[TokenRequest]) -> torch.Tensor:
        """[R, 2] fp64: sums of log-probabilities, and tokens that are not the first choice."""
        rows = [
            (request.context + request.continuation)[-self.max_length - 1 :] for request in requests
        ]
        scored = [len(request.continuation) for request in requests]
        device, size = self.groups.device, self.micro_batch_size
        teacher = MegatronTeacher([self.chunk], shard=self.shard)
        targets = teacher.targets(list(self._microbatches([row[:-1] for row in rows])))
        found = torch.zeros(len(rows), 2, dtype=torch.float64, device=device)
        for start, target in zip(range(0, len(rows), size), targets, strict=False):
            part = range(start, min(start + size, len(rows)))
            places = [
                (i - start, len(rows[i]) - 1 - scored[i] + k, rows[i][len(rows[i]) - scored[i] + k])
                for i in part
                for k in range(scored[i])
            ]
            owner = torch.tensor([i for i in part for _ in range(scored[i])], device=device)
            row, column, labels = torch.tensor(places, device=device).unbind(1)
            assert target.hidden is not None
            assert target.head_weight is not None
            hidden = target.hidden[row, column]
            for tile in range(0, len(labels), _TILE_ROWS):
                of = slice(tile, tile + _TILE_ROWS)
                logits = hidden[of] @ target.head_weight.t()
                found.index_add_(0, owner[of], _label_scores(logits, labels[of], self.shard))
        return self.groups.broadcast_from_last_stage(found)

    def _microbatches(self, rows: Sequence[Sequence[int]]) -> Iterator[_Rows]:
        """[B, T] each, filled up on the right, which no earlier position sees."""
        length, size = max(map(len, rows)), self.micro_batch_size
        for start in range(0, len(rows), size):
            tokens = torch.zeros(size, length, dtype=torch.int64)
            for row, ids in enumerate(rows[start : start + size]):
                tokens[row, : len(ids)] = torch.tensor(ids)
            tokens = tokens.to(self.groups.device)
            yield _Rows(tokens, torch.arange(length, device=tokens.device).expand_as(tokens), None)


def _label_scores(logits: torch.Tensor, labels: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """[N, 2] fp64: log-probability of each label, and whether another is likelier.

    Equivalent: ``log_softmax(logits)[labels]`` and ``argmax(logits) != labels`` of whole rows.
    Collectives: five all-reduces of [N] over the shard's group.
    """
    log_probs = log_softmax(logits, shard)
    own = labels - shard.start
    is_here = (own >= 0) & (own < shard.width)
    picked = log_probs.gather(1, own.clamp(0, shard.width - 1)[:, None])[:, 0]
    nats = all_reduce_sum(picked.masked_fill(~is_here, 0.0).double(), shard.group)
    return torch.stack((nats, (vocab_argmax(logits, shard) != labels).double()), dim=1)


def _rows(scored: Sequence[torch.Tensor]) -> list[tuple[float, float]]:
    return [(nats, misses) for nats, misses in torch.cat(list(scored)).tolist()] if scored else []
