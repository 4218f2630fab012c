"""What a task asks of a model. No torch here: tasks read their files before a model is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers import MegatronTokenizerText

Result = TypeVar("Result")


class TokenRequest(NamedTuple):
    """Tokens to score behind tokens that are given."""

    context: list[int]
    """At least one id."""

    continuation: list[int]
    """At least one id; scored whole, whatever ``context`` is cut to."""


class LogLikelihood(NamedTuple):
    """What a model makes of a continuation."""

    nats: float
    """Logarithm of its probability, at most 0."""

    is_greedy: bool
    """Whether each of its tokens is the model's first choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """How texts go on."""

    max_new_tokens: int
    """Tokens of a completion at most."""

    stop: tuple[str, ...] = ()
    """A completion ends before the first of these; also at the end-of-text token."""

    temperature: float = 0.0
    """Divides logits; 0 takes the first choice always."""

    top_p: float = 1.0
    """Draw among the likeliest tokens whose probabilities reach this sum."""

    seed: int = 0
    """Of the draws. A completion depends on it and on its prompt's place, on no batch or layout."""

    def __post_init__(self) -> None:
        for name, is_good, expected in (
            ("max_new_tokens", self.max_new_tokens > 0, "above 0"),
            ("temperature", 0 <= self.temperature < float("inf"), "0 or above"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("seed", 0 <= self.seed < 1 << 32, "0 to 2^32 - 1"),
            ("stop", all(self.stop), "strings that are not empty"),
        ):
            if not is_good:
                raise ConfigError(
                    f"{name} cannot be used", got=getattr(self, name), expected=expected
                )


class LanguageModel(Protocol):
    """A model with its tokenizer. Every rank calls every method with the same arguments."""

    @property
    def tokenizer(self) -> MegatronTokenizerText:
        """Of the model."""

    @property
    def max_length(self) -> int:
        """Tokens that it reads at once."""

    @property
    def adds_bos(self) -> bool:
        """Whether contexts and prompts begin with the tokenizer's BOS, where it has one."""

    @property
    def applies_chat_template(self) -> bool:
        """Whether contexts and prompts are what a user says, in the tokenizer's chat template."""

    def log_likelihoods(self, requests: Sequence[TokenRequest]) -> list[LogLikelihood]:
        """Of each request, in order."""

    def generate(self, prompts: Sequence[str], options: GenerationOptions) -> list[str]:
        """What follows each prompt, in order, without the prompt, stop string or end of text."""

    def once(self, work: Callable[[], Result]) -> Result:
        """What ``work`` returns on one rank, on all; its error too."""
