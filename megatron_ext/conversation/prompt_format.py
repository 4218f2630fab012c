"""Prompt formats: the registry, their templates, and their configuration for a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from megatron_ext.conversation.chat_output import refuse_foreign
from megatron_ext.conversation.masking.answer_parts import TrainingPolicy
from megatron_ext.conversation.message import DEFAULT_TEMPLATE, ConversationTokenizer
from megatron_ext.errors import ConfigError
from megatron_ext.registry import Registry

_ALL_ASSISTANT = TrainingPolicy()


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptConfig:
    """Configuration of a prompt format for one vocabulary."""

    name: str = "custom"
    """Name of the format, for errors."""
    assistant_prefix_len: int | None = None
    """Number of untrained tokens before each answer. It follows from the template; a stated value
    is only checked against it."""
    pad_token_id: int
    """Id that pads batches."""
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
    """Variables of the template, such as ``tools`` or ``date_string``."""
    policy: TrainingPolicy = _ALL_ASSISTANT
    """Messages and parts that are trained, unless the format skips masking."""
    exclude_unknown: bool = False
    """Do not train messages whose provenance the template hides or that it leaves out; otherwise
    the conversation is refused."""
    allow_control_tokens_in_content: bool = False
    """Parse names of control tokens in messages too; the author of a message can then forge a
    turn."""

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
"""Prefix of the name of a template that is a file of the caller's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFormat:
    """One row of ``PROMPT_FORMAT_REGISTRY``.

    Calling it with a tokenizer gives the ``PromptConfig`` for that tokenizer's vocabulary.
    """

    name: str
    """Name in the registry."""
    template: str | None = None
    """Name of a packaged template, or ``file:PATH``; None is the tokenizer's own template."""
    pad: tuple[str, ...] = ("pad_id",)
    """Choices of padding in order: an id of the tokenizer (``pad_id``), or a token."""
    tokens: tuple[str, ...] = ()
    """Control tokens that the template writes."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens that the template writes by role: ``bos_token``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of ``PromptConfig``."""

    def __call__(self, tokenizer: ConversationTokenizer) -> PromptConfig:
        """The configuration of the format for a tokenizer's vocabulary.

        Raises:
            ConfigError: The vocabulary lacks a token of the format, or the tokenizer a template.
            TokenizerError: ``tokenizer`` is not one of this package.
        """
        refuse_foreign(tokenizer, "encode_with_control_spans")
        missing = ", ".join(token for token in self.tokens if not _is_control(tokenizer, token))
        if missing:
            raise self._lacks(f"control tokens: {missing}", f"add {missing} to the special tokens")
        for role in self.special_tokens:
            if role not in tokenizer.special_token_names:
                raise self._lacks(f"a {role}", f"set {role} to a token of the vocabulary")
        if self.template is None and DEFAULT_TEMPLATE not in tokenizer.chat_templates:
            names = ", ".join(sorted(tokenizer.chat_templates))
            named = f" named {DEFAULT_TEMPLATE} and not {names}" if names else " of its own"
            fix = "pass one of these names as chat_template" if names else "pass chat_template"
            raise self._lacks(f"a chat template{named}", fix)
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
            pad_id = getattr(tokenizer, choice) if is_role else _id_of(tokenizer, choice)
            if pad_id is not None:
                return int(pad_id)
        has_role = any(choice.endswith("_id") for choice in self.pad)
        fix = "set pad_token to a token" if has_role else f"add {self.pad[0]} to the special tokens"
        raise self._lacks(f"a token to pad with: {' or '.join(self.pad)}", fix)

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
    """Source of a template: of the file that ``file:PATH`` names, else a packaged one."""
    return _file_source(template) if template.startswith(TEMPLATE_FILE) else _own_source(template)


def _file_source(template: str) -> str:
    path = Path(template.removeprefix(TEMPLATE_FILE)).expanduser()
    try:
        return path.read_text(encoding="utf-8-sig")
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


class PromptFormatRegistry(Registry[Callable[[ConversationTokenizer], PromptConfig]]):
    """Prompt formats by name; ``file:PATH`` is the template in a file."""

    def __getitem__(self, name: str) -> Callable[[ConversationTokenizer], PromptConfig]:
        if not name.startswith(TEMPLATE_FILE):
            return super().__getitem__(name)
        return PromptFormat(name=name, template=name, pad=_OWN_PAD)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (
            isinstance(name, str) and name.startswith(TEMPLATE_FILE)
        )


_QWEN_SYSTEM: Final = MappingProxyType(
    {
        "role": "system",
        "content": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    }
)
_OWN_PAD: Final = ("pad_id", "eos_id")
_UNK_PAD: Final = ("<unk>", "unk_id", *_OWN_PAD)
_CHATML: Final = ("<|im_start|>", "<|im_end|>")
_IMAGES: Final = {"validate_no_image_in_assistant": True}
_WITHOUT_TOOLS: Final = {"allow_tool_role": False}
_NEMOTRON_H: Final = ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>")
_LLAMA3: Final = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

PROMPT_FORMAT_REGISTRY: Final = PromptFormatRegistry("prompt format")
"""Name -> factory of the ``PromptConfig`` for a tokenizer."""

