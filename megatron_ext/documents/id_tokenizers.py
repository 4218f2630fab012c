"""File names of an indexed dataset, and the lookup of the tokenizer that made its ids."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from megatron_ext.errors import ConfigError
from megatron_ext.files import read_json
from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig, build_tokenizer

DOCUMENT = "document"
LOSS_MASK = "loss_mask"
KEY: Final = "data.indexed_tokenizer"
STUDENT: Final = "student"


def loss_mask_prefix(document_prefix: str) -> str:
    """Prefix of the loss mask of the tokens under ``document_prefix``.

    Raises:
        ConfigError: The prefix does not end in ``_document``.
    """
    stem = document_prefix.removesuffix(f"_{DOCUMENT}")
    if stem == document_prefix:
        raise ConfigError(
            "no loss mask goes by the name of this dataset",
            where=document_prefix,
            expected=f"a prefix that ends in _{DOCUMENT}",
            fix="keep the names that megatron-ext tokenize gives",
        )
    return f"{stem}_{LOSS_MASK}"


@dataclass(frozen=True, slots=True)
class OutputNames:
    """File names of the datasets, the report and the work folder of one output prefix.

    Attributes:
        prefix: Folder and first part of the names.
        keys: The fields of the records, each of which has files of its own.
        has_loss_mask: Whether the tokens come with a loss mask.
    """

    prefix: Path
    keys: tuple[str, ...]
    has_loss_mask: bool = False

    @property
    def report(self) -> Path:
        """JSON report of what was read, written and left out."""
        return self.prefix.with_name(f"{self.prefix.name}_report.json")

    @property
    def work_folder(self) -> Path:
        """Folder of the shards until they are joined."""
        return self.prefix.with_name(f"{self.prefix.name}.parts")

    def datasets(self) -> Iterator[tuple[str, Path]]:
        """Name of each dataset, and its prefix in the output."""
        for name in self.dataset_names():
            yield name, self.prefix.with_name(f"{self.prefix.name}_{name}")

    def dataset_names(self) -> Iterator[str]:
        """``KEY_document`` and, with masks, ``KEY_loss_mask`` for each key."""
        for key in self.keys:
            yield f"{key}_{DOCUMENT}"
            if self.has_loss_mask:
                yield f"{key}_{LOSS_MASK}"

    def existing(self) -> list[Path]:
        """Output files that exist already."""
        ends = (".bin", ".idx")
        files = [Path(f"{prefix}{end}") for _, prefix in self.datasets() for end in ends]
        return [file for file in (*files, self.report) if file.exists()]

    def is_own(self, file: Path) -> bool:
        """Whether ``file`` is the report or lies in the work folder."""
        resolved = file.resolve()
        return resolved == self.report.resolve() or self.work_folder.resolve() in resolved.parents


@dataclass(slots=True)
class IdTokenizers:
    """The tokenizers of a run, looked up by the dataset whose ids they made.

    The report of ``megatron-ext tokenize`` beside a dataset records the fingerprint of the
    vocabulary. Without a report, the configuration names the tokenizer.

    Attributes:
        student: The student's.
        teachers: By name.
        named: ``data.indexed_tokenizer``: ``student``, a teacher's name, or a file or folder.
    """

    student: MegatronTokenizerText
    teachers: Mapping[str, MegatronTokenizerText]
    named: str | None = None
    _configured: MegatronTokenizerText | None = field(default=None, init=False, repr=False)

    def of(self, prefix: str) -> MegatronTokenizerText:
        """The tokenizer of the dataset at ``prefix``.

        Raises:
            ConfigError: No tokenizer of the run has the fingerprint, there is neither a report nor
                a configured tokenizer, or the dataset holds conversations.
            TokenizerError: The configured file is no tokenizer.
        """
        settings = settings_of(prefix)
        if prefix.endswith(f"_{LOSS_MASK}") or settings.get("mode") == "sft":
            raise ConfigError(
                "the dataset holds conversations, which each model reads in its own format",
                where=prefix,
                expected="texts",
                fix="give the records that it was made of, and set data.conversations",
            )
        made_with = settings.get("tokenizer_fingerprint")
        if made_with is not None:
            return self._by_fingerprint(str(made_with), prefix)
        if self.named is None:
            raise ConfigError(
                "nothing says which tokenizer made the ids",
                where=prefix,
                expected="the report of megatron-ext tokenize beside the dataset",
                fix=f"set {KEY} to {STUDENT}, a teacher or a tokenizer file",
            )
        return self._named(self.named)

    def _by_fingerprint(self, fingerprint: str, prefix: str) -> MegatronTokenizerText:
        for tokenizer in self._candidates():
            if tokenizer.fingerprint() == fingerprint:
                return tokenizer
        names = ["the student's", *(f"{name}'s" for name in self.teachers)]
        raise ConfigError(
            "the ids were made by a tokenizer that the run does not know",
            where=prefix,
            got=f"a vocabulary with fingerprint {fingerprint[:12]}",
            expected=", ".join(names if self.named is None else [*names, self.named]),
            fix=f"set {KEY} to its file",
        )

    def _candidates(self) -> Iterator[MegatronTokenizerText]:
        yield self.student
        yield from self.teachers.values()
        if self.named is not None:
            yield self._named(self.named)

    def _named(self, name: str) -> MegatronTokenizerText:
        if name == STUDENT:
            return self.student
        if name in self.teachers:
            return self.teachers[name]
        if not os.path.exists(name):
            raise ConfigError(
                "no tokenizer goes by this name",
                where=KEY,
                got=name,
                expected=f"{', '.join([STUDENT, *self.teachers])}, or a tokenizer file or folder",
            )
        if self._configured is None:
            self._configured = build_tokenizer(TokenizerConfig(model=name))
        return self._configured


def settings_of(prefix: str) -> Mapping[str, Any]:
    """Settings of the ``megatron-ext tokenize`` run that made a dataset; empty without a report.

    A dataset is ``PREFIX_KEY_document``, and the report of all keys ``PREFIX_report.json``.
    """
    path = Path(prefix)
    stem = path.name.removesuffix(f"_{DOCUMENT}")
    for at, character in enumerate(stem):
        if character != "_":
            continue
        key = stem[at + 1 :]
        report = _read_report(OutputNames(path.with_name(stem[:at]), (key,)).report) if at else {}
        settings = report.get("settings", {})
        if key in settings.get("json_keys", ()):
            return dict(settings)
    return {}


def _read_report(report: Path) -> Mapping[str, Any]:
    try:
        values = read_json(report)
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
