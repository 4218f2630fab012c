"""Several models as one ``LanguageModel``: token by token, or byte by byte across vocabularies.

Byte by byte, the next byte's distribution is the weighted mean of those of the models
(``byte_tree``). All of them read the same text: a prompt as their own tokenizer reads it, but for
its last bytes, which may belong to tokens that go beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.evaluation.byte_tree import END, ByteTree, ByteVocabulary
from megatron_ext.evaluation.generation import late_progress, next_tokens
from megatron_ext.evaluation.language_model import (
    EnsembleOptions,
    GenerationOptions,
    LogLikelihood,
    TokenRequest,
    prompt_ids,
)
from megatron_ext.evaluation.megatron_language_model import (
    MegatronLanguageModel,
    ModelOptions,
    groups_for,
    load_mixture,
    open_model,
)
from megatron_ext.evaluation.token_mixture import NextTokens
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.tokenizers.token_bytes import TokenBytes

Result = TypeVar("Result")

_OPEN_BYTES: Final = 16
"""Last bytes of a prompt that are read byte by byte, at least."""

_CHECK_EVERY: Final = 16
"""Bytes between two counts of the tokens of a completion."""

_SPARE: Final = 2
"""Tokens of any model that there is room for, for each of the first model's."""


@dataclass(frozen=True)
class ByteModel:
    """One model of an ensemble, seen byte by byte.

    Args:
        model: The model, alone in its mixture.
        prune: See ``ByteTree``.
        beam: Likewise.
    """

    model: MegatronLanguageModel
    prune: float
    beam: int | None

    def tree(self, prompt: str, *, following: int) -> ByteTree:
        """The readings of texts that begin with a prompt, with all of it read.

        A prompt that is too long loses its beginning.

        Args:
            following: Tokens behind the prompt that there is room for.

        Raises:
            DataError: The prompt is not in the model's vocabulary.
        """
        ids, rest = self._opened(prompt)
        room = max(1, self._next_tokens.max_length - len(rest) - following)
        self.model.generator.cut_texts.add([len(ids)], room)
        tree = ByteTree(
            self._vocabulary, self._after, ids[-room:], prune=self.prune, beam=self.beam
        )
        for byte in rest:
            tree.read(byte)
        return tree

    def _opened(self, prompt: str) -> tuple[list[int], bytes]:
        """Ids that a prompt surely begins with, and the bytes behind them."""
        ids = prompt_ids(prompt, self.model)
        if self.model.applies_chat_template:
            return ids, b""
        rest = b"" if prompt else self.lead
        while len(rest) < _OPEN_BYTES and len(ids) > 1:
            spelled = self.tokens[ids[-1]]
            if spelled is None:
                break
            rest = spelled + rest
            ids = ids[:-1]
        return ids, rest

    def _after(self, ids: Sequence[int]) -> NDArray[np.float64]:
        if len(ids) > self._next_tokens.max_length:
            raise DataError(
                "the text is longer than a model reads",
                got=f"{len(ids)} tokens",
                expected=f"at most {self._next_tokens.max_length}",
                fix="raise --seq-length, if the model allows",
            )
        return self._next_tokens.after(ids)

    @cached_property
    def tokens(self) -> Sequence[bytes | None]:
        """[V] bytes of each id; None for ids that are no text."""
        return TokenBytes.of(self.model.tokenizer).tokens()

    @cached_property
    def _vocabulary(self) -> ByteVocabulary:
        return ByteVocabulary(self.tokens, self.model.ends())

    @cached_property
    def lead(self) -> bytes:
        """What the tokenizer writes before a text, as SentencePiece its space."""
        spelled = b"".join(self.tokens[i] or b"" for i in self.model.tokenizer.text_to_ids("a"))
        return spelled.removesuffix(b"a")

    @cached_property
    def _next_tokens(self) -> NextTokens:
        generator = self.model.generator
        return NextTokens(
            generator.models.chunks[0],
            generator.shard,
            generator.groups,
            max_length=self.model.max_length,
        )


