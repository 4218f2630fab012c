"""A conversation as tokens: one render, one tokenization, and a mask from provenance.

The provenance of a character decides two things: whether a control token may be read there, and
whether the token that covers it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.constants import IGNORE_INDEX
from megatron_ext.conversation.chat_output import refuse_foreign
from megatron_ext.conversation.masking.answer_marks import AnswerMarks, answer_marks
from megatron_ext.conversation.masking.answers import AnswerContext, Range
from megatron_ext.conversation.masking.trained_part import (
    ONLY_SHARED,
    TrainedPart,
    trained_part,
    trained_tokens,
)
from megatron_ext.conversation.message import (
    DEFAULT_TEMPLATE,
    ByteEnds,
    Conversation,
    ConversationTokenizer,
    IdArray,
    check_conversation,
    chosen_template,
)
from megatron_ext.conversation.prompt_format import PromptConfig
from megatron_ext.conversation.rendering.provenance import Rendered, Span
from megatron_ext.conversation.rendering.template import render
from megatron_ext.conversation.shown_conversation import ShownConversation, check_shown, takes_parts
from megatron_ext.errors import ConfigError, ConversationError

ApplyImageTag = Callable[[str], str]
"""Puts tags around every image of a text."""


@dataclass(frozen=True, eq=False)
class EncodedConversation:
    """A conversation as text and as T tokens, with provenance and training mask."""

    text: str
    """The rendered text."""
    spans: tuple[Span, ...]
    """Provenance of the characters of ``text``, without gaps."""
    trained_ranges: list[Range]
    """Trained ranges of characters of ``text``, ascending and disjoint."""
    ids: NDArray[np.int64]
    """[T]"""
    byte_ends: ByteEnds
    """Byte of ``text.encode()`` at which each token ends [T]."""
    trained: NDArray[np.bool_]
    """[T]"""
    excluded: Mapping[int, str]
    """Reason of each message that is not trained, by its index."""

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
    template_variables: Mapping[str, Any] | None = None,
) -> EncodedConversation:
    """A conversation as text and tokens, with provenance; see ``tokenize_conversation``.

    Raises:
        ConversationError: The conversation is malformed or does not fit the format.
        TokenizerError: ``tokenizer`` is not one of this package.
    """
    refuse_foreign(tokenizer, "encode_with_control_spans")
    check_conversation(conversation)
    return encode_checked(
        tokenizer,
        conversation,
        with_variables(prompt_config, template_variables),
        add_generation_prompt=add_generation_prompt,
        apply_image_tag_fn=apply_image_tag_fn,
    )


def with_variables(
    prompt_config: PromptConfig, template_variables: Mapping[str, Any] | None
) -> PromptConfig:
    """A prompt format with the template variables of one conversation added.

    Raises:
        ConversationError: The variables are not a mapping.
    """
    if template_variables is None:
        return prompt_config
    if not isinstance(template_variables, Mapping):
        raise ConversationError(
            "template variables are a mapping",
            got=type(template_variables).__name__,
            expected='{"tools": [...]}',
        )
    variables = {**prompt_config.template_variables, **template_variables}
    return replace(prompt_config, template_variables=variables)


def encode_checked(
    tokenizer: ConversationTokenizer,
    conversation: Conversation,
    prompt_config: PromptConfig,
    *,
    add_generation_prompt: bool,
    apply_image_tag_fn: ApplyImageTag | None,
) -> EncodedConversation:
    """``encode_conversation`` of a checked conversation.

    Raises:
        ConversationError: The conversation does not fit the format.
    """
    rendered = render_conversation(
        tokenizer,
        conversation,
        prompt_config,
        add_generation_prompt=add_generation_prompt,
        apply_image_tag_fn=apply_image_tag_fn,
    )
    allowed = prompt_config.allow_control_tokens_in_content
    ids, ends = encode_rendered(tokenizer, rendered, allow_control_tokens=allowed)
    selection = TrainedPart([(0, len(rendered.text))], {}, {})
    trained: NDArray[np.bool_] = np.ones(len(ids), np.bool_)
    if not prompt_config.skip_masking:
        marks = answer_marks(
            template_source(tokenizer, prompt_config),
            special_tokens=tokenizer.special_token_names,
            variables=prompt_config.template_variables,
        )
        context = AnswerContext(
            marks,
            ends_turns=_ends_turns(tokenizer, marks),
            ends_with_prompt=add_generation_prompt,
            control_tokens=_control_tokens(tokenizer, rendered, ids, ends),
        )
        selection = trained_part(rendered, conversation, prompt_config.policy, context)
        trained = trained_tokens(rendered, selection.ranges, ends)
        selection = _without_untrained(selection, rendered, trained, ends)
    return EncodedConversation(
        text=rendered.text,
        spans=rendered.spans,
        trained_ranges=selection.ranges,
        ids=ids.astype(np.int64),
        byte_ends=ends,
        trained=trained,
        excluded=selection.excluded,
    )


def render_conversation(
    tokenizer: ConversationTokenizer,
    conversation: Conversation,
    prompt_config: PromptConfig,
    *,
    add_generation_prompt: bool,
    apply_image_tag_fn: ApplyImageTag | None,
) -> Rendered:
    """A checked conversation as rendered by a prompt format.

    Raises:
        ConversationError: The conversation does not fit the format.
    """
    source = template_source(tokenizer, prompt_config)
    special_tokens = tokenizer.special_token_names
    shown = ShownConversation.of(
        conversation,
        prompt_config,
        lambda role, kinds: takes_parts(source, role, kinds, special_tokens),
        apply_image_tag_fn,
    )
    rendered = render(
        source,
        shown.messages,
        special_tokens=special_tokens,
        variables={
            **prompt_config.template_variables,
            "add_generation_prompt": add_generation_prompt,
        },
        first_index=shown.first_index,
        name=f"template of the prompt format {prompt_config.name}",
        keep_unknown=prompt_config.exclude_unknown,
    )
    if prompt_config.custom_chat_template is not None:
        has_tools = bool(prompt_config.template_variables.get("tools"))
        check_shown(rendered, conversation, prompt_config, has_tools=has_tools)
    return rendered


def encode_rendered(
    tokenizer: ConversationTokenizer, rendered: Rendered, *, allow_control_tokens: bool
) -> tuple[IdArray, ByteEnds]:
    """Ids [T] int32 and byte ends [T].

    Only the template's own text holds control tokens, unless they are allowed anywhere.
    """
    ranges = [(0, len(rendered.text))] if allow_control_tokens else rendered.control_ranges
    return tokenizer.encode_with_control_spans(rendered.text, ranges)


def template_source(tokenizer: ConversationTokenizer, prompt_config: PromptConfig) -> str:
    """Jinja source of the format's template; the tokenizer's own may depend on the tools.

    Raises:
        ConfigError: The format takes the tokenizer's own template, and it has none.
    """
    source = prompt_config.custom_chat_template
    if source is None:
        tools = prompt_config.template_variables.get("tools")
        source = chosen_template(tokenizer.chat_templates, tools)
    if source is None:
        raise ConfigError(
            f"the prompt format {prompt_config.name} takes the tokenizer's own chat template, and "
            f"it has none named {DEFAULT_TEMPLATE}",
            got=", ".join(sorted(tokenizer.chat_templates)) or None,
            fix="pass chat_template, or take another format",
            where="prompt_format",
        )
    return source


def _without_untrained(
    selection: TrainedPart, rendered: Rendered, trained: NDArray[np.bool_], ends: ByteEnds
) -> TrainedPart:
    """``selection`` with messages excluded all of whose tokens are shared with other text."""
    begins, ends = np.concatenate(([0], ends[:-1]))[trained], ends[trained]
    bounds = rendered.byte_offsets[np.array(list(selection.said.values()), np.int64).reshape(-1, 2)]
    # The first trained token that ends in or behind a message's trained text, if there is one.
    first = np.searchsorted(ends, bounds[:, 0], side="right")
    has_token = np.append(begins, np.iinfo(np.int64).max)[first] < bounds[:, 1]
    shared = {
        m: ONLY_SHARED
        for m, has_own in zip(selection.said, has_token.tolist(), strict=True)
        if not has_own
    }
    return replace(selection, excluded={**shared, **selection.excluded}) if shared else selection


def _ends_turns(tokenizer: ConversationTokenizer, marks: AnswerMarks) -> bool | None:
    """Whether what the template writes after an answer holds a control token."""
    if marks.stop is None:
        return None
    ids, _ = tokenizer.encode_with_control_spans(marks.stop, [(0, len(marks.stop))])
    return any(map(tokenizer.is_control, ids.tolist()))


def _control_tokens(
    tokenizer: ConversationTokenizer, rendered: Rendered, ids: IdArray, ends: ByteEnds
) -> list[Range]:
    """Range of characters of each control token in template text, in order."""
    offsets = rendered.byte_offsets
    begins = np.concatenate(([0], ends[:-1]))
    bounds = offsets[np.array(rendered.control_ranges, np.int64).reshape(-1, 2)]
    # Tokens and ranges are both in order, and ranges are few: look up the ranges.
    first, last = np.searchsorted(begins, bounds.T)
    counts = last - first
    at = np.repeat(last - np.cumsum(counts), counts) + np.arange(counts.sum())
    kinds, kind_of = np.unique(ids[at], return_inverse=True)
    is_control = np.fromiter(map(tokenizer.is_control, kinds.tolist()), np.bool_, len(kinds))
    at = at[is_control[kind_of]]
    starts: list[int] = np.searchsorted(offsets, begins[at]).tolist()
    stops: list[int] = np.searchsorted(offsets, ends[at]).tolist()
    return list(zip(starts, stops, strict=True))
