"""Configuration of a tokenizer and of the conversations that it encodes.

Flags, their help and the documentation are generated from the fields below. A field is the flag
``--tokenizer-NAME`` unless its metadata give the spelling that Megatron uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from megatron_ext.conversation import PromptConfig, TrainingPolicy
from megatron_ext.errors import ConfigError, arguments_elsewhere
from megatron_ext.files import parse_json
from megatron_ext.tokenizers.legacy_types import Library, TokenizerMode


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationOptions:
    """Options that apply to any prompt format; flags have the same names.

    Raises:
        ConfigError: ``train_on`` names no policy and no role, or a template variable has no name.
    """

    train_on: str = "all-assistant"
    """Messages that are trained: all-assistant, last-assistant, or roles with commas between."""
    train_thinking: bool = True
    """Train a message's thinking."""
    train_tool_calls: bool = True
    """Train a message's tool calls."""
    exclude_unknown: bool = False
    """Do not train messages whose source the template hides, or which it does not show."""
    allow_control_tokens_in_content: bool = False
    """Names of control tokens in messages become these tokens."""

    template_variables: tuple[str, ...] = ()
    """Variables of templates: name=value, the value in JSON or a plain text."""

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            kind = str if name == "train_on" else type(default)
            value = getattr(self, name)
            if not isinstance(value, (list, tuple) if kind is tuple else kind):
                raise ConfigError(
                    "the value has the wrong type",
                    got=f"{type(value).__name__}, {value!r}",
                    expected="name=value texts" if kind is tuple else kind.__name__,
                    where=name,
                )
        # A saved tuple is loaded as a list.
        object.__setattr__(self, "template_variables", tuple(self.template_variables))
        TrainingPolicy.of(self.train_on)
        self.variables()

    def variables(self) -> dict[str, Any]:
        """The template variables by name.

        Raises:
            ConfigError: A variable has no name, or a value that starts like JSON and is not.
        """
        return dict(map(_variable, self.template_variables))

    def stated(self) -> dict[str, Any]:
        """Options that differ from their defaults, by name."""
        given = {option.name: getattr(self, option.name) for option in fields(self)}
        return {name: value for name, value in given.items() if value != _DEFAULTS[name]}

    def applied_to(self, config: PromptConfig) -> PromptConfig:
        """``config`` with the stated options.

        Raises:
            ConfigError: The prompt format trains every token, and a policy is stated.
        """
        stated = self.stated()
        policy = config.policy
        if "train_on" in stated:
            named = TrainingPolicy.of(self.train_on)
            policy = replace(policy, roles=named.roles, last_only=named.last_only)
        if "train_thinking" in stated:
            policy = replace(policy, thinking=self.train_thinking)
        if "train_tool_calls" in stated:
            policy = replace(policy, tool_calls=self.train_tool_calls)
        return replace(
            config,
            policy=policy,
            template_variables={**config.template_variables, **self.variables()},
            exclude_unknown=self.exclude_unknown or config.exclude_unknown,
            allow_control_tokens_in_content=(
                self.allow_control_tokens_in_content or config.allow_control_tokens_in_content
            ),
        )


def _variable(stated: object) -> tuple[str, Any]:
    name, equals, value = stated.partition("=") if isinstance(stated, str) else ("", "", "")
    if not equals or not name.isidentifier() or name == "messages":
        raise ConfigError(
            "this is not a template variable",
            got=repr(stated),
            expected="name=value, as in enable_thinking=false",
            where="template_variables",
        )
    try:
        return name, parse_json(value)
    except ValueError:
        if value[:1] in ("{", "[", '"'):
            raise ConfigError(
                "the value of the template variable is not JSON",
                got=repr(value),
                where=f"template_variables, {name}",
            ) from None
        return name, value


_DEFAULTS = {option.name: option.default for option in fields(ConversationOptions)}


Engine = Literal["auto", "reference", "gigatoken"]
ImageTagType = Literal["nvlm", "internvl", ""]


def _spelled(flag: str, *, only: tuple[Library, ...] | None = None) -> dict[str, Any]:
    """Metadata of a field: Megatron's flag, and the libraries that have the option."""
    return {"flag": flag, "only": only}


_HUGGINGFACE: tuple[Library, ...] = ("huggingface", "megatron")


