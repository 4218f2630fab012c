"""Tokenization of conversations: ids, targets, and the check of a stated prefix length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.conversation.chat_output import ChatOutput, refuse_foreign, refuse_other_options
from megatron_ext.conversation.encoded_conversation import (
    ApplyImageTag,
    EncodedConversation,
    encode_checked,
    encode_conversation,
    encode_rendered,
    render_conversation,
    with_variables,
)
from megatron_ext.conversation.images import refuse_images_in_answers
from megatron_ext.conversation.masking.answer_parts import trained_messages
from megatron_ext.conversation.masking.trained_part import NOT_SHOWN
from megatron_ext.conversation.message import (
    Conversation,
    ConversationTokenizer,
    byte_offsets,
    check_answers,
    check_conversation,
    checked_messages,
    place,
)
from megatron_ext.conversation.prompt_format import PromptConfig
from megatron_ext.conversation.rendering.template import render
from megatron_ext.errors import ConfigError, ConversationError, UntrainedError

_ROLES = {0: "user", 1: "assistant"}
_SAMPLE = tuple({"role": role, "content": "x"} for role in _ROLES.values())


def assistant_prefix_len(tokenizer: ConversationTokenizer, prompt_config: PromptConfig) -> int:
    """Number of tokens that ``prompt_config`` writes in an assistant's turn before the answer."""
    encoded = encode_conversation(tokenizer, _SAMPLE, prompt_config)
    return prefix_lengths(encoded, _ROLES).get(1, 0)


def prefix_lengths(encoded: EncodedConversation, roles: Mapping[int, str]) -> dict[int, int]:
    """Number of untrained tokens at the start of each assistant's turn, by message.

    A template without a loop over messages has no turns, and so no entries.
    """
    begins = np.concatenate(([0], encoded.byte_ends[:-1]))
    offsets = byte_offsets(encoded.text)
    turns: dict[int, int] = {}
    for span in encoded.spans:
        turn = span.provenance.turn
        if turn is not None and roles.get(turn) == "assistant":
            turns.setdefault(turn, span.start)
    trained = np.flatnonzero(encoded.trained)
    lengths: dict[int, int] = {}
    for turn, start in turns.items():
        first = int(np.searchsorted(begins, offsets[start]))
        at = int(np.searchsorted(trained, first))
        if at < len(trained):
            lengths[turn] = int(trained[at]) - first
    return lengths


def check_assistant_prefix(
    encoded: EncodedConversation, roles: Mapping[int, str], stated: int
) -> None:
    """Refuse a stated prefix length that differs from the rendered one.

    Raises:
        ConfigError: An answer has another number of untrained tokens before it.
    """
    for turn, length in prefix_lengths(encoded, roles).items():
        if length != stated:
            raise ConfigError(
                "assistant_prefix_len is not what the template writes before an answer",
                got=stated,
                expected=length,
                fix="leave it unset: it follows from the template",
                where=place(turn),
            )


