"""What a cache is recorded of, file by file: blocks of documents, each once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from megatron_ext.data.aligned_text import PackedSample
from megatron_ext.data.packed_dataset import PackedTextDataset
from megatron_ext.teachers.targets.form import TargetForm
from megatron_ext.training.data.run_data import RunData

_TOKEN_BYTES: Final = 4
"""Bytes of text in a token, roughly."""
_MOST_BYTES: Final = 1 << 22
"""Of text in a file."""
_RUN_DOCUMENTS: Final = 8


class Block(NamedTuple):
    """The texts of one file."""

    name: str
    """Of the file."""

    dataset: PackedTextDataset
    number: int

    def samples(self) -> tuple[PackedSample, ...]:
        """Its rows; tokenized now."""
        return self.dataset[0, self.number].samples


def block_bytes(form: TargetForm, file_bytes: int) -> int:
    """Least bytes of text of a file, but for the last."""
    return min(max(file_bytes // form.bytes_per_token * _TOKEN_BYTES, 1), _MOST_BYTES)


def blocks_of(data: RunData, text_bytes: int, *, stop_at_bad: bool) -> list[Block]:
    """All blocks of a run's training text, in the order of the documents.

    A text that several sources have is there once. A block is a function of the texts and
    the tokenizers, so that a recording goes on over any number of ranks.

    Args:
        text_bytes: What ``block_bytes`` returned.
        stop_at_bad: Raise the error of a document that cannot be read, as a run does.
    """
    datasets: dict[str, PackedTextDataset] = {}
    for source in data.sources:
        own = source.dataset
        datasets.setdefault(
            own.documents.sha256,
            PackedTextDataset(
                own.documents,
                own.collator,
                shuffle=False,
                block_bytes=text_bytes,
                run_documents=_RUN_DOCUMENTS,
                refuse_bad=stop_at_bad,
            ),
        )
    return list(_blocks(list(datasets.values())))


def _blocks(datasets: list[PackedTextDataset]) -> Iterator[Block]:
    for source, dataset in enumerate(datasets):
        for number in range(dataset.block_count(0)):
            yield Block(f"targets-{source:02d}-{number:06d}.bin", dataset, number)
