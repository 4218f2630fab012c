"""What a task asks of a model. No torch here: tasks read their files before a model is built.

Texts as token requests, cut as lm-evaluation-harness cuts them, so that numbers compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from megatron_ext.errors import ConfigError, TokenizerError
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


class _Reader(Protocol):
    @property
    def tokenizer(self) -> MegatronTokenizerText: ...

    @property
    def adds_bos(self) -> bool: ...

    @property
    def applies_chat_template(self) -> bool: ...

    @property
    def max_length(self) -> int: ...


def prompt_ids(text: str, reader: _Reader) -> list[int]:
    """Ids of a prompt; at least one.

    With a chat template they are those of one message of a user and of what comes before an answer,
    and control tokens, BOS among them, are the template's alone.

    Raises:
        TokenizerError: The text is empty and the tokenizer has nothing to begin a text with.
    """
    if reader.applies_chat_template:
        message = [{"role": "user", "content": text}]
        rendered = reader.tokenizer.apply_chat_template(message, add_generation_prompt=True)
        assert isinstance(rendered, list)
        return rendered
    ids = reader.tokenizer.text_to_ids(text)
    bos = reader.tokenizer.bos_id
    if reader.adds_bos and bos is not None:
        return [bos, *ids]
    return ids or [first_id(reader.tokenizer)]


def first_id(tokenizer: MegatronTokenizerText) -> int:
    """What stands before a text without context: BOS, or the end of the text before.

    Raises:
        TokenizerError: The tokenizer has neither.
    """
    for found in (tokenizer.bos_id, tokenizer.eod, tokenizer.eos_id):
        if found is not None:
            return found
    raise TokenizerError(
        "the tokenizer has neither BOS nor an end-of-text token to begin a text with",
        where=tokenizer.path,
    )


def continuation_request(context: str, continuation: str, reader: _Reader) -> TokenRequest:
    """A continuation behind its context, tokenized as one text.

    Spaces at the end of the context are the continuation's: most tokenizers put a space before a
    word into its token. With a chat template the continuation is what an answer begins with, so
    that it has no space in front.

    Raises:
        TokenizerError: The continuation has no token of its own.
    """
    if reader.applies_chat_template:
        answer = reader.tokenizer.text_to_ids(continuation.lstrip(" "))
        if not answer:
            raise TokenizerError("a continuation has no token of its own", got=repr(continuation))
        return TokenRequest(prompt_ids(context, reader), answer)
    stripped = context.rstrip()
    whole = prompt_ids(context + continuation, reader)
    before = prompt_ids(stripped, reader)
    if not stripped and whole[:1] != before:
        whole = before + whole
    behind = whole[len(before) :]
    if not behind:
        raise TokenizerError("a continuation has no token of its own", got=repr(continuation))
    return TokenRequest(before, behind)


def rolling_requests(text: str, reader: _Reader) -> Iterator[TokenRequest]:
    """Every token of a text once, in windows as long as the model reads.

    The first window begins with BOS or the end of a text, every other with the token before it.
    """
    ids = reader.tokenizer.text_to_ids(text)
    length, before = reader.max_length, first_id(reader.tokenizer)
    for start in range(0, len(ids), length):
        window = ids[start : start + length]
        # The last window is filled up from before, so that its tokens have context, too.
        first = max(0, start + len(window) - length - 1)
        yield TokenRequest(ids[first:start] if start else [before], window)
