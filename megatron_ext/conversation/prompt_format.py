"""What a prompt format asks of a vocabulary, and the template that it writes with.

How conversations are written for a model, and what of them is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from megatron_ext.conversation.chat_output import refuse_foreign
from megatron_ext.conversation.masking.answer_parts import TrainingPolicy
from megatron_ext.conversation.protocol import ConversationTokenizer
from megatron_ext.errors import ConfigError

_ALL_ASSISTANT = TrainingPolicy()


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptConfig:
    """What a prompt format means for one vocabulary."""

    name: str = "custom"
    """Name of the format, for errors."""
    assistant_prefix_len: int | None = None
    """Number of untrained tokens before each answer. It follows from the template; a stated value
    is only compared with that."""
    pad_token_id: int
    """What batches are padded with."""
    custom_chat_template: str | None = None
    """Jinja source; None takes the tokenizer's own template."""
    has_bos: bool = False
    """The render begins with the beginning-of-sequence token."""
    has_system_role: bool = True
    """False drops a system message at the start of a conversation."""
    force_system_message: bool = False
    """Put ``system_default`` in front, in place of a system message that is there."""
    system_default: Mapping[str, Any] | None = None
    """The format's own system message."""
    validate_no_image_in_assistant: bool = False
    """Refuse to train on an assistant message that holds an image."""
    capitalize_roles: bool = False
    """Show roles with a capital first letter."""
    skip_masking: bool = False
    """Train every token."""
    allow_tool_role: bool = True
    """Take messages of tools."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """What the template sees besides the conversation, such as ``tools`` or ``date_string``."""
    policy: TrainingPolicy = _ALL_ASSISTANT
    """What of a conversation is trained, unless the format skips masking."""
    exclude_unknown: bool = False
    """Leave messages untrained of which the template hides the source or shows nothing, in place of
    refusing the conversation."""
    allow_control_tokens_in_content: bool = False
    """Names of control tokens become these tokens in messages too, as elsewhere; anyone whose text
    is in a message can then forge a turn."""

    def __post_init__(self) -> None:
        if self.force_system_message and self.system_default is None:
            raise ConfigError(
                "force_system_message needs a system message to force",
                got="no system_default",
                fix="set system_default, or unset force_system_message",
                where=self.name,
            )
        if self.skip_masking and self.policy != _ALL_ASSISTANT:
            raise ConfigError(
                "the prompt format trains every token",
                got="a policy of what is trained",
                fix="take another format, such as auto",
                where=self.name,
            )


TEMPLATE_FILE: Final = "file:"
"""What the name of a template begins with that is a file of the caller's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFormat:
    """One row of ``PROMPT_FORMAT_REGISTRY``.

    Calling it with a tokenizer gives the ``PromptConfig`` for that tokenizer's vocabulary.
    """

    name: str
    """Name in the registry."""
    template: str | None = None
    """Name of one of our templates, or ``file:PATH``; None is the tokenizer's own template."""
    pad: tuple[str, ...] = ("pad_id",)
    """What pads, the first that there is: an id of the tokenizer (``pad_id``), or a token."""
    tokens: tuple[str, ...] = ()
    """Control tokens that the template writes."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens that the template writes by role: ``bos_token``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``PromptConfig``."""

    def __call__(self, tokenizer: ConversationTokenizer) -> PromptConfig:
        """What the format means for a tokenizer's vocabulary.

        Raises:
            ConfigError: The vocabulary lacks a token of the format, or the tokenizer a template.
            TokenizerError: ``tokenizer`` is none of ours.
        """
        refuse_foreign(tokenizer, "encode_with_control_spans")
        for token in self.tokens:
            if not _is_control(tokenizer, token):
                raise self._lacks(
                    f"the control token {token}", f"add {token} to the special tokens"
                )
        for role in self.special_tokens:
            if role not in tokenizer.special_token_names:
                raise self._lacks(f"a {role}", f"set {role} to a token of the vocabulary")
        if self.template is None and tokenizer.chat_template is None:
            raise self._lacks("a chat template of its own", "pass chat_template")
        # The tokenizer's own template writes a BOS where there is one, as far as can be told.
        has_own_bos = self.template is None and tokenizer.bos_id is not None
        has_bos = has_own_bos or "bos_token" in self.special_tokens
        return PromptConfig(
            name=self.name,
            pad_token_id=self._pad_token_id(tokenizer),
            custom_chat_template=None if self.template is None else _source(self.template),
            **{"has_bos": has_bos, **self.options},
        )

    def _pad_token_id(self, tokenizer: ConversationTokenizer) -> int:
        for choice in self.pad:
            is_role = choice.endswith("_id")
            found = getattr(tokenizer, choice) if is_role else _id_of(tokenizer, choice)
            if found is not None:
                return int(found)
        raise self._lacks(
            f"a token to pad with: {' or '.join(self.pad)}", "set pad_token to a token of it"
        )

    def _lacks(self, what: str, fix: str) -> ConfigError:
        return ConfigError(
            f"the prompt format {self.name} needs {what}, which the tokenizer lacks",
            fix=f"{fix}, or take another format",
            where="prompt_format",
        )


def _id_of(tokenizer: ConversationTokenizer, token: str) -> int | None:
    try:
        return tokenizer.token_to_id(token)
    except KeyError:
        return None


def _is_control(tokenizer: ConversationTokenizer, token: str) -> bool:
    token_id = _id_of(tokenizer, token)
    return token_id is not None and tokenizer.is_control(token_id)


def _source(template: str) -> str:
    """Source of a template: a file's that ``file:PATH`` names, else one of ours."""
    return _file_source(template) if template.startswith(TEMPLATE_FILE) else _own_source(template)


def _file_source(template: str) -> str:
    path = Path(template.removeprefix(TEMPLATE_FILE)).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "cannot read the template of the prompt format",
            got=error.strerror if isinstance(error, OSError) else "bytes that are not UTF-8",
            where=path,
        ) from error


@cache
def _own_source(template: str) -> str:
    folder = Path(__file__).with_name("templates")
    return (folder / f"{template}.jinja").read_text(encoding="utf-8")
