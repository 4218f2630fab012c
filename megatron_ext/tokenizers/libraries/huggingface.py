"""HuggingFace fast tokenizers, read from ``tokenizer.json`` without transformers."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from megatron_ext.errors import TokenizerError
from megatron_ext.imports import needed_packages
from megatron_ext.tokenizers.engine import GigatokenEngine, huggingface_engine
from megatron_ext.tokenizers.libraries.huggingface_file import HuggingFaceFile, HuggingFaceSource
from megatron_ext.tokenizers.libraries.huggingface_vocab import named_vocab_files, vocab_files_at
from megatron_ext.tokenizers.libraries.table_tokenizer import TableTokenizer
from megatron_ext.tokenizers.libraries.tokenizer_libraries import engine_choice
from megatron_ext.tokenizers.special_tokens import ControlToken, ControlTokens, SpecialRole
from megatron_ext.tokenizers.token_bytes import character_starts, settle_ends
from megatron_ext.tokenizers.tokenizer_files import require_library


def transformers_tokenizer(tokenizer: Any, served_by: Any) -> Any:
    """A ``PreTrainedTokenizerFast`` around ``tokenizer``, an object of the tokenizers library.

    Conversations are rendered by ``served_by``, a ``MegatronTokenizerText`` or a library's adapter,
    with the template that its user chose and without parsing control tokens in messages.

    Raises:
        ImportError: transformers is not installed.
    """

    def chat(
        self: Any,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **options: Any,
    ) -> Any:
        return served_by.apply_chat_template(
            conversation,
            chat_template
            if self.chat_template is None
            else self.get_chat_template(chat_template, tools),
            tokenize=tokenize,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            **options,
        )

    base = import_module("transformers").PreTrainedTokenizerFast
    kind: Any = type("TransformersTokenizer", (base,), {"apply_chat_template": chat})
    templates = dict(served_by.chat_templates)
    return kind(
        tokenizer_object=tokenizer,
        # A dictionary of one would not be text, which programs look for that know no names.
        chat_template=served_by.chat_template if templates.keys() <= {"default"} else templates,
        **served_by.special_token_names,
    )


class HuggingFaceTokenizer(TableTokenizer):
    """Tokenizer of a ``tokenizer.json``, read with the tokenizers library.

    transformers is not used: ``AutoTokenizer`` on a directory rebuilds the pipeline from the name
    in ``tokenizer_class`` and can silently change the ids. The file alone is the tokenizer.

    Args:
        path: The file, or a directory that holds it.
        vocab_file: GPT-2's ``vocab.json`` or BERT's ``vocab.txt``, instead of a ``tokenizer.json``.
        merges_file: GPT-2's ``merges.txt``, with the former.
        include_special_tokens: Add what the post-processor adds to a text: BOS, EOS, [CLS].
        additional_special_tokens: Names that become special tokens; new ones get the next ids.
        bos_token: Name of the BOS, instead of the configured one; added where it is missing.
        eos_token, pad_token, unk_token, mask_token, cls_token, sep_token: The same for their roles.
        engine: Engine that encodes batches.
        use_fast: Accepted for code written for Megatron's class; the fast library is always used.
        trust_remote_code: Accepted alike; code that comes with a tokenizer is never run.
        use_gigatoken: Megatron's option for the engine ``gigatoken``.

    Raises:
        TokenizerError: There is no ``tokenizer.json``, or a file is broken.
        MissingDependencyError: tokenizers is not installed.
    """

    library: ClassVar[str] = "huggingface"
    absent_pad: ClassVar[int | None] = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        vocab_file: str | os.PathLike[str] | None = None,
        merges_file: str | os.PathLike[str] | None = None,
        include_special_tokens: bool = False,
        additional_special_tokens: Sequence[str] = (),
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        unk_token: str | None = None,
        mask_token: str | None = None,
        cls_token: str | None = None,
        sep_token: str | None = None,
        engine: str = "auto",
        use_fast: bool = True,
        trust_remote_code: bool = False,
        use_gigatoken: bool = False,
    ) -> None:
        self.engine = engine_choice("gigatoken" if use_gigatoken and engine == "auto" else engine)
        roles: dict[SpecialRole, str | None] = {
            **{"bos": bos_token, "eos": eos_token, "pad": pad_token, "unk": unk_token},
            **{"mask": mask_token, "cls": cls_token, "sep": sep_token},
        }
        self.include_special_tokens = include_special_tokens
        self._additions: dict[str, Any] = {
            "special_tokens": tuple(additional_special_tokens),
            "roles": {role: name for role, name in roles.items() if name is not None},
        }
        self._source = self._open(path, vocab_file, merges_file)
        contents = self._contents()
        self._text_only = _build(contents.text_only(), self._source.file)
        self._user_defined = contents.user_defined_tokens()
        _warn_of_names(contents.names_without_id(), self._source.file)
        _warn_of_ids(contents.ids_of_the_library())
        super().__init__(
            files=self._source.files,
            pieces=contents.pieces(),
            token_bytes=contents.token_bytes(),
            special_ids=contents.special_ids(),
            dummy_prefix=contents.dummy_prefix(),
            control_tokens=contents.control_tokens(),
            additional_special_tokens=contents.additional_special_tokens(),
            affixes=_affixes(contents.whole(), self._source.file)
            if include_special_tokens
            else ((), ()),
        )
        self.chat_templates = self._source.chat_templates()

    def _open(
        self,
        path: str | os.PathLike[str],
        vocab_file: str | os.PathLike[str] | None,
        merges_file: str | os.PathLike[str] | None,
    ) -> HuggingFaceSource:
        """The files of the tokenizer."""
        named = named_vocab_files(vocab_file, merges_file, Path(path))
        if named is not None:
            return named
        at_path = vocab_files_at(path)
        if at_path is not None:
            return at_path
        file = require_library(path, "huggingface").file
        return HuggingFaceSource(file, file.parent)

    def _contents(self) -> HuggingFaceFile:
        """The contents of the files, with the added tokens; not cached, because it is large."""
        source = self._source
        return HuggingFaceFile(source.document(), source.config, source.file, **self._additions)

    def _build_engine(self) -> GigatokenEngine:
        return huggingface_engine(self._text_only.to_str(), self._source.file)

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encode = getattr(self._text_only, "encode_batch_fast", self._text_only.encode_batch)
        return [row.ids for row in encode(list(texts), add_special_tokens=False)]

    def _encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode_batch(texts)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        checked = self._table.as_ids(ids).tolist()
        return str(self._whole.decode(checked, skip_special_tokens=skip_special_tokens))

    def _encode(self, text: str) -> tuple[list[int], Any]:
        encoding = self._text_only.encode(text, add_special_tokens=False)
        return encoding.ids, encoding

    def _locate(self, text: str, raw: bytes, encoded: Any) -> tuple[list[int], list[int]]:
        ids: list[int] = encoded.ids
        spans: list[tuple[int, int]] = encoded.offsets
        if len(raw) != len(text):
            byte_of = character_starts(raw).tolist()
            spans = [(byte_of[start], byte_of[end]) for start, end in spans]
        return ids, settle_ends(spans, [self._table.rows[i] for i in ids], raw)

    @cached_property
    def _whole(self) -> Any:
        """The tokenizer that parses special tokens in text; built on first use."""
        return _build(self._contents().whole(), self._source.file)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer as an object of transformers, which is imported here.

        Megatron's server streams with it where the attribute exists; other libraries lack it.

        Raises:
            AttributeError: transformers is not installed.
        """
        try:
            return transformers_tokenizer(self._whole, self.served_by or self)
        except ImportError as error:
            raise AttributeError(f"transformers is not installed: {error}") from error

    def __getstate__(self) -> dict[str, Any]:
        # The class of that object is made at run time, so it cannot be pickled.
        return {name: value for name, value in self.__dict__.items() if name != "tokenizer"}

    def _user_defined_tokens(self) -> list[ControlToken]:
        return self._user_defined

    def _hiding(self, names: frozenset[str]) -> HuggingFaceTokenizer:
        hiding = copy(self)
        hiding._batches_segments = False
        hiding.__dict__.pop("_after_control", None)
        hidden = (*self._additions["special_tokens"], *sorted(names))
        hiding._additions = {**self._additions, "special_tokens": hidden}
        contents = hiding._contents()
        hiding._control = ControlTokens(contents.control_tokens())
        hiding._text_only = _build(contents.text_only(), self._source.file)
        return hiding

    def _continued(self, *, to_the_end: bool) -> TableTokenizer:
        return self._after_control if self._dummy_prefix == "first" else self

    @cached_property
    def _after_control(self) -> HuggingFaceTokenizer:
        """The tokenizer without the space that it adds before the first segment."""
        continued = copy(self)
        continued._batches_segments = False
        document = self._contents().text_only(continued=True)
        continued._text_only = _build(document, self._source.file)
        return continued


