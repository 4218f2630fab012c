"""Generation and scoring of tokens, under tensor and pipeline parallelism.

Generation has a cache of keys and values, megatron-core's ``StaticInferenceContext``, and a step is
its forward-only schedule. All rows of a batch are at the same position, as the context requires:
the part up to the end of the shortest prompt is read at once, and while longer prompts are being
read, their own tokens replace the generated ones. So no row is padded, nothing is masked, and every
token has the position that it has without a cache.

B rows, T tokens, N scored tokens, R requests, V columns of the whole vocabulary, Vp local ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.shard_collectives import all_reduce_sum
from megatron_ext.distributed.vocab_parallel import VocabShard, log_softmax, vocab_argmax
from megatron_ext.engines.engine import Completion, Sampling
from megatron_ext.errors import ConfigError
from megatron_ext.evaluation.language_model import LogLikelihood, TokenRequest
from megatron_ext.evaluation.token_mixture import CACHE_STEP, TokenMixture, last_logits
from megatron_ext.losses import TeacherTargets
from megatron_ext.teachers.base import InputRows
from megatron_ext.teachers.megatron_teacher import MegatronTeacher
from megatron_ext.training.metrics import progress_bar


class ChosenTokens(NamedTuple):
    """The next token of each row, and what it was chosen from."""

    ids: torch.Tensor
    """[B] int64"""

    log_probs: torch.Tensor
    """[B] fp64 natural logarithm of the probability with which each was chosen."""

    entropies: torch.Tensor
    """[B] fp64 entropy in nats of what was chosen from."""


def next_tokens(logits: torch.Tensor, uniforms: torch.Tensor, options: Sampling) -> ChosenTokens:
    """The next token of each row: the likeliest one, or a sample.

    A sample inverts the cumulative distribution at the row's uniform number, over the likeliest
    tokens whose probabilities reach ``top_p``, so that it depends on that row alone.

    Args:
        logits: [B, V], -inf for columns that pad the vocabulary.
        uniforms: [B] fp64 in [0, 1).
        options: Temperature and top-p.
    """
    if options.temperature == 0:
        certain = torch.zeros_like(uniforms)
        return ChosenTokens(logits.argmax(dim=-1), certain, certain)
    kept = torch.softmax(logits.double() / options.temperature, dim=-1)
    if options.top_p < 1:
        probs, columns = kept.sort(dim=-1, descending=True, stable=True)
        is_kept = probs.cumsum(dim=-1) - probs < options.top_p
        kept = torch.zeros_like(kept).scatter(1, columns, probs * is_kept)
    # In the order of the ids: in that of the probabilities, rounding would exchange neighbours.
    sums = kept.cumsum(dim=-1)
    total = sums[:, -1:]
    ids = torch.searchsorted(sums, uniforms[:, None] * total, right=True)
    ids = ids.minimum(torch.searchsorted(sums, total.contiguous()))
    return ChosenTokens(
        ids[:, 0],
        (kept.gather(1, ids) / total).log()[:, 0],
        total.log()[:, 0] - torch.special.xlogy(kept, kept).sum(dim=-1) / total[:, 0],
    )


def draws(places: Sequence[int], options: Sampling) -> torch.Tensor:
    """Uniform numbers [B, max_new_tokens] fp64 on the host, seeded by each prompt's place."""
    rows = []
    for place in places:
        generator = torch.Generator()
        generator.manual_seed((options.seed << 31) + place)
        rows.append(torch.rand(options.max_new_tokens, dtype=torch.float64, generator=generator))
    return torch.stack(rows)


_CHECK_EVERY: Final = 16
"""Steps between two checks for the end of all texts, each of which waits for the device."""

IsDone = Callable[[Sequence[int]], bool]
"""Whether the generated ids, without the prompt, contain the end of the text."""

SECONDS_UNTIL_PROGRESS: Final = 5.0


def late_progress(part: Generator | TokenScorer, what: str, *, total: int, unit: str) -> Any:
    """The progress of work that takes long, on the first rank if ``part`` shows it."""
    return progress_bar(
        what,
        total=total,
        unit=unit,
        is_shown=part.shows_progress and part.groups.is_main,
        delay=SECONDS_UNTIL_PROGRESS,
    )