def tokenize_conversation(
    tokenizer: ConversationTokenizer,
    conversation: Conversation,
    prompt_config: PromptConfig,
    return_target: bool,
    add_generation_prompt: bool,
    apply_image_tag_fn: ApplyImageTag | None = None,
    *,
    template_variables: Mapping[str, Any] | None = None,
) -> NDArray[np.int64] | tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids of a conversation and, optionally, its training target.

    Args:
        tokenizer: A tokenizer of any library.
        conversation: The messages; not changed.
        prompt_config: From ``PROMPT_FORMAT_REGISTRY``.
        return_target: Return the target too, and refuse a conversation without trained tokens.
        add_generation_prompt: End with the header of an answer.
        apply_image_tag_fn: Puts the format's tags around each image; None where texts have none.
        template_variables: Variables of the template for this conversation, such as ``tools``; they
            override the format's.

    Returns:
        ids [T] int64; with ``return_target`` also target [T] int64: the id where a token is
        trained, else ``IGNORE_INDEX``. The policy of ``prompt_config`` says which messages are
        trained, by default the assistant's with their stop markers; a format that skips masking
        trains every token.

    Raises:
        UntrainedError: With ``return_target``, no token is trained.
        ConversationError: The conversation is malformed or does not fit the format; the error
            names the message.
        ConfigError: The format does not fit the tokenizer.
        TokenizerError: ``tokenizer`` is not one of this package.
    """
    refuse_foreign(tokenizer, "encode_with_control_spans")
    prompt_config = with_variables(prompt_config, template_variables)
    if not return_target:
        check_conversation(conversation)
        rendered = render_conversation(
            tokenizer,
            conversation,
            prompt_config,
            add_generation_prompt=add_generation_prompt,
            apply_image_tag_fn=apply_image_tag_fn,
        )
        allowed = prompt_config.allow_control_tokens_in_content
        ids, _ = encode_rendered(tokenizer, rendered, allow_control_tokens=allowed)
        return ids.astype(np.int64)
    encoded = encode_for_training(
        tokenizer,
        conversation,
        prompt_config,
        add_generation_prompt=add_generation_prompt,
        apply_image_tag_fn=apply_image_tag_fn,
    )
    return encoded.ids, encoded.target


def encode_for_training(
    tokenizer: ConversationTokenizer,
    conversation: Conversation,
    prompt_config: PromptConfig,
    *,
    add_generation_prompt: bool = False,
    apply_image_tag_fn: ApplyImageTag | None = None,
    template_variables: Mapping[str, Any] | None = None,
) -> EncodedConversation:
    """``encode_conversation`` of a conversation that something can be learned from.

    Raises:
        UntrainedError: No token is trained.
        ConversationError: As ``tokenize_conversation`` with a target.
    """
    check_conversation(conversation)
    prompt_config = with_variables(prompt_config, template_variables)
    if prompt_config.skip_masking:
        _refuse_choices(conversation, prompt_config)
    else:
        untrained = prompt_config.policy.untrained(conversation)
        check_answers(conversation, trained_messages(conversation, untrained))
    if prompt_config.validate_no_image_in_assistant:
        refuse_images_in_answers(conversation)
    encoded = encode_checked(
        tokenizer,
        conversation,
        prompt_config,
        add_generation_prompt=add_generation_prompt,
        apply_image_tag_fn=apply_image_tag_fn,
    )
    if not prompt_config.skip_masking:
        _check_trained(encoded, conversation, prompt_config)
    return encoded


def apply_chat_template(
    tokenizer: ConversationTokenizer,
    conversation: Conversation,
    chat_template: str,
    *,
    tokenize: bool = True,
    add_generation_prompt: bool = False,
    truncation: bool = False,
    max_length: int | None = None,
    return_tensors: str | None = None,
    return_dict: bool = False,
    allow_control_tokens_in_content: bool = False,
    **variables: Any,
) -> Any:
    """A conversation rendered by any template; only template text makes control tokens.

    Args:
        tokenizer: A tokenizer of any library.
        conversation: Any messages that the template takes; not changed.
        chat_template: Jinja source.
        tokenize: Return ids; otherwise text.
        add_generation_prompt: Passed on to the template.
        truncation: Keep the first ``max_length`` ids.
        max_length: Most ids; of no effect without ``truncation``.
        return_tensors: ``np`` or ``pt``: ids are int64 [1, T] instead of a list.
        return_dict: Return ids as ``input_ids``, with their ``attention_mask``.
        allow_control_tokens_in_content: Parse names of control tokens in contents too.
        variables: Passed on to the template: ``tools``, ``documents``, ``enable_thinking`` ...

    Returns:
        A list of ids, or what ``return_tensors`` and ``return_dict`` make of it; the text without
        ``tokenize``, whatever they say.

    Raises:
        ConversationError: The template refuses the conversation.
        ConfigError: The template is no Jinja.
        TokenizerError: An option has a value that is not supported, or ``variables`` hold an option
            of transformers that is not supported: ``padding``, ``continue_final_message``,
            ``return_assistant_tokens_mask``, ``tokenizer_kwargs``.
    """
    refuse_foreign(tokenizer, "encode_with_control_spans")
    output = ChatOutput(
        truncation=truncation,
        max_length=max_length,
        return_tensors=return_tensors,
        return_dict=return_dict,
    )
    refuse_other_options(variables)
    messages = [
        {key: value for key, value in message.items() if key != "train"}
        for message in checked_messages(conversation)
    ]
    rendered = render(
        chat_template,
        messages,
        special_tokens=tokenizer.special_token_names,
        variables={**variables, "add_generation_prompt": add_generation_prompt},
    )
    if not tokenize:
        return rendered.text
    ids: list[int] = encode_rendered(
        tokenizer, rendered, allow_control_tokens=allow_control_tokens_in_content
    )[0].tolist()
    return output.of(ids)


def _check_trained(
    encoded: EncodedConversation, conversation: Conversation, prompt_config: PromptConfig
) -> None:
    """Refuse a target that lacks an answer, and a wrong stated prefix length."""
    if not prompt_config.exclude_unknown:
        for index, reason in encoded.excluded.items():
            if reason == NOT_SHOWN:
                raise ConversationError(
                    f"the template of the prompt format {prompt_config.name} leaves out what the "
                    f"{conversation[index]['role']} says, so that nothing of it is trained",
                    fix="leave the conversation out, or take another format",
                    where=place(index),
                )
    if not encoded.trained.any():
        reasons = "; ".join(f"{place(i)}: {reason}" for i, reason in encoded.excluded.items())
        raise UntrainedError("there is nothing to train on", got=reasons or None)
    if prompt_config.assistant_prefix_len is not None:
        roles = {index: str(message["role"]) for index, message in enumerate(conversation)}
        check_assistant_prefix(encoded, roles, prompt_config.assistant_prefix_len)


def _refuse_choices(conversation: Conversation, prompt_config: PromptConfig) -> None:
    """Refuse messages with ``"train": false`` for a format that trains every token."""
    for index, message in enumerate(conversation):
        if message.get("train") is False:
            raise ConversationError(
                f"the prompt format {prompt_config.name} trains every token, and the message says "
                "that it is not trained",
                fix="take another format, such as auto",
                where=place(index),
            )
