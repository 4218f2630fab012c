"""Texts as token requests, cut as lm-evaluation-harness cuts them, so that numbers compare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from megatron_ext.errors import TokenizerError
from megatron_ext.evaluation.language_model import TokenRequest
from megatron_ext.tokenizers import MegatronTokenizerText


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