for _row in (
    PromptFormat(name="default", pad=_OWN_PAD, options={"skip_masking": True}),
    PromptFormat(name="auto", pad=_OWN_PAD),
    PromptFormat(name="identity", template="identity", pad=_UNK_PAD),
    PromptFormat(
        name="nemotron-nano-v2",
        template="nemotron-nano-v2",
        pad=_UNK_PAD,
        tokens=_NEMOTRON_H,
        options=_WITHOUT_TOOLS,
    ),
    PromptFormat(
        name="nemotron-h-aligned",
        template="nemotron-h-aligned",
        pad=("<SPECIAL_233>",),
        tokens=("<SPECIAL_10>", "<SPECIAL_11>"),
        options=_WITHOUT_TOOLS,
    ),
    PromptFormat(
        name="mistral",
        template="mistral",
        pad=("unk_id", *_OWN_PAD),
        special_tokens=("bos_token", "eos_token"),
        options=_IMAGES | _WITHOUT_TOOLS | {"has_system_role": False},
    ),
    PromptFormat(name="llama3", pad=("<|end_of_text|>",), options=_IMAGES),
    *(
        PromptFormat(
            name=name,
            template="llama3p1",
            pad=("<|finetune_right_pad_id|>",),
            tokens=_LLAMA3,
            special_tokens=("bos_token",),
            options=_IMAGES,
        )
        for name in ("llama3p1", "llama3p2")
    ),
    PromptFormat(
        name="nvlm-yi-34b",
        template="nvlm-yi-34b",
        tokens=_CHATML,
        special_tokens=("bos_token",),
        options=_IMAGES,
    ),
    PromptFormat(name="chatml", tokens=_CHATML, options=_IMAGES | {"has_bos": False}),
    PromptFormat(
        name="nemotron5",
        template="nemotron5",
        pad=("<SPECIAL_233>",),
        tokens=("<SPECIAL_14>", "<SPECIAL_15>"),
        special_tokens=("bos_token",),
        options=_IMAGES,
    ),
    PromptFormat(
        name="nemotron5-aligned",
        template="nemotron5-aligned",
        pad=("<SPECIAL_233>",),
        tokens=("[PREFIX]",),
        special_tokens=("bos_token",),
        options=_IMAGES | {"capitalize_roles": True},
    ),
    *(
        PromptFormat(
            name=name,
            template="chatml",
            tokens=_CHATML,
            options=_IMAGES | {"system_default": _QWEN_SYSTEM},
        )
        for name in ("qwen2p0", "qwen2p5")
    ),
    PromptFormat(name="nemotron6-moe", pad=_UNK_PAD, options=_IMAGES),
    PromptFormat(
        name="llama_nemotron_8b",
        template="llama_nemotron_8b",
        pad=("<|end_of_text|>",),
        tokens=_LLAMA3,
        special_tokens=("bos_token",),
        options=_IMAGES,
    ),
    PromptFormat(
        name="nemotron-h-reasoning",
        template="nemotron-h-reasoning",
        pad=("<SPECIAL_11>",),
        tokens=("<SPECIAL_10>", "<SPECIAL_11>"),
        options=_IMAGES | _WITHOUT_TOOLS,
    ),
    PromptFormat(
        name="nemotron-h-5p5-reasoning",
        template="nemotron-nano-v2",
        pad=_UNK_PAD,
        tokens=_NEMOTRON_H,
        options=_IMAGES | _WITHOUT_TOOLS,
    ),
    PromptFormat(
        name="nemotron-h-5p5-reasoning-inference",
        template="nemotron-h-5p5-reasoning-inference",
        pad=_UNK_PAD,
        tokens=_NEMOTRON_H,
        options=_IMAGES,
    ),
    *(
        PromptFormat(
            name=name,
            template=name,
            pad=("<|finetune_right_pad_id|>",),
            tokens=_LLAMA3,
            special_tokens=("bos_token",),
            options=_IMAGES,
        )
        for name in ("llama-nemotron-super", "llama-nemotron-super-1p5")
    ),
):
    PROMPT_FORMAT_REGISTRY.register(_row.name, _row)


def prompt_config_of(name: str, tokenizer: ConversationTokenizer) -> PromptConfig:
    """The prompt format ``name`` for a tokenizer.

    Raises:
        ConfigError: There is no such format, it does not fit the vocabulary, or it is none.
    """
    config = PROMPT_FORMAT_REGISTRY[name](tokenizer)
    if not isinstance(config, PromptConfig):
        raise ConfigError(
            f"the factory of the prompt format {name} makes something else",
            got=type(config).__name__,
            expected="a PromptConfig of megatron_ext.conversation",
            where="prompt_format",
        )
    return config


def fitting_formats(tokenizer: ConversationTokenizer) -> list[str]:
    """Names of the prompt formats that fit a tokenizer."""
    return [name for name in PROMPT_FORMAT_REGISTRY if _fits(name, tokenizer)]


def _fits(name: str, tokenizer: ConversationTokenizer) -> bool:
    try:
        prompt_config_of(name, tokenizer)
    except ConfigError:
        return False
    return True