def _warn_of_names(names: Sequence[str], file: Path) -> None:
    """Warn of special tokens of a configuration that have no id in the file of the vocabulary."""
    if names:
        warnings.warn(
            f"the configuration of the tokenizer names {', '.join(names[:5])}, which {file.name} "
            "lacks; transformers adds such tokens: to have them, load the folder with "
            "AutoTokenizer, and save it with save_pretrained",
            stacklevel=2,
        )


def _warn_of_ids(theirs: range | None) -> None:
    """Warn where the library gives added tokens ``theirs`` in place of the ids of the file."""
    if theirs is not None:
        warnings.warn(
            "the added tokens of the tokenizer.json have other ids than in transformers, where they"
            f" are {theirs[0]} to {theirs[-1]}; those of the file are taken: for the others, load"
            " the folder with AutoTokenizer, and save it with save_pretrained",
            stacklevel=2,
        )


def _build(document: dict[str, Any], file: Path) -> Any:
    with needed_packages("a HuggingFace tokenizer"):
        from tokenizers import Tokenizer
    try:
        return Tokenizer.from_str(json.dumps(document))
    except Exception as error:
        # The library raises bare Exceptions.
        raise TokenizerError(
            "the tokenizers library cannot build the tokenizer", got=str(error), where=file
        ) from error


def _affixes(document: dict[str, Any], file: Path) -> tuple[list[int], list[int]]:
    """Ids that the post-processor puts before and after a text."""
    encoding = _build(document, file).encode("a", add_special_tokens=True)
    inside = [i for i, added in enumerate(encoding.special_tokens_mask) if not added]
    begin, end = (inside[0], inside[-1] + 1) if inside else (len(encoding.ids), len(encoding.ids))
    return encoding.ids[:begin], encoding.ids[end:]
