"""Sampling and scoring by servers of vLLM or SGLang, token ids in and out. T tokens, K top."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from megatron_ext.engines.engine import (
    Answers,
    AskedPrompt,
    Completion,
    EngineConfig,
    EngineKind,
    Sampling,
    Scores,
)
from megatron_ext.engines.http_client import HttpClient
from megatron_ext.engines.sglang import Sglang
from megatron_ext.engines.vllm import Vllm
from megatron_ext.errors import ConfigError, DistributedError, MegatronExtError

Read = TypeVar("Read")
_SEEDS: Final = 1 << 31

_HOT: Final = 8.0
"""Temperature at which the two log-probabilities of a sampled token are nats apart."""

_ROUNDING: Final = 0.1
"""Nats that a model in bf16 differs by between sampling tokens and reading them, in the mean."""


class Dialect(Protocol):
    """Requests and answers of a kind of server, as plain values."""

    def sampling(
        self, model: str, prompt: AskedPrompt, sampling: Sampling, seed: int
    ) -> tuple[str, Mapping[str, Any]]:
        """Path and body of a request for a completion."""

    def completion(self, answer: Any) -> Completion:
        """The completion of an answer."""

    def scoring(self, model: str, ids: list[int], top_k: int) -> tuple[str, Mapping[str, Any]]:
        """Path and body of a request for the log-probabilities of ``ids`` [T]."""

    def scores(self, answer: Any, ids: list[int], top_k: int) -> Scores:
        """The scores of an answer.

        Raises:
            ValueError: It is of other ids.
        """

    def loading(self, folder: Path) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Paths and bodies of the requests that have a server load other weights."""


_DIALECTS: Final[Mapping[EngineKind, Dialect]] = {"vllm": Vllm(), "sglang": Sglang()}


class InferenceServer:
    """One or several equal servers with a model.

    Args:
        config: Addresses and limits.
        where: Section of the configuration, for errors.
        vocab_size: Ids of the model's tokenizer; an id beyond would end some servers.
        length: Tokens that the model has to read.

    Raises:
        DistributedError: A server does not answer, or answers nonsense.
        ConfigError: It has not the model, or one that reads too little.
    """

    def __init__(self, config: EngineConfig, *, where: str, vocab_size: int, length: int) -> None:
        self._dialect, self._where = _DIALECTS[config.kind], where
        self._vocab_size = vocab_size
        self._client = HttpClient(config, where=where)
        self.model = self._checked_model(config, length)

    def complete(self, prompts: Sequence[AskedPrompt], sampling: Sampling) -> Answers:
        """Begin a completion of each prompt; the result waits for the completions.

        Raises:
            DistributedError: No answer, or one that cannot be read; by the result.
        """
        asked = [
            self._dialect.sampling(self.model, p, sampling, _seed(sampling.seed, p.place))
            for p in prompts
        ]
        answers = self._begin(asked)
        return lambda: [self._read(self._dialect.completion, answer) for answer in answers]

    def score(self, texts: Sequence[list[int]], top_k: int) -> Callable[[], list[Scores]]:
        """Begin to score texts of at least two ids; the result waits for the scores.

        Raises:
            DistributedError: No answer, or one that cannot be read; by the result.
        """
        for ids in texts:
            if not all(0 <= token < self._vocab_size for token in ids):
                raise ConfigError(
                    "a text holds an id that the engine's model does not have",
                    where=self._where,
                    got=max(ids),
                    expected=f"0 to {self._vocab_size - 1}",
                )
        asked = [self._dialect.scoring(self.model, list(ids), top_k) for ids in texts]
        answers = self._begin(asked)

        def read(answer: Callable[[], Any], ids: Sequence[int]) -> Scores:
            return self._read(lambda said: self._dialect.scores(said, list(ids), top_k), answer)

        return lambda: [read(*pair) for pair in zip(answers, texts, strict=True)]

    def load(self, folder: Path) -> None:
        """Have every server load the weights of a HuggingFace folder that it can read.

        Raises:
            DistributedError: A server cannot.
        """
        for server in range(len(self._client.servers)):
            for path, body in self._dialect.loading(folder):
                answer = self._client.post(path, body, server=server)
                if isinstance(answer, Mapping) and answer.get("success") is False:
                    raise self.unreadable(f"{answer.get('message')}")

    def unreadable(self, got: str) -> DistributedError:
        """An error about an answer that the server cannot mean."""
        return DistributedError(
            "the engine's answer cannot be read",
            where=self._where,
            got=got,
            fix="look at kind and model, and at docs/on_policy.md for how to start the server",
        )

    def close(self) -> None:
        """End the connections."""
        self._client.close()

    def _begin(self, asked: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Callable[[], Any]]:
        return self._client.begin(asked[0][0], [body for _, body in asked]) if asked else []

    def _read(self, read: Callable[[Any], Read], answer: Callable[[], Any]) -> Read:
        try:
            return read(answer())
        except MegatronExtError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise self.unreadable(f"{type(error).__name__}: {error}") from error

    def _checked_model(self, config: EngineConfig, length: int) -> str:
        """The name of the model, the same on every server."""
        name = config.model
        for server, url in enumerate(self._client.servers):
            answer = self._client.get("/v1/models", server=server)
            try:
                models = {str(model["id"]): model for model in answer["data"]}
            except (KeyError, TypeError) as error:
                raise self.unreadable(f"{url}/v1/models: {error}") from error
            if name is None and len(models) == 1:
                (name,) = models
            if name not in models:
                raise ConfigError(
                    "the engine does not have the model",
                    where=f"{self._where}.model",
                    got=name,
                    expected=" or ".join(models),
                )
            longest = models[name].get("max_model_len")
            # One token is always asked for behind a text.
            if longest is not None and longest < length + 1:
                raise ConfigError(
                    "the engine's model reads too few tokens",
                    where=self._where,
                    got=f"{longest} at {url}",
                    expected=f"at least {length + 1}",
                    fix="start the server with a longer maximum length, or lower seq_length",
                )
        assert name is not None
        return name


def check_processed(server: InferenceServer, sampling: Sampling, prompt: AskedPrompt) -> None:
    """Check that a server says with which probability it has sampled, not the model's own.

    Raises:
        ConfigError: It says the model's, before temperature and top-p.
    """
    if sampling.temperature == 0 or (sampling.temperature == 1 and sampling.top_p == 1):
        return
    hot = replace(sampling, max_new_tokens=16, temperature=_HOT, top_p=1.0)
    (sampled,) = server.complete([prompt], hot)()
    (plain,) = server.score([[*prompt.ids, *sampled.ids]], 0)()
    found, own = np.array(sampled.log_probs), plain.log_probs[-len(sampled.ids) :]
    if np.abs(found - own).mean() < _ROUNDING:
        raise ConfigError(
            "the engine gives the model's log-probabilities, and not those that it samples with",
            got=f"{found[0]:.6f} at temperature {_HOT}, and {own[0]:.6f} without it",
            fix="start vLLM with --logprobs-mode processed_logprobs",
        )


def _seed(seed: int, place: int) -> int:
    """A seed of one sample that a server takes."""
    digest = hashlib.sha256(f"{seed} {place}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % _SEEDS
