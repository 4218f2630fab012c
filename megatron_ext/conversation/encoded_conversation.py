"""A conversation as tokens: one render, one tokenization, and a mask from provenance.

Where a character came from when the template was rendered decides two things: whether a control
token may be read there, and whether the token that covers it is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.conversation.answers import AnswerFinder, Range, generated_ranges
from megatron_ext.conversation.message import Conversation, check_conversation
from megatron_ext.conversation.prompt_config import PromptConfig
from megatron_ext.conversation.protocol import ByteEnds, ConversationTokenizer, IdArray
from megatron_ext.conversation.provenance import Rendered, Span
from megatron_ext.conversation.shown_conversation import ShownConversation, check_shown
from megatron_ext.conversation.template import generation_prompt, render
from megatron_ext.conversation.training_mask import byte_offsets, trained_tokens
from megatron_ext.errors import ConfigError

ApplyImageTag = Callable[[str], str]
"""Puts tags around every image of a text."""


@dataclass(frozen=True, eq=False)
class EncodedConversation:
    """A conversation as text and as T tokens, with what is known of both."""

    text: str
    """What the template wrote."""
    spans: tuple[Span, ...]
    """Where each character of ``text`` came from, without gaps."""
    trained_ranges: list[Range]
    """Characters of ``text`` that are trained, in order and apart."""
    ids: NDArray[np.int64]
    """[T]"""
    byte_ends: ByteEnds
    """Where each token ends in ``text.encode()`` [T]."""
    trained: NDArray[np.bool_]
    """[T]"""

    @property
    def target(self) -> NDArray[np.int64]:
        """The ids where they are trained, else ``IGNORE_INDEX`` [T]."""
        return np.where(self.trained, self.ids, IGNORE_INDEX)


def encode_conversation(
    tokenizer: ConversationTokenizer,
    conversation: Conversation,
    prompt_config: PromptConfig,
    *,
    add_generation_prompt: bool = False,
    apply_image_tag_fn: ApplyImageTag | None = None,
) -> EncodedConversation:
    """A conversation with everything that an inspection shows; see ``tokenize_conversation``.

    Raises:
        ConversationError: The conversation is malformed or does not fit the format.
    """
    rendered = render_conversation(
        tokenizer,
        conversation,
        prompt_config,
        add_generation_prompt=add_generation_prompt,
        apply_image_tag_fn=apply_image_tag_fn,
    )
    ids, ends = encode_rendered(tokenizer, rendered)
    ranges = [(0, len(rendered.text))]
    trained = np.ones(len(ids), np.bool_)
    if not prompt_config.skip_masking:
        if rendered.has_generation_blocks:
            ranges = generated_ranges(rendered)
        else:
            ranges = AnswerFinder(
                rendered,
                {index: str(message["role"]) for index, message in enumerate(conversation)},
                generation_prompt=_generation_prompt(tokenizer, prompt_config),
                ends_with_prompt=add_generation_prompt,
                control_tokens=_control_tokens(tokenizer, rendered.text, ids, ends),
            ).ranges()
        trained = trained_tokens(rendered, ranges, ends)
    return EncodedConversation(
        text=rendered.text,
        spans=rendered.spans,
        trained_ranges=ranges,
        ids=ids.astype(np.int64),
        byte_ends=ends,
        trained=trained,
    )


def render_conversation(
    tokenizer: ConversationTokenizer,
    conversation: Conversation,
    prompt_config: PromptConfig,
    *,
    add_generation_prompt: bool,
    apply_image_tag_fn: ApplyImageTag | None,
) -> Rendered:
    """A conversation as a prompt format writes it.

    Raises:
        ConversationError: The conversation is malformed or does not fit the format.
    """
    check_conversation(conversation)
    shown = ShownConversation.of(conversation, prompt_config, apply_image_tag_fn)
    rendered = render(
        template_source(tokenizer, prompt_config),
        shown.messages,
        special_tokens=tokenizer.special_token_names,
        variables={
            **prompt_config.template_variables,
            "add_generation_prompt": add_generation_prompt,
        },
        first_index=shown.first_index,
        name=f"template of the prompt format {prompt_config.name}",
    )
    if prompt_config.custom_chat_template is not None:
        check_shown(rendered, conversation, prompt_config)
    return rendered


def encode_rendered(
    tokenizer: ConversationTokenizer, rendered: Rendered
) -> tuple[IdArray, ByteEnds]:
    """Ids [T] int32 and byte ends [T]; only the template's own text holds control tokens."""
    return tokenizer.encode_with_control_spans(rendered.text, rendered.control_ranges())


def template_source(tokenizer: ConversationTokenizer, prompt_config: PromptConfig) -> str:
    """Jinja source of the format's template.

    Raises:
        ConfigError: It is the tokenizer's own, and the tokenizer has none.
    """
    source = prompt_config.custom_chat_template
    source = tokenizer.chat_template if source is None else source
    if source is None:
        raise ConfigError(
            f"the prompt format {prompt_config.name} takes the tokenizer's own chat template, and "
            "it has none",
            fix="pass chat_template, or take another format",
            where="prompt_format",
        )
    return source


def _generation_prompt(tokenizer: ConversationTokenizer, prompt_config: PromptConfig) -> str:
    return generation_prompt(
        template_source(tokenizer, prompt_config),
        special_tokens=tokenizer.special_token_names,
        variables=prompt_config.template_variables,
    )


def _control_tokens(
    tokenizer: ConversationTokenizer, text: str, ids: IdArray, ends: ByteEnds
) -> list[Range]:
    """Characters of ``text`` that each control token covers, in order."""
    kinds, kind_of = np.unique(ids, return_inverse=True)
    is_control = np.array([tokenizer.is_control(kind) for kind in kinds.tolist()], np.bool_)
    at = np.flatnonzero(is_control[kind_of])
    offsets = byte_offsets(text)
    begins = np.concatenate(([0], ends[:-1]))
    starts: list[int] = np.searchsorted(offsets, begins[at]).tolist()
    stops: list[int] = np.searchsorted(offsets, ends[at]).tolist()
    return list(zip(starts, stops, strict=True))
