"""tiktoken tokenizers: Megatron's JSON rank list, Mistral's Tekken file and base64 rank files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from megatron_ext.errors import TokenizerError
from megatron_ext.imports import needed_packages
from megatron_ext.tokenizers.engine import GigatokenEngine, tiktoken_engine
from megatron_ext.tokenizers.libraries.table_tokenizer import TableTokenizer
from megatron_ext.tokenizers.libraries.tiktoken_file import read_tiktoken_file
from megatron_ext.tokenizers.libraries.tiktoken_layout import (
    TiktokenOptions,
    TiktokenVocabulary,
    lay_out,
)
from megatron_ext.tokenizers.libraries.tokenizer_libraries import distinct_names, engine_choice
from megatron_ext.tokenizers.special_tokens import CONVENTIONAL_NAMES, SpecialRole, names_to_add


def role_ids(
    vocabulary: TiktokenVocabulary,
    options: TiktokenOptions,
    roles: Mapping[SpecialRole, str | None],
) -> dict[SpecialRole, int | None]:
    """Id of each role: named by an option, else of its conventional name.

    Raises:
        TokenizerError: Several listed special tokens have conventional names of one role.
    """
    names = vocabulary.special_ids.keys() - vocabulary.added
    ids: dict[SpecialRole, int | None] = {}
    for role, usual in CONVENTIONAL_NAMES.items():
        stated = roles[role]
        if stated is not None:
            ids[role] = vocabulary.special_ids[stated]
            continue
        present = [name for name in usual if name in names]
        # Megatron's own name, which comes first, is unambiguous.
        if options.special_tokens is not None and len(present) > 1 and present[0] != usual[0]:
            raise TokenizerError(
                f"several special tokens could be the {role} token",
                got=" and ".join(map(repr, present)),
                fix=f"say which: {role}_token={present[0]!r}",
                where="special_tokens",
            )
        ids[role] = vocabulary.special_ids[present[0]] if present else None
    return ids


def without_role(
    vocabulary: TiktokenVocabulary,
    options: TiktokenOptions,
    role_ids: Mapping[SpecialRole, int | None],
) -> list[str] | None:
    """Special tokens that the user named and that have no role; None where none were named."""
    named = list(dict.fromkeys((*(options.special_tokens or ()), *options.additional)))
    if not named:
        return None
    used = vocabulary.special_ids.keys() - vocabulary.fillers
    with_role = set(role_ids.values())
    return [n for n in named if n in used and vocabulary.special_ids[n] not in with_role]


class TiktokenTokenizer(TableTokenizer):
    """Tokenizer of a tiktoken rank list.

    In a JSON file the special tokens have ids 0 to ``num_special_tokens - 1`` and the ordinary
    tokens follow in rank order; in a base64 rank file the ids are the ranks and the special tokens
    follow. Names are filled up with ``<SPECIAL_i>``. The rank files of r50k_base, p50k_base,
    cl100k_base, o200k_base and Llama 3 are recognised by their contents and have the pattern and
    the special tokens of their publisher.

    Args:
        path: A JSON rank list, ``tekken.json``, a ``.tiktoken`` file or Llama's rank file.
        pattern: Pattern that cuts text before merging: ``v1``, ``v2`` or a regular expression. A
            Tekken file has its own; for a vocabulary that is not recognised the default is ``v2``.
        vocab_size: Number of ids, special tokens included; the ranks beyond are cut off. The
            default is that of a Tekken file, at most 2**17 for a JSON list, and all of a rank file.
        num_special_tokens: Ids kept for special tokens; 1000 unless a Tekken file says otherwise
            or the vocabulary is recognised.
        special_tokens: Names, in id order; a Tekken file has its own. Conventional names such as
            ``</s>`` get their roles.
        additional_special_tokens: More names, without a role. They replace the fillers behind the
            last name; a rank file gets more ids where these do not suffice.
        bos_token, eos_token, pad_token, unk_token, mask_token, cls_token, sep_token: The special
            token of a role, added where it is new.
        engine: Engine that encodes batches.

    Raises:
        TokenizerError: The file is missing, broken or of another library, or an option does not
            fit it.
        MissingDependencyError: tiktoken is not installed.
    """

    library: ClassVar[str] = "tiktoken"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        pattern: str | None = None,
        vocab_size: int | None = None,
        num_special_tokens: int | None = None,
        special_tokens: Sequence[str] | None = None,
        additional_special_tokens: Sequence[str] = (),
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        unk_token: str | None = None,
        mask_token: str | None = None,
        cls_token: str | None = None,
        sep_token: str | None = None,
        engine: str = "auto",
    ) -> None:
        self.engine = engine_choice(engine)
        roles: dict[SpecialRole, str | None] = {
            "bos": bos_token,
            "eos": eos_token,
            "pad": pad_token,
            "unk": unk_token,
            "mask": mask_token,
            "cls": cls_token,
            "sep": sep_token,
        }
        options = TiktokenOptions(
            pattern=pattern,
            vocab_size=vocab_size,
            num_special_tokens=num_special_tokens,
            special_tokens=None
            if special_tokens is None
            else distinct_names(special_tokens, "special_tokens"),
            additional=tuple(
                names_to_add(
                    roles,
                    distinct_names(additional_special_tokens, "additional_special_tokens"),
                )
            ),
        )
        vocabulary = lay_out(read_tiktoken_file(path), options)
        special_ids = role_ids(vocabulary, options, roles)
        self._encoding = _encoding(vocabulary)
        self._filler_names = vocabulary.fillers
        pieces, token_bytes = _rows(vocabulary)
        super().__init__(
            pieces=pieces,
            token_bytes=token_bytes,
            files={vocabulary.file.name: vocabulary.file},
            special_ids=special_ids,
            dummy_prefix="none",
            additional_special_tokens=without_role(vocabulary, options, special_ids),
        )

    def _build_engine(self) -> GigatokenEngine:
        file = next(iter(self._files.values()))
        return tiktoken_engine(self._table, self._encoding._pat_str, file)

    def _encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        threads = min(8, os.cpu_count() or 1)
        try:
            batch: list[list[int]] = self._encoding.encode_ordinary_batch(
                list(texts), num_threads=threads
            )
        except BaseException as error:
            raise _without_panic(error) from None
        return batch

    def _encode(self, text: str) -> tuple[list[int], None]:
        try:
            return self._encoding.encode_ordinary(text), None
        except BaseException as error:
            raise _without_panic(error) from None

    @property
    def _fillers(self) -> frozenset[str]:
        return self._filler_names

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self._decode_segments(
            ids,
            lambda run: self._table.join(run).tobytes().decode(errors="replace"),
            self._table.is_control,
            skip_special_tokens=skip_special_tokens,
        )

    def _locate(self, text: str, raw: bytes, encoded: Any) -> tuple[list[int], list[int]]:
        raise TokenizerError(
            "the pattern leaves out part of the text",
            got=repr(self._encoding._pat_str),
            expected="a pattern whose matches cover any text",
            fix=r"add |\s+|. to its end",
        )


def _without_panic(error: BaseException) -> BaseException:
    """``error``, or an Exception for a panic of the library, which would end a worker."""
    if type(error).__name__ != "PanicException":
        return error
    return TokenizerError(
        "tiktoken cannot cut the text",
        got=error,
        expected="runs of white space shorter than a million characters",
    )


def _rows(vocabulary: TiktokenVocabulary) -> tuple[list[str], list[bytes | None]]:
    """Display string and bytes of each id [V]."""
    token_bytes: list[bytes | None] = [None] * vocabulary.vocab_size
    pieces = [""] * vocabulary.vocab_size
    for token, token_id in vocabulary.ids.items():
        token_bytes[token_id] = token
        # A token may end inside a character; its display string then shows the bytes.
        pieces[token_id] = token.decode(errors="backslashreplace")
    for name, token_id in vocabulary.special_ids.items():
        pieces[token_id] = name
    return pieces, token_bytes


def _encoding(vocabulary: TiktokenVocabulary) -> Any:
    with needed_packages("a tiktoken vocabulary"):
        import tiktoken
    try:
        return tiktoken.Encoding(
            name=vocabulary.file.name,
            pat_str=vocabulary.pattern,
            mergeable_ranks=vocabulary.ids,
            special_tokens=vocabulary.special_ids,
        )
    except ValueError as error:
        raise TokenizerError(
            "tiktoken cannot use the pattern",
            got=f"{vocabulary.pattern!r}: {error}",
            expected="v1, v2 or a regular expression",
            where="pattern",
        ) from error
