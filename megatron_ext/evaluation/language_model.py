"""The language model that tasks use: its protocol, its requests, and texts as token requests.

Texts are cut as lm-evaluation-harness cuts them, so that numbers compare. torch is not imported
here: tasks read their files before a model is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, TypeVar

from megatron_ext.conversation.records import ConversationRecord
from megatron_ext.engines.engine import Sampling
from megatron_ext.errors import ConfigError, TokenizerError
from megatron_ext.tokenizers import MegatronTokenizerText

Result = TypeVar("Result")


class TokenRequest(NamedTuple):
    """A continuation to score behind a context, in tokens."""

    context: list[int]
    """At least one id."""

    continuation: list[int]
    """At least one id; scored whole, even where ``context`` is cut."""


class LogLikelihood(NamedTuple):
    """Score of a continuation by a model."""

    nats: float
    """Natural logarithm of its probability, at most 0."""

    is_greedy: bool
    """Whether each of its tokens is the model's likeliest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions(Sampling):
    """Settings of generation; a completion depends on the seed and on its prompt's place among all
    prompts, but not on batches or layout."""

    stop: tuple[str, ...] = ()
    """Strings before which a completion ends; it also ends at the end-of-text token."""

    temperature: float = 0.0
    """Divisor of logits; 0 always takes the likeliest token."""

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


Mean = Literal["probs", "logits"]
"""What several models average: probabilities, or logits, whose mean is a geometric one."""

PRUNE: Final = 1e-3
BEAM: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleOptions:
    """Combination of several models."""

    mode: Literal["common", "byte"] = "common"
    """``common``: token by token, for models of one vocabulary; ``byte``: byte by byte, for any."""

    weight: tuple[float, ...] = ()
    """Weight of each model; equal when not given."""

    mean: Mean = "probs"
    """What is averaged; in the mode ``byte`` probabilities alone."""

    prune: float = PRUNE
    """In the mode ``byte``, share of a text's probability below which a reading is left out."""

    beam: int = BEAM
    """In the mode ``byte``, most readings of a text that are followed."""

    def weights(self, count: int) -> tuple[float, ...]:
        """Weights of ``count`` models, with the sum 1.

        Raises:
            ConfigError: There are not as many, or one cannot be used.
        """
        given = self.weight or (1.0,) * count
        total = sum(given)
        if len(given) != count:
            raise ConfigError(
                "weights and models are not as many",
                where="--weight",
                got=f"{len(given)} of {count} models",
                fix="give one for each model, in their order",
            )
        if not all(weight >= 0 and math.isfinite(weight) for weight in given) or not total > 0:
            raise ConfigError(
                "weights cannot be used",
                where="--weight",
                got=", ".join(map(str, given)),
                expected="numbers, at least 0, and not all 0",
            )
        return tuple(weight / total for weight in given)

    def __post_init__(self) -> None:
        if self.mode == "byte" and self.mean == "logits":
            raise ConfigError(
                "models of several vocabularies have no logits in common",
                where="--mean",
                got="logits with --mode byte",
                fix="leave it out",
            )
        if not 0 <= self.prune < 1:
            raise ConfigError(
                "no share of a text", where="--prune", got=self.prune, expected="0 to below 1"
            )
        if self.beam < 1:
            raise ConfigError("no reading would be followed", where="--beam", got=self.beam)


class LanguageModel(Protocol):
    """A model with its tokenizer. Every rank calls every method with the same arguments."""

    @property
    def tokenizer(self) -> MegatronTokenizerText:
        """Tokenizer of the model."""

    @property
    def max_length(self) -> int:
        """Longest sequence, in tokens."""

    @property
    def adds_bos(self) -> bool:
        """Whether contexts and prompts begin with the tokenizer's BOS, where it has one."""

    @property
    def applies_chat_template(self) -> bool:
        """Whether contexts and prompts are messages of a user in the tokenizer's chat template."""

    def log_likelihoods(self, requests: Sequence[TokenRequest]) -> list[LogLikelihood]:
        """Log-likelihood of each request, in order."""

    def generate(self, prompts: Sequence[str], options: GenerationOptions) -> list[str]:
        """Completion of each prompt, in order, without prompt, stop string and end of text."""

    def cut_prompts(self) -> tuple[int, int]:
        """Number of prompts that were too long and lost their beginnings, and of all."""

    def once(self, work: Callable[[], Result]) -> Result:
        """Call ``work`` on one rank; all ranks get its result or its error."""


def conversation_ids(record: ConversationRecord, reader: LanguageModel) -> list[int]:
    """Ids of a conversation and the header of an answer, in the tokenizer's chat template.

    Raises:
        TokenizerError: There is no template, or the conversation does not fit it.
    """
    variables = dict(record.template_variables)
    rendered = reader.tokenizer.apply_chat_template(
        record.messages, add_generation_prompt=True, **variables
    )
    assert isinstance(rendered, list)
    return rendered


def prompt_ids(text: str, reader: LanguageModel) -> list[int]:
    """Ids of a prompt; at least one.

    With a chat template, they are one message of a user and the header of an answer, and control
    tokens, BOS included, come from the template alone.

    Raises:
        TokenizerError: The text is empty and the tokenizer has no token to begin a text with.
    """
    if reader.applies_chat_template:
        return conversation_ids(ConversationRecord([{"role": "user", "content": text}]), reader)
    ids = reader.tokenizer.text_to_ids(text)
    bos = reader.tokenizer.bos_id
    if reader.adds_bos and bos is not None:
        return [bos, *ids]
    return ids or [first_id(reader.tokenizer)]


def first_id(tokenizer: MegatronTokenizerText) -> int:
    """The id before a text without context: BOS, or the end of a previous text.

    Raises:
        TokenizerError: The tokenizer has neither.
    """
    for token in (tokenizer.bos_id, tokenizer.eod, tokenizer.eos_id):
        if token is not None:
            return token
    raise TokenizerError(
        "the tokenizer has neither BOS nor an end-of-text token to begin a text with",
        where=tokenizer.path,
    )


def continuation_request(context: str, continuation: str, reader: LanguageModel) -> TokenRequest:
    """A continuation behind its context, tokenized as one text.

    Spaces at the end of the context count to the continuation, since most tokenizers put a space
    before a word into its token. With a chat template the continuation is the begin of an answer,
    so that leading spaces are removed.

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


def rolling_requests(text: str, reader: LanguageModel) -> Iterator[TokenRequest]:
    """Requests that score every token of a text once, in windows of the model's length.

    The first window begins with BOS or the end of a text, every other with the token before it.
    """
    ids = reader.tokenizer.text_to_ids(text)
    length, before = reader.max_length, first_id(reader.tokenizer)
    for start in range(0, len(ids), length):
        window = ids[start : start + length]
        # The last window is filled up with earlier tokens, so that its tokens have context too.
        first = max(0, start + len(window) - length - 1)
        yield TokenRequest(ids[first:start] if start else [before], window)
