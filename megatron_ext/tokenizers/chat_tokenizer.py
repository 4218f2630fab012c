"""Conversation methods that every tokenizer has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_ext.conversation import (
    Conversation,
    EncodedConversation,
    PromptConfig,
    apply_chat_template,
    encode_conversation,
    fitting_formats,
    prompt_config_of,
    tokenize_conversation,
)
from megatron_ext.conversation.conversation_tokenizer import encode_for_training
from megatron_ext.conversation.message import (
    DEFAULT_TEMPLATE,
    TOOL_TEMPLATE,
    ChatTemplates,
    checked_messages,
)
from megatron_ext.errors import ConfigError, TokenizerError
from megatron_ext.tokenizers.base import MegatronTokenizerTextAbstract, required_template
from megatron_ext.tokenizers.config import ConversationOptions
from megatron_ext.tokenizers.libraries import library_of
from megatron_ext.tokenizers.special_ids import SpecialIds
from megatron_ext.tokenizers.token_ids import ByteEnds, IdArray
from megatron_ext.tokenizers.tokenizer_files import given_template


class ChatTokenizer(ChatTemplates, SpecialIds):
    """Mixin with the methods of a prompt format or a chat template.

    The templates are the one given, else the metadata's, else the tokenizer's own. A subclass sets
    ``_tokenizer`` and ``config`` first.
    """

    config: dict[str, Any]
    _tokenizer: MegatronTokenizerTextAbstract
    prompt_format: str | None
    """Name of the prompt format; in the mode sft ``auto`` where none is named."""
    prompt_config: PromptConfig | None
    """Configuration of the prompt format for this vocabulary."""
    conversation_options: ConversationOptions
    """Options that apply to any prompt format."""
    apply_image_tag: Callable[[str], str] | None = None
    """Puts tags around every image of a text."""

    @property
    def mode(self) -> str:
        """Use of the tokenizer, by its metadata: text, sft or multimodal."""
        stated: str | None = self.config.get("mode")
        return library_of(self.config.get("library")).mode if stated is None else stated

    @property
    def own_chat_templates(self) -> Mapping[str, str]:
        """The templates that come with the tokenizer, by name."""
        return self._tokenizer.chat_templates

    @property
    def template_choice(self) -> str:
        """The chat templates among which conversations choose, in words; empty without a choice."""
        names = sorted(self.chat_templates)
        is_own = self.prompt_config is not None and self.prompt_config.custom_chat_template is None
        if not is_own or names in ([], [DEFAULT_TEMPLATE]):
            return ""
        used = f"; with tools {TOOL_TEMPLATE}" if TOOL_TEMPLATE in names else ""
        return f"chat template {DEFAULT_TEMPLATE} of {', '.join(names)}{used}"

    def _set_chat_template(self, given: str | None) -> None:
        own = self.own_chat_templates
        named = self.config.get("chat_template")
        # Only a path that the user gives is followed anywhere; others were read in their folder.
        template = next((t for t in (given, named) if t is not None), None)
        self.chat_templates = (
            dict(own) if template is None else {DEFAULT_TEMPLATE: given_template(template, own)}
        )
        self._tokenizer.served_by = self

    def _set_prompt_format(self, given: str | None) -> None:
        self.prompt_format = self.config.get("prompt_format") if given is None else given
        if self.prompt_format is None and self.mode == "sft" and self.chat_template is not None:
            self.prompt_format = "auto"
        self.prompt_config = None
        stated = self.conversation_options.stated()
        if self.prompt_format is None and stated:
            raise ConfigError(
                "the option is for conversations, and the tokenizer has no prompt format",
                fix="set prompt_format, or leave the option out",
                where=next(iter(stated)),
            )
        if self.prompt_format is not None:
            if not isinstance(self.prompt_format, str):
                raise ConfigError(
                    "the prompt format is not a name",
                    got=type(self.prompt_format).__name__,
                    where="prompt_format",
                )
            self.prompt_config = self.conversation_options.applied_to(
                prompt_config_of(self.prompt_format, self)
            )
            self._warn_of_lost_newlines(self.prompt_config)

    def _warn_of_lost_newlines(self, prompt_config: PromptConfig) -> None:
        """Warn where the tokenizer drops the newlines of a format, which no later step notices."""
        template = prompt_config.custom_chat_template or self.chat_template or ""
        writes_newlines = "\n" in template or r"\n" in template
        if not writes_newlines or self._tokenizer.library == "null":
            return
        ids = self._tokenizer.text_to_ids
        if ids("x\ny") == ids("x y"):
            warnings.warn(
                f"the tokenizer makes a space of a newline: the lines of the prompt format "
                f"{self.prompt_format} run together",
                stacklevel=2,
            )

    def tokenize(self, text: str | Conversation) -> list[int]:
        """Ids of a text, or of a conversation with the header of the next answer.

        Raises:
            TokenizerError: It is neither, or the library cannot take the text.
            ConfigError: The tokenizer has no prompt format.
            ConversationError: The conversation is malformed, or does not fit the format.
        """
        if isinstance(text, str):
            return self.text_to_ids(text)
        if isinstance(text, bytes) or not isinstance(text, Sequence):
            raise TokenizerError(
                "this is neither a text nor a conversation",
                got=type(text).__name__,
                expected="a string or a list of messages",
            )
        conversation = checked_messages(text)
        ids: list[int] = self.tokenize_conversation(conversation, False, True).tolist()
        return ids

    def text_to_ids(self, text: str) -> list[int]:
        """Ids of a text."""
        raise NotImplementedError

    def tokenize_conversation(
        self,
        conversation: Conversation,
        return_target: bool,
        add_generation_prompt: bool,
        *,
        template_variables: Mapping[str, Any] | None = None,
    ) -> Any:
        """Ids of a conversation and, optionally, its training target.

        Args:
            conversation: The messages; not changed.
            return_target: Return the target too, and refuse a conversation without trained tokens.
            add_generation_prompt: End with the header of an answer.
            template_variables: Variables of the template for this conversation, such as ``tools``.

        Returns:
            ids [T] int64; with ``return_target`` also target [T] int64: the ids, -100 where a token
            is not trained.

        Raises:
            ConfigError: The tokenizer has no prompt format.
            ConversationError: The conversation is malformed, or does not fit the format.
        """
        return tokenize_conversation(
            self,
            conversation,
            self.required_prompt_config(),
            return_target,
            add_generation_prompt,
            self.apply_image_tag,
            template_variables=template_variables,
        )

    def encode_conversation(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = False,
        template_variables: Mapping[str, Any] | None = None,
        for_training: bool = False,
    ) -> EncodedConversation:
        """A conversation as text and tokens, with provenance and training mask.

        Args:
            conversation: The messages; not changed.
            add_generation_prompt: End with the header of an answer.
            template_variables: Variables of the template for this conversation, such as ``tools``.
            for_training: Refuse what ``tokenize_conversation`` refuses for a target.

        Raises:
            ConfigError: The tokenizer has no prompt format.
            ConversationError: The conversation is malformed, or does not fit the format.
        """
        encode = encode_for_training if for_training else encode_conversation
        return encode(
            self,
            conversation,
            self.required_prompt_config(),
            add_generation_prompt=add_generation_prompt,
            apply_image_tag_fn=self.apply_image_tag,
            template_variables=template_variables,
        )

    def required_prompt_config(self) -> PromptConfig:
        """Configuration of the prompt format for this vocabulary.

        Raises:
            ConfigError: There is no prompt format.
        """
        if self.prompt_config is not None:
            return self.prompt_config
        names = ", ".join(fitting_formats(self))
        templates = ", ".join(sorted(self.chat_templates))
        got = f"the chat templates {templates}" if templates else "no chat template of its own"
        raise ConfigError(
            "the tokenizer has no prompt format",
            got=got if self.chat_template is None else None,
            expected=f"one that fits its vocabulary: {names}{' or ' if names else ''}file:PATH",
            fix="set prompt_format, or pass chat_template",
            where="prompt_format",
        )

    def apply_chat_template(
        self,
        conversation: Conversation,
        chat_template: str | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> Any:
        """A conversation rendered by its template: ids, or text unless ``tokenize``.

        Args:
            conversation: Any messages that the template takes; not changed.
            chat_template: Name of one of the tokenizer's own templates, a file that ends in
                .jinja, or Jinja source; by default the template in force, which may depend on
                ``tools``.
            tokenize: Return ids; otherwise text.
            add_generation_prompt: Passed on to the template.
            options: ``truncation``, ``max_length``, ``return_tensors`` and ``return_dict``, as
                transformers has them; any other name is a variable of the template.

        Raises:
            TokenizerError: There is no template, or an option of transformers is not supported.
            ConversationError: The conversation does not fit the template.
        """
        stated = self.conversation_options
        variables = {**stated.variables(), **options}
        return apply_chat_template(
            self,
            conversation,
            self._template(chat_template, variables.get("tools")),
            tokenize=tokenize,
            add_generation_prompt=add_generation_prompt,
            allow_control_tokens_in_content=stated.allow_control_tokens_in_content,
            **variables,
        )

    def _template(self, given: str | None, tools: object) -> str:
        if given is not None:
            return given_template(given, self.own_chat_templates)
        return required_template(self.chat_templates, tools)

    # The protocol ConversationTokenizer.

    @property
    def special_token_names(self) -> dict[str, str]:
        """Name of each existing special token by ``bos_token``, ``eos_token`` ..."""
        return self._tokenizer.special_token_names

    def token_to_id(self, token: str) -> int:
        """Id of a display string; KeyError when the vocabulary does not hold it."""
        return self._tokenizer.token_to_id(token)

    def is_control(self, token_id: int) -> bool:
        """Whether no ordinary text gives this id."""
        return self._tokenizer.is_control(token_id)

    def encode_with_control_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[IdArray, ByteEnds]:
        """Ids [T] and byte ends [T]; control tokens are parsed only in ``spans`` of characters."""
        return self._tokenizer.encode_with_control_spans(text, spans)
