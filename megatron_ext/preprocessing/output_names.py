"""The files that a run writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import ConfigError

DOCUMENT = "document"
LOSS_MASK = "loss_mask"


def loss_mask_prefix(document_prefix: str) -> str:
    """Prefix of the loss mask that belongs to the tokens under ``document_prefix``.

    Raises:
        ConfigError: The prefix is not one that we give to tokens.
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
    """Names below one prefix.

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
        """What was read, written and left out."""
        return self.prefix.with_name(f"{self.prefix.name}_report.json")

    @property
    def work_folder(self) -> Path:
        """Where the parts lie until they are put together."""
        return self.prefix.with_name(f"{self.prefix.name}.parts")

    def datasets(self) -> Iterator[tuple[str, Path]]:
        """Name of each dataset among the parts, and its prefix in the output."""
        for name in self.dataset_names():
            yield name, self.prefix.with_name(f"{self.prefix.name}_{name}")

    def dataset_names(self) -> Iterator[str]:
        """``KEY_document`` and, with masks, ``KEY_loss_mask`` for each key."""
        for key in self.keys:
            yield f"{key}_{DOCUMENT}"
            if self.has_loss_mask:
                yield f"{key}_{LOSS_MASK}"

    def existing(self) -> list[Path]:
        """Files of the output that are there already."""
        ends = (".bin", ".idx")
        files = [Path(f"{prefix}{end}") for _, prefix in self.datasets() for end in ends]
        return [file for file in (*files, self.report) if file.exists()]

    def is_own(self, file: Path) -> bool:
        """Whether ``file`` is a report or lies among the parts."""
        own, resolved = self.work_folder.resolve(), file.resolve()
        return resolved == self.report.resolve() or own in resolved.parents
