"""Data of a run: training sources, the collator, global batches and held-out rows.

Held-out rows are in memory, the same number for every replica. G rows of a global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain
from typing import Any

from megatron_ext.data.aligner import PackedSample
from megatron_ext.data.collator import CrossTokenizerCollator, TeacherCTSpec
from megatron_ext.data.global_batches import GlobalBatches, Replica, WeightedDataset
from megatron_ext.data.packed_dataset import PackedTextDataset, RefusedDocument
from megatron_ext.data.sampled_text import SampledTexts
from megatron_ext.documents.documents import CorpusReport, Documents
from megatron_ext.documents.id_tokenizers import IdTokenizers
from megatron_ext.errors import DataError
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.configuration.config import DistillConfig
from megatron_ext.training.run_sources import (
    Routes,
    read_documents,
    routes,
    run_sources,
    sampled_texts,
)


def make_collator(
    config: DistillConfig,
    tokenizer: MegatronTokenizerText,
    teachers: Mapping[str, tuple[MegatronTokenizerText, int]],
    *,
    append_eod: bool | None = None,
) -> CrossTokenizerCollator:
    """The collator that makes microbatches of a run; arguments as ``RunData.read``.

    Args:
        append_eod: Overrides ``data.append_eod``.
    """
    return CrossTokenizerCollator(
        tokenizer,
        config.student.seq_length,
        [
            TeacherCTSpec(name=name, tokenizer=teacher, max_length=length)
            for name, (teacher, length) in teachers.items()
        ],
        append_eod=config.data.append_eod if append_eod is None else append_eod,
        row_multiple=(
            config.training.seq_length_multiple if config.training.variable_seq_lengths else None
        ),
        filled_multiple=config.parallel.layout.sequence_multiple,
        cache_dir=config.data.alignment_cache,
    )


def summary(datasets: Sequence[PackedTextDataset]) -> dict[str, Any]:
    """Hash, sizes and faults of the data, as plain values for the user and the run's record."""
    report = _report(datasets)
    hashes = [documents.sha256 for documents in _corpora(datasets)]
    return {
        "sha256": hashes[0] if len(hashes) == 1 else sha256("".join(hashes).encode()).hexdigest(),
        "documents": report.documents,
        "bytes": report.bytes,
        "empty_rows": report.empty_rows,
        "bad_rows": report.bad_rows,
        "left_out": report.places,
    }


def _corpora(datasets: Sequence[PackedTextDataset]) -> list[Documents]:
    # Prompts may be of the same documents.
    return list({id(dataset.documents): dataset.documents for dataset in datasets}.values())


def _report(datasets: Sequence[PackedTextDataset]) -> CorpusReport:
    return sum((documents.report for documents in _corpora(datasets)), CorpusReport())


def _bad_rows(datasets: Sequence[PackedTextDataset], key: str) -> Iterator[RefusedDocument]:
    """The first rows that are no documents, and how many more there are."""
    report = _report(datasets)
    yield from (RefusedDocument(place, reason) for place, reason in report.bad)
    if report.bad_rows > len(report.bad):
        more = f"{report.bad_rows - len(report.bad):,} more rows cannot be read"
        yield RefusedDocument(key, more)


_BLANK = PackedSample(())
"""A row that predicts nothing."""