@dataclass(slots=True)
class CutTexts:
    """How many texts have lost their beginnings, of all that this replica has read."""

    cut: int = 0
    texts: int = 0

    def add(self, lengths: Iterable[int], room: int) -> None:
        """Count texts of these lengths, of which ``room`` tokens are read."""
        for length in lengths:
            self.texts += 1
            self.cut += length > room


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """Generation with one replica of a model, all of whose ranks make the same calls.

    Several models read and choose in lockstep, each with a cache of its own.
    """

    models: TokenMixture
    shard: VocabShard
    groups: ProcessGroups
    micro_batch_size: int
    max_length: int
    cut_texts: CutTexts = field(default_factory=CutTexts)
    shows_progress: bool = False
    """Whether the first rank shows on standard error how many prompts are completed."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        options: Sampling,
        *,
        places: Sequence[int],
        is_done: IsDone,
    ) -> list[Completion]:
        """New ids of each prompt, up to ``max_new_tokens``; some may follow the end of the text.

        Prompts that are too long lose their beginnings.

        Args:
            places: Index of each prompt among all, which its samples depend on.
            is_done: Called every few steps with the new ids of a prompt.

        Collectives: at each step those of the schedule and of the layers, one all-gather over
        ``tp`` of the last logits, one broadcast of [3, B] over ``tp`` and one over ``pp``.

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
        self.cut_texts.add(map(len, prompts), room)
        cut = [prompt[-room:] for prompt in prompts]
        order = sorted(range(len(cut)), key=lambda i: -len(cut[i]))
        completions = [Completion([], [])] * len(cut)
        with late_progress(self, "generate", total=len(order), unit="prompt") as bar:
            for start in range(0, len(order), self.micro_batch_size):
                part = order[start : start + self.micro_batch_size]
                new = self._batch(
                    [cut[i] for i in part], [places[i] for i in part], options, is_done, bar
                )
                for i, completion in zip(part, new, strict=True):
                    completions[i] = completion
                bar.set_postfix_str("", refresh=False)
                bar.update(len(part))
        return completions

    @torch.no_grad()
    def _batch(
        self,
        prompts: Sequence[list[int]],
        places: Sequence[int],
        options: Sampling,
        is_done: IsDone,
        bar: Any,
    ) -> list[Completion]:
        device, lengths = self.groups.device, [len(prompt) for prompt in prompts]
        total = max(lengths) + options.max_new_tokens
        tokens = torch.zeros(len(prompts), total, dtype=torch.int64)
        uniforms = torch.zeros(len(prompts), total, dtype=torch.float64)
        for row, numbers in enumerate(draws(places, options)):
            tokens[row, : lengths[row]] = torch.tensor(prompts[row])
            uniforms[row, lengths[row] : lengths[row] + len(numbers)] = numbers
        tokens, uniforms = tokens.to(device), uniforms.to(device)
        # Log-probabilities and entropies.
        chosen_from = torch.zeros(2, len(prompts), total, dtype=torch.float64, device=device)
        prompt_ends = torch.tensor(lengths, device=device)
        longest = -(-total // CACHE_STEP) * CACHE_STEP
        contexts = [StaticInferenceContext(len(prompts), longest) for _ in self.models.chunks]
        begin, end = 0, min(lengths)
        while end < total:
            chosen = self._step(tokens[:, begin:end], contexts, uniforms[:, end], options)
            tokens[:, end] = torch.where(prompt_ends > end, tokens[:, end], chosen.ids)
            chosen_from[0, :, end], chosen_from[1, :, end] = chosen.log_probs, chosen.entropies
            begin, end = end, end + 1
            bar.set_postfix_str(f"{end - min(lengths)} tokens of the next", refresh=False)
            bar.update(0)
            if (end - min(lengths)) % _CHECK_EVERY == 0 and _all_done(
                tokens[:, :end], lengths, options, is_done
            ):
                break
        new = [slice(n, min(end, n + options.max_new_tokens)) for n in lengths]
        of_rows = zip(tokens.tolist(), *chosen_from.tolist(), strict=True)
        return [
            Completion(*(values[part] for values in of_row))
            for part, of_row in zip(new, of_rows, strict=True)
        ]

    def _step(
        self,
        tokens: torch.Tensor,
        contexts: Sequence[StaticInferenceContext],
        uniforms: torch.Tensor,
        options: Sampling,
    ) -> ChosenTokens:
        """The next token after ``tokens`` [B, T]; each model has read those before."""
        of_models = [
            last_logits(chunk, tokens, context, shard=self.shard, groups=self.groups)
            for chunk, context in zip(self.models.chunks, contexts, strict=True)
        ]
        # Ids are exact in fp64, and one broadcast takes all three.
        chosen = torch.zeros(3, len(tokens), dtype=torch.float64, device=tokens.device)
        logits = [each for each in of_models if each is not None]
        if logits:
            mixed = self.models.mixed(logits, partial(torch.log_softmax, dim=-1))
            chosen = torch.stack([part.double() for part in next_tokens(mixed, uniforms, options)])
            # Tensor-parallel ranks have the same logits, but one decides, so that none can differ.
            first = dist.get_process_group_ranks(self.groups.tp)[0]
            dist.broadcast(chosen, src=first, group=self.groups.tp)
        ids, log_probs, entropies = self.groups.broadcast_from_last_stage(chosen)
        return ChosenTokens(ids.long(), log_probs, entropies)


def _all_done(
    tokens: torch.Tensor, lengths: Sequence[int], options: Sampling, is_done: IsDone
) -> bool:
    """Whether every row has ended or has all its new tokens. Waits for the device."""
    new = [ids[length:] for ids, length in zip(tokens.tolist(), lengths, strict=True)]
    return all(len(ids) >= options.max_new_tokens or is_done(ids) for ids in new)


_TILE_ROWS: Final = 512
"""Number of positions whose logits are made at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScorer:
    """Scoring of requests with megatron-core's forward-only schedule, without a cache."""

    models: TokenMixture
    shard: VocabShard
    groups: ProcessGroups
    micro_batch_size: int
    max_length: int
    cut_texts: CutTexts = field(default_factory=CutTexts)
    shows_progress: bool = False
    """Whether the first rank shows on standard error how many requests are scored."""

    def log_likelihoods(self, requests: Sequence[TokenRequest]) -> list[LogLikelihood]:
        """Log-likelihood of each request, in order; the same on every rank of a replica.

        No continuation may be longer than ``max_length``.

        Collectives: for every global batch the schedule's, five all-reduces a tile over ``tp``
        and one broadcast over ``pp``.
        """
        # By length, the longest first, so that running out of memory shows at once.
        order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i])))
        size = self.micro_batch_size * self.groups.pp.size()
        scored: list[torch.Tensor] = []
        with late_progress(self, "score", total=len(order), unit="text") as bar:
            for start in range(0, len(order), size):
                part = order[start : start + size]
                scored.append(self._scores([requests[i] for i in part]))
                bar.update(len(part))
        results: list[LogLikelihood] = [LogLikelihood(0.0, True)] * len(requests)
        # One wait for the device, at the end.
        for i, (nats, misses) in zip(order, _rows(scored), strict=True):
            results[i] = LogLikelihood(nats, misses == 0)
        return results

    @torch.no_grad()
    def _scores(self, requests: Sequence[TokenRequest]) -> torch.Tensor:
        """[R, 2] fp64: sums of log-probabilities, and tokens that are not the first choice."""
        self.cut_texts.add((sum(map(len, request)) for request in requests), self.max_length + 1)
        rows = [
            (request.context + request.continuation)[-self.max_length - 1 :] for request in requests
        ]
        scored = [len(request.continuation) for request in requests]
        device, size = self.groups.device, self.micro_batch_size
        microbatches = list(self._microbatches([row[:-1] for row in rows]))
        targets = zip(
            *(
                MegatronTeacher([chunk], shard=self.shard).targets(microbatches)
                for chunk in self.models.chunks
            ),
            strict=True,
        )
        sums = torch.zeros(len(rows), 2, dtype=torch.float64, device=device)
        for start, of_models in zip(range(0, len(rows), size), targets, strict=False):
            part = range(start, min(start + size, len(rows)))
            places = [
                (i - start, len(rows[i]) - 1 - scored[i] + k, rows[i][len(rows[i]) - scored[i] + k])
                for i in part
                for k in range(scored[i])
            ]
            owner = torch.tensor([i for i in part for _ in range(scored[i])], device=device)
            row, column, labels = torch.tensor(places, device=device).unbind(1)
            for tile in range(0, len(labels), _TILE_ROWS):
                of = slice(tile, tile + _TILE_ROWS)
                logits = self.models.mixed(
                    [_logits(target, row[of], column[of]) for target in of_models],
                    partial(log_softmax, shard=self.shard),
                )
                sums.index_add_(0, owner[of], _label_scores(logits, labels[of], self.shard))
        return self.groups.broadcast_from_last_stage(sums)

    def _microbatches(self, rows: Sequence[Sequence[int]]) -> Iterator[InputRows]:
        """Microbatches [B, T], padded on the right, to which no earlier position attends."""
        length, size = max(map(len, rows)), self.micro_batch_size
        for start in range(0, len(rows), size):
            tokens = torch.zeros(size, length, dtype=torch.int64)
            for row, ids in enumerate(rows[start : start + size]):
                tokens[row, : len(ids)] = torch.tensor(ids)
            tokens = tokens.to(self.groups.device)
            yield InputRows(tokens, torch.arange(length, device=tokens.device).expand_as(tokens))


def _logits(target: TeacherTargets, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """[N, Vp] of the positions at ``row`` and ``column``, both [N]."""
    assert target.hidden is not None
    return target.logits_of(target.hidden[row, column])


def _label_scores(logits: torch.Tensor, labels: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """[N, 2] fp64: log-probability of each label, and whether another token is likelier.

    Equivalent: ``log_softmax(logits)[labels]`` and ``argmax(logits) != labels`` of whole rows.
    Collectives: five all-reduces of [N] over the shard's group.
    """
    log_probs = log_softmax(logits, shard)
    column = labels - shard.start
    is_local = (column >= 0) & (column < shard.width)
    picked = log_probs.gather(1, column.clamp(0, shard.width - 1)[:, None])[:, 0]
    nats = all_reduce_sum(picked.masked_fill(~is_local, 0.0).double(), shard.group)
    return torch.stack((nats, (vocab_argmax(logits, shard) != labels).double()), dim=1)


def _rows(scored: Sequence[torch.Tensor]) -> list[tuple[float, float]]:
    return [(nats, misses) for nats, misses in torch.cat(list(scored)).tolist()] if scored else []
