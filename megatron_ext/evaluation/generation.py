"""Generation with a cache of keys and values, under tensor and pipeline parallelism.

The cache is megatron-core's ``StaticInferenceContext``, and a step is its forward-only schedule.
All rows of a batch stand at the same position, as the context asks: the shortest prompt is read at
once, and while others are still being read, their own tokens take the place of what would be
generated. So no row is padded, nothing is masked, and every token has the position that it has
without a cache.

B rows, T tokens, V columns.

The next token of each row. B rows, V columns of a whole vocabulary.

Log-probabilities of given tokens, under any layout. B rows, T tokens, N scored, Vp columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import VocabShard, log_softmax, vocab_argmax
from megatron_ext.errors import ConfigError
from megatron_ext.evaluation.language_model import GenerationOptions, LogLikelihood, TokenRequest
from megatron_ext.teachers.base import TokenRows
from megatron_ext.teachers.megatron_teacher import MegatronTeacher


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


_LOOK_EVERY: Final = 16
"""Steps between two looks at what was generated: a look waits for the device."""

_CACHE_STEP: Final = 64
"""Lengths of caches are multiples of it, so that rotary embeddings are made for few lengths."""

IsDone = Callable[[Sequence[int]], bool]
"""Whether what was generated so far, ids without the prompt, holds its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """Generates with one replica of a model; every rank of it makes the same calls."""

    chunk: GPTModel
    """This rank's part of the model, frozen."""

    shard: VocabShard
    groups: ProcessGroups
    micro_batch_size: int
    max_length: int

    def generate(
        self,
        prompts: Sequence[list[int]],
        options: GenerationOptions,
        *,
        places: Sequence[int],
        is_done: IsDone,
    ) -> list[list[int]]:
        """New ids of each prompt, up to ``max_new_tokens``; some beyond the end that was met.

        Prompts that are too long lose their beginnings.

        Args:
            places: Of each prompt among all that are asked for, which its draws depend on.
            is_done: Asked now and then.

        Collectives: at each step those of the schedule and of the layers, one all-gather over
        ``tp`` of the last logits, one broadcast of [B] over ``tp`` and one over ``pp``.

        Raises:
            ConfigError: The model is too short for so many new tokens.
        """
        room = self.max_length - options.max_new_tokens
        if room < 1:
            raise ConfigError(
                "the model reads too few tokens for completions of that length",
                where="max_new_tokens",
                got=options.max_new_tokens,
                expected=f"below {self.max_length}",
            )
        cut = [prompt[-room:] for prompt in prompts]
        order = sorted(range(len(cut)), key=lambda i: -len(cut[i]))
        found: list[list[int]] = [[] for _ in cut]
        for start in range(0, len(order), self.micro_batch_size):
            part = order[start : start + self.micro_batch_size]
            new = self._batch([cut[i] for i in part], [places[i] for i in part], options, is_done)
            for i, ids in zip(part, new, strict=True):
                found[i] = ids
        return found

    @torch.no_grad()
    def _batch(
        self,
        prompts: Sequence[list[int]],
        places: Sequence[int],
        options: GenerationOptions,
        is_done: IsDone,
    ) -> list[list[int]]:
        device, lengths = self.groups.device, [len(prompt) for prompt in prompts]
        total = max(lengths) + options.max_new_tokens
        tokens = torch.zeros(len(prompts), total, dtype=torch.int64)
        uniforms = torch.zeros(len(prompts), total, dtype=torch.float64)
        for row, numbers in enumerate(draws(places, options)):
            tokens[row, : lengths[row]] = torch.tensor(prompts[row])
            uniforms[row, lengths[row] : lengths[row] + len(numbers)] = numbers
        tokens, uniforms = tokens.to(device), uniforms.to(device)
        prompt_ends = torch.tensor(lengths, device=device)
        context = StaticInferenceContext(len(prompts), -(-total // _CACHE_STEP) * _CACHE_STEP)
        begin, end = 0, min(lengths)
        while end < total:
            chosen = self._step(tokens[:, begin:end], begin, context, uniforms[:, end], options)
            tokens[:, end] = torch.where(prompt_ends > end, tokens[:, end], chosen)
            context.increment_sequence_len_offset(end - begin)
            context.enable_decode_mode()
            begin, end = end, end + 1
            if (end - min(lengths)) % _LOOK_EVERY == 0 and _all_done(
                tokens[:, :end], lengths, options, is_done
            ):
                break
        return [
            ids[length : min(end, length + options.max_new_tokens)]
            for ids, length in zip(tokens.tolist(), lengths, strict=True)
        ]

    def _step(
        self,
        tokens: torch.Tensor,
        begin: int,
        context: StaticInferenceContext,
        uniforms: torch.Tensor,
        options: GenerationOptions,
    ) -> torch.Tensor:
        """[B]: what follows ``tokens`` [B, T], which begin at a position."""
        positions = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)

        def forward(_: Any, model: GPTModel) -> tuple[torch.Tensor, Any]:
            output = model(
                tokens,
                positions.expand_as(tokens),
                None,
                inference_context=context,
                runtime_gather_output=True,
            )
            return output, lambda logits, *, non_loss_data: logits

        outputs = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=[self.chunk],
            num_microbatches=1,
            seq_length=tokens.shape[1],
            micro_batch_size=len(tokens),
            forward_only=True,
            collect_non_loss_data=True,
        )
        chosen = tokens.new_zeros(len(tokens))
        if self.groups.is_last_stage:
            logits = outputs[0][:, -1].float()
            logits[:, self.shard.vocab_size :] = -torch.inf
            chosen = next_tokens(logits, uniforms, options)
            # Ranks that share a vocabulary have the same logits; one of them decides all the same.
            first = dist.get_process_group_ranks(self.groups.tp)[0]
            dist.broadcast(chosen, src=first, group=self.groups.tp)
        return self.groups.broadcast_from_last_stage(chosen)


def _all_done(
    tokens: torch.Tensor, lengths: Sequence[int], options: GenerationOptions, is_done: IsDone
) -> bool:
    """Whether every row has its end, or all its new tokens. Waits for the device."""
    new = [ids[length:] for ids, length in zip(tokens.tolist(), lengths, strict=True)]
    return all(len(ids) >= options.max_new_tokens or is_done(ids) for ids in new)


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
