"""What an engine is: prompts of token ids in, sampled ids with their log-probabilities out; and
how one that is an inference server is found.

T tokens of a text, N sampled ones, K top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of sampling."""

    max_new_tokens: int
    """Most tokens of a completion."""

    temperature: float = 1.0
    """Divisor of logits; 0 for the likeliest tokens."""

    top_p: float = 1.0
    """Probability of the most probable tokens that are sampled from (nucleus sampling)."""

    seed: int = 0


class AskedPrompt(NamedTuple):
    """A prompt as an engine takes it."""

    ids: list[int]

    stop_ids: frozenset[int]
    """Ids that end a completion, which has the one that it meets as its last."""

    place: int
    """Number of the prompt in the run; with the seed it decides the sample, where an engine can be
    made to repeat one."""


class Completion(NamedTuple):
    """What an engine sampled."""

    ids: list[int]
    """[N] up to a stop id, or as many as there may be."""

    log_probs: list[float]
    """[N] natural logarithm of the probability with which each was sampled."""

    entropies: list[float] = []  # noqa: RUF012
    """[N] entropy in nats of what each was sampled from; empty where the engine does not say."""


Answers = Callable[[], list[Completion]]
"""Waits for the completions of prompts that an engine was asked for, in order."""


class Scores(NamedTuple):
    """A model's predictions of the tokens of a text, each behind those before it."""

    log_probs: NDArray[np.float32]
    """[T - 1] of the tokens from the second one on."""

    top_ids: NDArray[np.int64]
    """[T - 1, K] the likeliest tokens in their place."""

    top_log_probs: NDArray[np.float32]
    """[T - 1, K]"""


class Engine(Protocol):
    """Completes prompts with the weights of a run's student."""

    shares_weights: bool
    """Whether the weights are the student's own, and so always the newest."""

    def complete(self, prompts: Sequence[AskedPrompt]) -> Answers:
        """Begin a completion of each prompt; every rank of a replica makes the same calls, and
        calls the results in the same order. One that shares weights samples in the result."""

    def load(self, checkpoint: Path) -> None:
        """Take the weights of a checkpoint, where they are not shared; called on every rank, when
        all answers were taken."""

    def close(self) -> None:
        """Drop what was begun and not taken."""


EngineKind = Literal["vllm", "sglang"]


@dataclass(kw_only=True, frozen=True, slots=True)
class EngineConfig:
    """A server of vLLM or SGLang that was started before the run."""

    kind: EngineKind
    """``vllm`` (``vllm serve``) or ``sglang`` (``sglang.launch_server``)."""

    url: tuple[str, ...]
    """Addresses, such as ``http://127.0.0.1:8000``; of several equal servers each takes a part of
    the requests."""

    model: str | None = None
    """Name under which the server has the model; its only one when not given."""

    key_variable: str = "MEGATRON_EXT_ENGINE_KEY"
    """Environment variable with the server's API key."""

    root_certificate: str | None = None
    """PEM file that verifies the certificates of ``https`` addresses; the system's own roots when
    not given."""

    plain_connection: bool = False
    """Allow ``http`` to other machines, over a trusted network."""

    timeout_s: float = 600.0
    """Longest wait for the answer to one request."""

    retries: int = 5
    """Repetitions of a request that failed on the way or was refused for lack of time."""

    concurrency: int = 32
    """Requests under way at a time."""

    def __post_init__(self) -> None:
        if not self.url:
            raise ConfigError("an engine has no address", expected="a URL in url")
        for name, least in (("timeout_s", 0), ("concurrency", 0), ("retries", -1)):
            if not getattr(self, name) > least:
                raise ConfigError(f"{name} of an engine is too small", got=getattr(self, name))
        for url in self.url:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(
                    "an engine's address cannot be used", got=url, expected="http(s)://HOST:PORT"
                )
            host = parts.hostname
            is_local = host in ("localhost", "::1") or host.startswith("127.")
            if parts.scheme == "http" and not (is_local or self.plain_connection):
                raise ConfigError(
                    "an engine on another machine needs TLS",
                    got=url,
                    expected="https",
                    fix="put the server behind TLS, or set plain_connection where the network is "
                    "trusted",
                )
