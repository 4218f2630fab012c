"""Loading of a saved tokenizer folder, verified against its record."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import TokenizerError, refused_by_system
from megatron_ext.tokenizers.assets import (
    ASSETS_KEY,
    ASSETS_VERSION,
    PROMPT_FILE,
    digest,
    file_names,
)
from megatron_ext.tokenizers.libraries import TOKENIZER_LIBRARIES, library_of
from megatron_ext.tokenizers.metadata import METADATA_FILE, metadata_file, read_metadata
from megatron_ext.tokenizers.tokenizer_files import TEMPLATE_FOLDER

if TYPE_CHECKING:
    from megatron_ext.tokenizers.text_tokenizer import MegatronTokenizerText

_FIX = "copy the folder again, whole"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTokenizer:
    """Record of a saved tokenizer, from the metadata of its folder."""

    folder: Path
    """Folder of its files."""
    library: str
    """Name in ``TOKENIZER_LIBRARIES``."""
    name: str | None
    """Name that the library takes instead of a path; None for a path."""
    options: Mapping[str, Any]
    """Constructor options."""
    option_files: Mapping[str, str]
    """Files of the folder by the option that takes their path."""
    special_tokens: Mapping[str, str]
    """Name of each special token by ``bos_token`` ..."""
    fingerprint: str
    """Fingerprint of the vocabulary."""
    files: Mapping[str, Mapping[str, Any]]
    """Hash and size of each file."""

    @classmethod
    def read(cls, metadata: Mapping[str, Any], folder: Path) -> SavedTokenizer | None:
        """The record in checked ``metadata``; None where they have none.

        Raises:
            TokenizerError: The record is of a newer release, or incomplete.
        """
        assets = metadata.get(ASSETS_KEY)
        if assets is None:
            return None
        where = folder / METADATA_FILE
        try:
            version = assets["version"]
            if version > ASSETS_VERSION:
                raise TokenizerError(
                    "the tokenizer was saved by a newer release",
                    got=f"version {version} of the assets",
                    expected=f"at most {ASSETS_VERSION}",
                    fix="upgrade megatron-ext",
                    where=where,
                )
            _check_names([*assets["files"], *assets["option_files"].values()])
            return cls(
                folder=folder,
                library=library_of(metadata["library"]).library,
                name=assets["name"],
                options=dict(assets["options"]),
                option_files=dict(assets["option_files"]),
                special_tokens=dict(assets["special_tokens"]),
                fingerprint=assets["fingerprint"],
                files={name: dict(row) for name, row in assets["files"].items()},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, TokenizerError):
                raise
            raise TokenizerError(
                "the record of the saved tokenizer is malformed",
                got=repr(error),
                fix=_FIX,
                where=where,
            ) from error

    def load(
        self,
        kind: type[MegatronTokenizerText],
        metadata: Mapping[str, Any],
        given_path: str | os.PathLike[str] | None,
        given_options: Mapping[str, Any],
    ) -> MegatronTokenizerText:
        """Rebuild the tokenizer, and verify it against the record.

        Args:
            kind: Class of the tokenizer.
            metadata: Checked metadata of the folder.
            given_path: Path that the caller names; None where only the metadata were named.
            given_options: Options that override saved ones.

        Raises:
            TokenizerError: A file or the tokenizer differs from what was saved.
        """
        self._check_files()
        path: str | os.PathLike[str] | None = self.folder if given_path is None else given_path
        if not TOKENIZER_LIBRARIES[self.library].reads_file:
            path = None
        elif self.name is not None:
            path = self.name
        config = dict(metadata)
        if PROMPT_FILE in self.files:
            # The folder may have moved.
            config["prompt_format"] = f"file:{self.folder / PROMPT_FILE}"
        in_folder = {option: str(self.folder / name) for option, name in self.option_files.items()}
        options = {**self.options, **in_folder, **given_options}
        tokenizer = kind(path=path, config=config, **options)
        # An option of the library that the caller overrides may give another vocabulary.
        if not given_options.keys() & tokenizer.options.keys():
            self._check(tokenizer)
        return tokenizer

    def _check_files(self) -> None:
        """Verify size and hash of every file."""
        for name, expected in self.files.items():
            file = self.folder / name
            with refused_by_system(
                "a file of the saved tokenizer is missing",
                expected=f"{expected.get('bytes')} bytes",
                fix=_FIX,
                where=file,
                kind=TokenizerError,
            ):
                actual = digest(file.read_bytes())
            if actual != expected:
                raise TokenizerError(
                    "the file differs from the one that was saved",
                    got=_text(actual),
                    expected=_text(expected),
                    fix=_FIX,
                    where=file,
                )

    def _check(self, tokenizer: MegatronTokenizerText) -> None:
        """Verify that the tokenizer that was built is the one that was saved."""
        read = set(file_names(tokenizer).values())
        for what, actual, expected in (
            ("fingerprint of the vocabulary", tokenizer.fingerprint(), self.fingerprint),
            ("special tokens", dict(tokenizer.special_token_names), self.special_tokens),
            ("files", sorted(read), sorted(self.files.keys() - {PROMPT_FILE})),
        ):
            if actual != expected:
                raise TokenizerError(
                    f"the tokenizer is not the one that was saved: its {what} differ",
                    got=actual,
                    expected=expected,
                    fix=_FIX,
                    where=self.folder,
                )


def load_saved(
    kind: type[MegatronTokenizerText], folder: str | os.PathLike[str]
) -> MegatronTokenizerText:
    """A tokenizer of class ``kind`` from a folder of ``save_pretrained``.

    Raises:
        TokenizerError: The folder holds no saved tokenizer, or one that differs from its record.
    """
    metadata = read_metadata(metadata_file(folder))
    saved = SavedTokenizer.read(metadata, Path(folder))
    if saved is None:
        raise TokenizerError("the folder holds no saved tokenizer", fix=_FIX, where=folder)
    return saved.load(kind, metadata, folder, {})


def _check_names(names: Iterable[str]) -> None:
    """Refuse names that lead out of the folder."""
    for name in names:
        inside = name.removeprefix(f"{TEMPLATE_FOLDER}/")
        if Path(inside).name != inside:
            raise ValueError(f"{name!r} is not a name of a file in the folder")


def _text(row: Mapping[str, Any]) -> str:
    return f"{row.get('bytes')} bytes with SHA-256 {row.get('sha256')}"
