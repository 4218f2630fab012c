"""A megatron-core model as a ``LanguageModel``: requests are shared out over replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import DataError
from megatron_ext.evaluation.generation import Generator
from megatron_ext.evaluation.language_model import GenerationOptions, LogLikelihood, TokenRequest
from megatron_ext.evaluation.text_requests import prompt_ids
from megatron_ext.evaluation.token_scoring import TokenScorer
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.models import DTYPES

Result = TypeVar("Result")
_LAST_IDS = 8
"""Ids of a prompt that a completion is decoded behind: some decoders drop a first space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronLanguageModel:
    """See ``LanguageModel``."""

    tokenizer: MegatronTokenizerText
    adds_bos: bool
    scorer: TokenScorer
    generator: Generator
    groups: ProcessGroups
    applies_chat_template: bool = False

    @property
    def max_length(self) -> int:
        """Tokens that it reads at once."""
        return self.scorer.max_length

    @property
    def precision(self) -> str:
        """Of its weights and of what it computes."""
        dtype = self.scorer.chunk.config.params_dtype
        return next(name for name, known in DTYPES.items() if known == dtype)

    def log_likelihoods(self, requests: Sequence[TokenRequest]) -> list[LogLikelihood]:
        """Of each request; the collectives of ``TokenScorer``, and one gather over ``dp``.

        Raises:
            DataError: A continuation is longer than the model reads.
        """
        longest = max((len(request.continuation) for request in requests), default=0)
        if longest > self.max_length:
            raise DataError(
                "a continuation is longer than the model reads",
                got=f"{longest} tokens",
                expected=f"at most {self.max_length}",
                fix="raise --seq-length, if the model allows",
            )
        own = [requests[i] for i in self._own(len(requests))]
        return self._gathered(self.scorer.log_likelihoods(own), len(requests))

    def generate(self, prompts: Sequence[str], options: GenerationOptions) -> list[str]:
        """Completions; the collectives of ``Generator``, and one gather over ``dp``."""
        own = self._own(len(prompts))
        ids = [prompt_ids(prompts[i], self) for i in own]

        def is_done(new: Sequence[int]) -> bool:
            text = self.tokenizer.detokenize(list(new))
            return self._ends_text(new) or any(stop in text for stop in options.stop)

        new = self.generator.generate(ids, options, places=list(own), is_done=is_done)
        texts = [self._text(*pair, options.stop) for pair in zip(ids, new, strict=True)]
        return self._gathered(texts, len(prompts))

    def once(self, work: Callable[[], Result]) -> Result:
        """Of the main rank; one object broadcast, and those of ``ProcessGroups.on_main``."""
        found: list[Result] = []
        self.groups.on_main(lambda: found.append(work()))
        every: list[list[Result]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, found)
        return next(result for rank in every for result in rank)

    def _own(self, count: int) -> range:
        """What this replica does."""
        return range(self.groups.dp_rank, count, self.groups.dp_size)

    def _gathered(self, own: Sequence[Result], count: int) -> list[Result]:
        every: list[Sequence[Result]] = [()] * self.groups.dp_size
        dist.all_gather_object(every, own, group=self.groups.dp)
        return [every[i % len(every)][i // len(every)] for i in range(count)]

    def _ends(self) -> set[int]:
        ends = (self.tokenizer.eos_id, self.tokenizer.eod)
        return {end for end in ends if end is not None}

    def _ends_text(self, new: Sequence[int]) -> bool:
        return not self._ends().isdisjoint(new)

    def _text(self, prompt: list[int], new: list[int], stops: Sequence[str]) -> str:
        """A completion up to its end."""
        ends = self._ends()
        last = next((i for i, token in enumerate(new) if token in ends), len(new))
        behind = prompt[-_LAST_IDS:]
        before = self.tokenizer.detokenize(behind, skip_special_tokens=True)
        whole = self.tokenizer.detokenize(behind + new[:last], skip_special_tokens=True)
        text = whole[len(before) :]
        if not whole.startswith(before):
            text = self.tokenizer.detokenize(new[:last], skip_special_tokens=True)
        for stop in stops:
            text = text.split(stop)[0]
        return text