class HeldOut:
    """Rows of held-out texts, filled up with blank ones to whole global batches.

    Args:
        dataset: The texts, without an end-of-document token, so that labels are the text.
        global_batch_size: G

    Attributes:
        refused: Documents that were left out: bad ones, which ``data.bad_documents: skip`` allows,
            and conversations of which nothing is trained.

    Raises:
        DataError: No row fits the models.
    """

    def __init__(self, dataset: PackedTextDataset, *, global_batch_size: int) -> None:
        blocks = [dataset[0, block] for block in range(dataset.block_count(0))]
        self.dataset = dataset
        self.samples = list(chain.from_iterable(block.samples for block in blocks))
        self.dropped_bytes = sum(block.dropped_bytes for block in blocks)
        self.refused = [document for block in blocks for document in block.refused]
        if not self.samples:
            reasons = [f"; {first.place}: {first.reason}" for first in self.refused[:1]]
            raise DataError(
                "no held-out document can be used"
                if reasons
                else "no held-out text fits the models' sequence lengths",
                got=f"{self.dropped_bytes} bytes dropped{''.join(reasons)}",
                fix=None if reasons else "raise seq_length",
            )
        self._rows = global_batch_size

    def global_batches(self, replica: Replica) -> Iterator[list[list[PackedSample]]]:
        """The replica's microbatches of each global batch."""
        filled = -(-len(self.samples) // self._rows) * self._rows
        samples = [*self.samples, *[_BLANK] * (filled - len(self.samples))]
        for first in range(0, filled, self._rows):
            rows = [samples[first + row] for row in range(self._rows) if replica.has(row)]
            size = replica.micro_batch_size
            yield [rows[start : start + size] for start in range(0, len(rows), size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Collator, training sources and held-out rows of a run; the same on every rank."""

    collator: CrossTokenizerCollator
    """Collator of training rows."""

    sources: list[WeightedDataset]

    held_out: HeldOut | None

    config: DistillConfig

    routes: Routes = field(default_factory=dict)
    """Sources of the teachers that do not teach all."""

    texts: SampledTexts | None = None
    """Reader of prompts and of completions; None in a run without rollouts."""

    @classmethod
    def read(
        cls,
        config: DistillConfig,
        tokenizer: MegatronTokenizerText,
        teachers: Mapping[str, tuple[MegatronTokenizerText, int]],
    ) -> RunData:
        """Index the files, and tokenize the held-out texts.

        Args:
            tokenizer: The student's.
            teachers: Tokenizer and sequence length of each teacher by its name.

        Raises:
            MegatronExtError: Files that cannot be read, hold nothing, or fit no row.
        """
        collator = make_collator(config, tokenizer, teachers)
        id_tokenizers = IdTokenizers(
            student=tokenizer,
            teachers={name: teacher for name, (teacher, _) in teachers.items()},
            named=config.data.indexed_tokenizer,
        )
        sampled = sampled_texts(config, collator)
        sources = run_sources(config, collator, id_tokenizers, sampled)
        held_out = None
        if config.data.validation:
            held_out_texts = PackedTextDataset(
                read_documents(
                    config.data, config.data.validation, id_tokenizers, "data.validation"
                ),
                # Without an end-of-document token, labels are the text whose bytes are counted.
                make_collator(config, tokenizer, teachers, append_eod=False),
                shuffle=False,
                pack=False,
                refuse_bad=config.data.bad_documents == "stop",
            )
            held_out = HeldOut(held_out_texts, global_batch_size=config.training.global_batch_size)
        return cls(
            collator=collator,
            sources=sources,
            held_out=held_out,
            config=config,
            routes=routes(
                sources, {name: its.sources for name, its in config.named_teachers.items()}
            ),
            texts=sampled,
        )

    @property
    def has_student_ids(self) -> bool:
        """Whether training documents are stored as ids of the student's tokenizer."""
        return any(source.dataset.documents.has_student_ids for source in self.sources)

    def batches(self, replica: Replica) -> GlobalBatches:
        """The replica's part of all global batches, from the first one on."""
        workers = self.config.data.num_workers
        options: dict[str, Any] = {"num_workers": workers}
        if workers:
            options["multiprocessing_context"] = "forkserver"
        return GlobalBatches(
            self.sources,
            global_batch_size=self.config.training.global_batch_size,
            replica=replica,
            seed=self.config.training.seed,
            **options,
        )

    def left_out(self) -> list[RefusedDocument]:
        """What the run left out before it began, which ``data.bad_documents: skip`` allows."""
        found = list(_bad_rows([source.dataset for source in self.sources], "data.train"))
        if self.held_out:
            found += _bad_rows([self.held_out.dataset], "data.validation")
            found += self.held_out.refused
        return found

    def summary(self) -> dict[str, Any]:
        """Summaries of training and held-out text, as plain values."""
        held_out = self.held_out
        return {
            "train": summary([source.dataset for source in self.sources]),
            "validation": held_out
            and {
                **summary([held_out.dataset]),
                "rows": len(held_out.samples),
                "dropped_bytes": held_out.dropped_bytes,
                "refused": [document._asdict() for document in held_out.refused],
            },
        }
