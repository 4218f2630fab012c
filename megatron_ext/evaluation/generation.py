"""Generation with a cache of keys and values, under tensor and pipeline parallelism.

The cache is megatron-core's ``StaticInferenceContext``, and a step is its forward-only schedule.
All rows of a batch stand at the same position, as the context asks: the shortest prompt is read at
once, and while others are still being read, their own tokens take the place of what would be
generated. So no row is padded, nothing is masked, and every token has the position that it has
without a cache.

B rows, T tokens, V columns.

The next token of each row. B rows, V columns of a whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import ConfigError
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
