"""``MegatronTokenizerText``, the tokenizer that Megatron uses in data, training and serving."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_ext.conversation.chat_output import ChatOutput
from megatron_ext.conversation.message import TOOL_TEMPLATE
from megatron_ext.errors import TokenizerError
from megatron_ext.files import parse_json
from megatron_ext.imports import needed_packages
from megatron_ext.tokenizers.assets import save_assets
from megatron_ext.tokenizers.base import (
    MegatronTokenizerBase,
    MegatronTokenizerTextAbstract,
    Vocabulary,
)
from megatron_ext.tokenizers.chat_tokenizer import ChatTokenizer
from megatron_ext.tokenizers.config import ConversationOptions
from megatron_ext.tokenizers.libraries import TOKENIZER_LIBRARIES, library_of
from megatron_ext.tokenizers.saved_tokenizer import load_saved
from megatron_ext.tokenizers.special_tokens import AddedTokens
from megatron_ext.tokenizers.token_bytes import TokenBytes
from megatron_ext.tokenizers.token_ids import ByteEnds, IdArray


def _texts(file: Path, field: str) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _text(line, field, f"{file}:{number}")
    except OSError as error:
        raise TokenizerError("cannot read the file", got=error.strerror, where=file) from error
    except UnicodeDecodeError as error:
        raise TokenizerError("the file is not UTF-8", got=error.reason, where=file) from error


def _text(line: str, field: str, where: str) -> str:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise TokenizerError("the line is not JSON", got=str(error), where=where) from error
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        keys = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise TokenizerError(
            "the line has no such text", got=keys, expected=f"text under {field!r}", where=where
        )
    return text


class MegatronTokenizerText(ChatTokenizer, MegatronTokenizerBase):
    """A tokenizer of one library behind Megatron's interface.

    Args:
        path: The tokenizer file or its directory; None for a library that reads none.
        config: Metadata; ``library`` names the library, and ``chat_template`` and
            ``prompt_format`` may be given here too. It is copied.
        prompt_format: Name of the prompt format that renders and masks conversations.
        chat_template: Name of one of the tokenizer's own templates, a file that ends in .jinja, or
            Jinja source, instead of the metadata's and of the tokenizer's own.
        parse_special_tokens: Parse special tokens in texts, though not in messages.
        train_on: Messages that are trained: ``all-assistant``, ``last-assistant``, or roles with
            commas between them. The ``"train"`` of a message overrides it.
        train_thinking: Train the thinking of these messages.
        train_tool_calls: Train their tool calls.
        exclude_unknown: Do not train messages whose provenance the template hides or that it leaves
            out; otherwise such a conversation is refused.
        allow_control_tokens_in_content: Parse special tokens in messages, whose authors can then
            forge a turn.
        template_variables: Variables of templates, ``name=value`` each, the value in JSON or a
            plain text: ``enable_thinking=false``.
        identify_by_content: Let ``unique_identifiers`` follow the vocabulary and the template
            instead of the path alone.
        options: Options of the library's adapter.

    Raises:
        ConfigError: ``config`` names no library or an unknown one, or the prompt format does not
            fit the vocabulary.
        TokenizerError: The file or an option is unusable.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        config: Mapping[str, Any],
        *,
        prompt_format: str | None = None,
        chat_template: str | None = None,
        parse_special_tokens: bool = False,
        train_on: str = "all-assistant",
        train_thinking: bool = True,
        train_tool_calls: bool = True,
        exclude_unknown: bool = False,
        allow_control_tokens_in_content: bool = False,
        template_variables: Sequence[str] = (),
        identify_by_content: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(None if path is None else os.fspath(path), dict(config))
        self.library = library_of(config.get("library")).library
        self.parse_special_tokens = parse_special_tokens
        self.conversation_options = ConversationOptions(
            train_on=train_on,
            train_thinking=train_thinking,
            train_tool_calls=train_tool_calls,
            exclude_unknown=exclude_unknown,
            allow_control_tokens_in_content=allow_control_tokens_in_content,
            template_variables=tuple(template_variables),
        )
        self.identify_by_content = identify_by_content
        self.options = options
        self._tokenizer: MegatronTokenizerTextAbstract = TOKENIZER_LIBRARIES[self.library].build(
            path, options, wrapper=type(self)
        )
        self._set_chat_template(chat_template)
        self._set_prompt_format(prompt_format)

    def __repr__(self) -> str:
        parts = f"{self.library!r}, path={self.path!r}, vocab_size={self.vocab_size}"
        return f"{type(self).__name__}({parts}, prompt_format={self.prompt_format!r})"

    # Text and ids, under the names of transformers.

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
    ) -> dict[str, Any]:
        """``input_ids`` and ``attention_mask`` of a text, or lists of both of several.

        No BOS or EOS is added, other than by transformers. Labels are these ids: a model of
        transformers shifts them, and batches of this package have shifted ones.

        Args:
            text: A text or several.
            truncation: Keep the first ``max_length`` ids.
            max_length: Most ids; of no effect without ``truncation``.
            return_tensors: ``np`` or ``pt``: int64 [1, T], of one text alone; several would have
                to be padded, which collators do.

        Raises:
            TokenizerError: An option cannot be used, or a text that the library cannot take.
        """
        output = ChatOutput(
            truncation=truncation,
            max_length=max_length,
            return_tensors=return_tensors,
            return_dict=True,
        )
        if isinstance(text, str):
            found: dict[str, Any] = output.of(self.text_to_ids(text))
            return found
        if return_tensors is not None:
            raise TokenizerError(
                "texts of different lengths do not make a tensor",
                got=f"{len(text)} texts",
                fix="leave return_tensors out, or collate them with CrossTokenizerCollator",
            )
        rows = [output.of(ids.tolist()) for ids in self.text_to_ids_batch(text)]
        return {key: [row[key] for row in rows] for key in ("input_ids", "attention_mask")}

    def encode(self, text: str) -> list[int]:
        """``text_to_ids``: no BOS or EOS is added, other than by transformers."""
        return self.text_to_ids(text)

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """``detokenize``, also of a single id and of a tensor or array [T]."""
        tolist = getattr(ids, "tolist", None)
        row = ids if tolist is None else tolist()
        return self.detokenize([row] if isinstance(row, int) else row, skip_special_tokens)

    def __len__(self) -> int:
        """``vocab_size``, special and added tokens included."""
        return self.vocab_size

    # Text and ids.

    def text_to_ids(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens in it are text unless ``parse_special_tokens``."""
        return self._tokenizer.text_to_ids(text, parse_special=self.parse_special_tokens)

    def text_to_ids_batch(self, texts: Sequence[str]) -> list[IdArray]:
        """``text_to_ids`` of many texts, in parallel inside the library where it can."""
        return self._tokenizer.text_to_ids_batch(texts, parse_special=self.parse_special_tokens)

    def text_to_flat_ids(self, texts: Sequence[str]) -> tuple[IdArray, ByteEnds]:
        """Ids [N] of all texts, and the offsets [D + 1] of each text's ids."""
        return self._tokenizer.text_to_flat_ids(texts, parse_special=self.parse_special_tokens)

    def prepare_engine(self) -> str | None:
        """Build and prove the engine for batches now, for example before a fork.

        Returns:
            Reason why it is not used, in one line; None where it is used.
        """
        prepare = getattr(self._tokenizer, "prepare_engine", None)
        return f"{self.library} has no fast engine" if prepare is None else prepare()

    def tokenize_files(
        self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], field: str = "text"
    ) -> Any:
        """Ids of every document of JSON lines files, as an ``awkward`` array [D, *].

        All documents are in memory at once; ``megatron-ext tokenize`` writes indexed datasets from
        files of any size.

        Args:
            paths: Files; blank lines are skipped.
            field: Key of a document's text.

        Raises:
            TokenizerError: A file or a line cannot be used; the message names it.
            MissingDependencyError: awkward is not installed.
        """
        with needed_packages("an array of documents"):
            awkward = import_module("awkward")
        several = [paths] if isinstance(paths, str | os.PathLike) else paths
        texts = [text for path in several for text in _texts(Path(path), field)]
        ids, offsets = self.text_to_flat_ids(texts)
        return awkward.Array(
            awkward.contents.ListOffsetArray(
                awkward.index.Index64(offsets), awkward.contents.NumpyArray(ids)
            )
        )

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ``ids``."""
        return self._tokenizer.ids_to_text(ids, skip_special_tokens=skip_special_tokens)

    def encode_with_byte_ends(
        self, text: str, *, parse_special: bool | None = None
    ) -> tuple[IdArray, ByteEnds]:
        """Ids [T] of ``text``, and their byte ends [T] in ``text.encode()``."""
        parse = self.parse_special_tokens if parse_special is None else parse_special
        return self._tokenizer.encode_with_byte_ends(text, parse_special=parse)

    def byte_ends(self, ids: Sequence[int] | IdArray) -> ByteEnds:
        """Byte ends [T] of ``ids`` in the bytes that the stream decodes to."""
        return self._tokenizer.byte_ends(ids)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes of one id; None for a control token or unused id."""
        return self._tokenizer.token_bytes(token_id)

    @property
    def token_table(self) -> TokenBytes | None:
        """Bytes of every id, where the library's adapter keeps them."""
        return getattr(self._tokenizer, "token_table", None)

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Index of the character of ``text`` in which each token begins [T]; see the library's."""
        return self._tokenizer.offsets(ids, text)

    # Vocabulary.

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def vocab(self) -> Vocabulary:
        """Display string of each id, in id order [V]; empty where an id is unused."""
        return self._tokenizer.vocab

    @property
    def inv_vocab(self) -> dict[int, str]:
        """Display string by id."""
        return self._tokenizer.inv_vocab

    def id_to_token(self, token_id: int) -> str:
        """Display string of an id."""
        return self._tokenizer.id_to_token(token_id)

    def add_special_tokens(self, special_tokens: Sequence[str] | Mapping[str, Any]) -> int:
        """Add special tokens: a list of names, or names by ``pad_token`` ... as HuggingFace does.

        The library's tokenizer is rebuilt, and new names get the next ids.

        Returns:
            The number of names that the vocabulary did not hold.

        Raises:
            TokenizerError: A name or a key is unusable, or the library cannot add them.
        """
        added = AddedTokens(special_tokens)
        new = [name for name in added.names if not self._holds(name)]
        options = added.joined_to(self.options)
        self._tokenizer = TOKENIZER_LIBRARIES[self.library].build(self.path, options)
        self.options = options
        self._tokenizer.served_by = self
        self._set_prompt_format(self.prompt_format)
        return len(new)

    def _holds(self, token: str) -> bool:
        try:
            self.token_to_id(token)
        except KeyError:
            return False
        return True

    @property
    def _pad_of_format(self) -> int | None:
        return None if self.prompt_config is None else self.prompt_config.pad_token_id

    @property
    def vocab_file(self) -> str | None:
        """The option ``vocab_file``."""
        return self.options.get("vocab_file")

    @property
    def merges_file(self) -> str | None:
        """The option ``merges_file``."""
        return self.options.get("merges_file")

    @property
    def space_sensitive(self) -> bool:
        """Whether two words give other ids together than separately."""
        ids = self._tokenizer.text_to_ids
        return ids("x y") != ids("x") + ids("y")

    # Identity.

    def files(self) -> Mapping[str, Path]:
        """Files that the tokenizer was read from, by the name they keep in a checkpoint."""
        return self._tokenizer.files()

    def constructor_options(self) -> dict[str, Any]:
        """Keyword arguments that rebuild the tokenizer, without chat template and prompt format; a
        subclass adds its own."""
        flags = ("parse_special_tokens", "identify_by_content")
        set_flags = {name: True for name in flags if getattr(self, name)}
        return self.options | self.conversation_options.stated() | set_flags

    def save_pretrained(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write a folder from which ``MegatronTokenizer.from_pretrained`` rebuilds the tokenizer.

        The folder appears whole or not at all. It needs no other file and no network.

        Args:
            path: A folder that is empty or does not exist.
            overwrite: Replace a tokenizer that was saved there.

        Raises:
            TokenizerError: The folder holds something else, or cannot be written.
        """
        save_assets(self, path, check=partial(load_saved, type(self)), overwrite=overwrite)

    def fingerprint(self) -> str:
        """SHA-256 (hex) of every id's bytes or control name in id order."""
        return self._tokenizer.fingerprint()

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """Key of Megatron's dataset cache."""
        kind = type(self)
        # Our own classes may move between modules without emptying every cache.
        package = "megatron_ext" if kind.__module__.startswith("megatron_ext.") else kind.__module__
        identifiers = OrderedDict(
            {
                "class": f"{package}.{kind.__qualname__}",
                "library": self.library,
                "tokenizer_path": str(self.path),
            }
        )
        for name in sorted(self.options):
            value = self.options[name]
            # A saved tuple is loaded as a list.
            identifiers[name] = str(list(value) if isinstance(value, tuple) else value)
        if self.parse_special_tokens:
            identifiers["parse_special_tokens"] = "True"
        if self.prompt_format is not None:
            identifiers["prompt_format"] = self.prompt_format
        for name, value in self.conversation_options.stated().items():
            identifiers[name] = str(value)
        if self.identify_by_content:
            identifiers["vocabulary"] = self.fingerprint()
            identifiers["chat_template"] = str(self.chat_template)
            if TOOL_TEMPLATE in self.chat_templates:
                identifiers[f"chat_template {TOOL_TEMPLATE}"] = self.chat_templates[TOOL_TEMPLATE]
        return identifiers