_PREFIXED = (
    *("library", "mode", "model", "prompt_format", "special_tokens"),
    *("sentencepiece_legacy", "sentencepiece_ignore_extra_whitespaces"),
)


@arguments_elsewhere(
    {
        **{f"tokenizer_{name}": f"is {name}=" for name in _PREFIXED},
        "tokenizer_type": "is library= and mode=, or theirs for build_tokenizer",
        "tokenizer_hf_no_use_fast": "is hf_use_fast=, its opposite",
        "tokenizer_hf_no_include_special_tokens": "is hf_include_special_tokens=, its opposite",
        "metadata_path": "is metadata=",
        "null_tokenizer_eod_id": "is null_eod_id=",
        "null_tokenizer_pad_id": "is null_pad_id=",
        "pad_vocab_size": "is not needed: the tokenizer's vocab_size is not padded",
        "padded_vocab_size": "is a function: padded_vocab_size(vocab_size, ...)",
        "use_gigatoken": "is engine='gigatoken'",
    },
    project="Megatron-LM",
)
@dataclass(kw_only=True, frozen=True, slots=True)
class TokenizerConfig:
    """A tokenizer: where it is, which library reads it and what is done with it."""

    library: Library | None = None
    """Library that reads the tokenizer; told from the file when unset."""

    model: str | None = None
    """Tokenizer file, its directory, or its name on the HuggingFace hub; unset for byte-level and
    null, which read no file."""

    mode: TokenizerMode = "text"
    """Use of the tokenizer: text, sft (conversations) or multimodal (images in them)."""

    prompt_format: str | None = None
    """Prompt format that renders and masks conversations: a name of ``megatron-ext ls formats``,
    ``auto`` (the tokenizer's own template) or ``file:PATH``."""

    train_on: str | None = None
    """Messages that are trained: all-assistant (the default), last-assistant, or roles, separated
    by commas."""

    train_thinking: bool | None = None
    """Train the thinking in trained messages; true unless set."""

    train_tool_calls: bool | None = None
    """Train the tool calls in trained messages; true unless set."""

    exclude_unknown: bool | None = None
    """Do not train messages whose source a template hides; unless set, they are refused."""

    allow_control_tokens_in_content: bool | None = None
    """Turn special tokens that a message spells into their ids: its author can forge a turn."""

    template_variables: tuple[str, ...] | None = None
    """Variables of templates: name=value, as in enable_thinking=false."""

    metadata: str | Mapping[str, Any] | None = None
    """Tokenizer metadata file; tokenizer_metadata.json beside the tokenizer when unset."""

    chat_template: str | None = field(default=None, metadata=_spelled("--chat-template"))
    """Chat template: Jinja source, a file that ends in .jinja, or the name of one of the
    tokenizer's own, such as rag."""

    special_tokens: tuple[str, ...] = ()
    """Names of special tokens, added to the vocabulary where the library can and they are new."""

    parse_special_tokens: bool = False
    """Turn special tokens that are written in a text into their ids; they are text otherwise."""

    engine: Engine = "auto"
    """Engine for batches: gigatoken where its ids are proven equal (auto), or one of both."""

    vocab_size: int | None = field(
        default=None, metadata=_spelled("--vocab-size", only=("tiktoken", "byte-level", "null"))
    )
    """Number of ids; cuts a tiktoken vocabulary to this many, special tokens included."""

    vocab_file: str | None = field(
        default=None, metadata=_spelled("--vocab-file", only=_HUGGINGFACE)
    )
    """GPT-2's vocab.json or BERT's vocab.txt, where there is no tokenizer.json."""

    merge_file: str | None = field(
        default=None, metadata=_spelled("--merge-file", only=_HUGGINGFACE)
    )
    """GPT-2's merges.txt."""

    vocab_extra_ids: int = field(default=0, metadata=_spelled("--vocab-extra-ids"))
    """Add this many of T5's sentinels (extra_id_0 and so on) as special tokens."""

    hf_include_special_tokens: bool = field(default=False, metadata={"only": _HUGGINGFACE})
    """Put the BOS, EOS or [CLS] that the tokenizer's post-processor adds around every text."""

    hf_use_fast: bool = field(default=True, metadata={"only": _HUGGINGFACE})
    """Accepted for old scripts; tokenizer.json is always read by the fast library."""

    trust_remote_code: bool = field(default=False, metadata=_spelled("--trust-remote-code"))
    """Accepted for old scripts; code that comes with a tokenizer is never run."""

    sentencepiece_legacy: bool = field(default=False, metadata={"only": ("sentencepiece",)})
    """Append special tokens that the model lacks, and read them in text."""

    sentencepiece_ignore_extra_whitespaces: bool = field(
        default=True, metadata={"only": ("sentencepiece",)}
    )
    """Leave runs of white space to the model; otherwise every space is kept."""

    tiktoken_pattern: str | None = field(
        default=None, metadata=_spelled("--tiktoken-pattern", only=("tiktoken",))
    )
    """Pattern that cuts text before merging: v1, v2 or a regular expression; v2 when unset."""

    tiktoken_num_special_tokens: int | None = field(
        default=None, metadata=_spelled("--tiktoken-num-special-tokens", only=("tiktoken",))
    )
    """Ids kept for special tokens of a tiktoken vocabulary; 1000 unless set here or in the file."""

    null_eod_id: int | None = field(
        default=None, metadata=_spelled("--null-tokenizer-eod-id", only=("null",))
    )
    """End-of-document id of a null tokenizer; its last id when unset."""

    null_pad_id: int | None = field(
        default=None, metadata=_spelled("--null-tokenizer-pad-id", only=("null",))
    )
    """Padding id of a null tokenizer; none when unset or negative."""

    null_add_eod: bool = field(
        default=False, metadata=_spelled("--null-tokenizer-add-eod", only=("null",))
    )
    """Give a null tokenizer one id more than vocab_size, its end of document (Megatron 0.16)."""

    image_tag_type: ImageTagType = field(default="", metadata=_spelled("--image-tag-type"))
    """Tags around each image: those of nvlm, those of internvl, or none."""

    force_system_message: bool = field(default=False, metadata=_spelled("--force-system-message"))
    """Replace the system message by the prompt format's own."""

    def __post_init__(self) -> None:
        _check_choice("library", self.library, (*get_args(Library), None))
        _check_choice("mode", self.mode, get_args(TokenizerMode))
        _check_choice("engine", self.engine, get_args(Engine))
        _check_choice("image_tag_type", self.image_tag_type, get_args(ImageTagType))
        # Its constructor checks the options.
        ConversationOptions(**self.conversation_options())
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise ConfigError(
                    "the value has the wrong type",
                    got=f"{type(value).__name__}, {value!r}",
                    expected="an integer",
                    where=name,
                )
            if value is not None and value < least:
                raise ConfigError(
                    "the value is too small", got=value, expected=f">= {least}", where=name
                )
        if self.library is not None:
            self._refuse_options_of_other_libraries(self.library)
        for name in _MULTIMODAL_ONLY:
            if getattr(self, name) and self.mode != "multimodal":
                raise ConfigError(
                    "the option is for the mode multimodal",
                    got=f"mode {self.mode}",
                    fix="leave it unset",
                    where=name,
                )
        if self.mode == "multimodal" and self.prompt_format is None and self.library != "null":
            raise ConfigError(
                "a multimodal tokenizer needs a prompt format",
                fix="name one, or use auto for the tokenizer's own chat template",
                where="prompt_format",
            )

    def conversation_options(self) -> dict[str, Any]:
        """Options of conversations that are set, even to their defaults."""
        given = {option.name: getattr(self, option.name) for option in fields(ConversationOptions)}
        return {name: value for name, value in given.items() if value is not None}

    def _refuse_options_of_other_libraries(self, library: Library) -> None:
        for option in fields(self):
            only = option.metadata.get("only")
            if only is None or library in only or getattr(self, option.name) == option.default:
                continue
            raise ConfigError(
                f"the option is for the {' or '.join(only)} library",
                got=f"library {library}",
                fix="leave it unset",
                where=option.name,
            )


_MULTIMODAL_ONLY = ("image_tag_type", "force_system_message")
_LEAST: Mapping[str, int] = {
    "tiktoken_num_special_tokens": 1,
    "vocab_size": 1,
    "vocab_extra_ids": 0,
    "null_eod_id": 0,
}


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            "unknown value",
            got=repr(value),
            expected=f"one of {', '.join(str(choice) for choice in choices)}",
            where=name,
        )