@dataclass(frozen=True, kw_only=True)
class ByteEnsemble:
    """A ``LanguageModel`` of several, or of one, that predicts bytes.

    Completions have as many tokens as options allow by the first model's tokenizer. Temperature
    and top-p apply to bytes.
    """

    models: tuple[ByteModel, ...]

    weights: tuple[float, ...]
    """Weight of each, with the sum 1."""

    lost: list[float] = field(default_factory=list)
    """``ByteTree.lost`` of every text so far and every model."""

    @property
    def tokenizer(self) -> MegatronTokenizerText:
        """Tokenizer of the first model."""
        return self._first.tokenizer

    @property
    def max_length(self) -> int:
        """Longest sequence in tokens of the first model: others may need twice as many."""
        return min(model.model.max_length for model in self.models) // _SPARE

    @property
    def adds_bos(self) -> bool:
        """Whether each model's contexts begin with BOS, where it has one."""
        return self._first.adds_bos

    @property
    def applies_chat_template(self) -> bool:
        """Whether prompts are messages, each model's in its own template."""
        return self._first.applies_chat_template

    @property
    def precision(self) -> str:
        """Precision of weights and computation."""
        return self._first.precision

    @property
    def _first(self) -> MegatronLanguageModel:
        return self.models[0].model

    def log_likelihoods(self, requests: Sequence[TokenRequest]) -> list[LogLikelihood]:
        """Log-likelihood of the bytes of each continuation, in order.

        Collectives: those of ``NextTokens.after`` for every reading, and one all-gather of objects
        over ``dp``.

        Raises:
            ConfigError: With a chat template: contexts of other models would be other texts.
        """
        if self.applies_chat_template:
            raise ConfigError(
                "continuations of messages are not scored byte by byte",
                where="--apply-chat-template",
                got="--mode byte",
                fix="leave the template out, or take --mode common",
            )
        scored = [self._scored(requests[i]) for i in self._local("score", "text", len(requests))]
        return self._first.gathered(scored, len(requests))

    def generate(self, prompts: Sequence[str], options: GenerationOptions) -> list[str]:
        """Completion of each prompt, in order; collectives as of ``log_likelihoods``."""
        places = self._local("generate", "prompt", len(prompts))
        texts = [self._completion(prompts[i], i, options) for i in places]
        return self._first.gathered(texts, len(prompts))

    def cut_prompts(self) -> tuple[int, int]:
        """Those of the model that cuts most."""
        return max(model.model.cut_prompts() for model in self.models)

    def once(self, work: Callable[[], Result]) -> Result:
        """See ``MegatronLanguageModel.once``."""
        return self._first.once(work)

    def _local(self, what: str, unit: str, count: int) -> Iterator[int]:
        """Indices of the requests of this replica, whose progress the first rank shows."""
        places = self._first.local(count)
        with late_progress(self._first.generator, what, total=len(places), unit=unit) as bar:
            for place in places:
                yield place
                bar.update()

    def _scored(self, request: TokenRequest) -> LogLikelihood:
        first = self.models[0]
        context, continuation = (
            b"".join(first.tokens[i] or b"" for i in ids)
            for ids in (request.context, request.continuation)
        )
        text = context.removeprefix(first.lead).decode(errors="ignore")
        following = _SPARE * len(request.continuation)
        trees = [model.tree(text, following=following) for model in self.models]
        nats, is_greedy = 0.0, True
        # What the tokenizer writes before a text is read with an empty prompt.
        for byte in continuation if text else continuation.removeprefix(first.lead):
            for tree in trees:
                tree.expect(byte)
            mixed = self._mixed(trees)
            is_greedy &= bool(mixed.argmax() == byte)
            nats += math.log(mixed[byte]) if mixed[byte] > 0 else -math.inf
            for tree in trees:
                tree.read(byte)
        self.lost.extend(tree.lost for tree in trees)
        return LogLikelihood(nats, is_greedy)

    def _completion(self, prompt: str, place: int, options: GenerationOptions) -> str:
        generator = torch.Generator().manual_seed((options.seed << 31) + place)
        following = _SPARE * options.max_new_tokens
        trees = [model.tree(prompt, following=following) for model in self.models]
        new = bytearray()
        text = ""
        while True:
            mixed = torch.from_numpy(self._mixed(trees)).log()
            uniform = torch.rand(1, dtype=torch.float64, generator=generator)
            byte = int(next_tokens(mixed[None], uniform, options).ids)
            if byte == END:
                break
            new.append(byte)
            text = new.decode(errors="ignore")
            if any(stop in text for stop in options.stop):
                break
            if len(new) % _CHECK_EVERY == 0 and self._is_long(text, options.max_new_tokens):
                break
            for tree in trees:
                tree.read(byte)
        self.lost.extend(tree.lost for tree in trees)
        ids = self.tokenizer.text_to_ids(text)
        if len(ids) > options.max_new_tokens:
            text = self.tokenizer.detokenize(ids[: options.max_new_tokens])
        for stop in options.stop:
            text = text.split(stop)[0]
        return text

    def _is_long(self, text: str, most: int) -> bool:
        return len(self.tokenizer.text_to_ids(text)) > most

    def _mixed(self, trees: Sequence[ByteTree]) -> NDArray[np.float64]:
        """[257]"""
        pairs = zip(self.weights, trees, strict=True)
        mixed: NDArray[np.float64] = np.sum([w * tree.next_bytes() for w, tree in pairs], axis=0)
        return mixed


def load_ensemble(
    checkpoints: Sequence[Path], options: ModelOptions, ensemble: EnsembleOptions
) -> MegatronLanguageModel | ByteEnsemble:
    """Build and load models on every rank, in one layout.

    Args:
        checkpoints: One or several, see ``load_language_model``.

    Collectives: those of ``load_language_model``.

    Raises:
        MegatronExtError: A checkpoint cannot be read, or the options do not fit.
    """
    weights = ensemble.weights(len(checkpoints))
    if options.tokenizer is not None and len(checkpoints) > 1:
        raise ConfigError(
            "each of several models reads with its own tokenizer",
            where="--tokenizer",
            got=options.tokenizer,
            fix="leave it out",
        )
    groups = groups_for(options)
    opened = [open_model(checkpoint, options) for checkpoint in checkpoints]
    if ensemble.mode == "common":
        return load_mixture(opened, options, groups, weights=weights, mean=ensemble.mean)
    models = [
        ByteModel(load_mixture([each], options, groups), ensemble.prune, ensemble.beam)
        for each in opened
    ]
    return ByteEnsemble(models=tuple(models), weights=weights)
