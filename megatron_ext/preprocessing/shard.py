"""``ShardMaker``: reads and tokenizes one shard of the input, and writes its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ext.documents.id_tokenizers import DOCUMENT, LOSS_MASK
from megatron_ext.documents.record_fields import RecordBlock
from megatron_ext.documents.records import lines_before, read_records
from megatron_ext.documents.source_file import InputSlice
from megatron_ext.preprocessing.config import PreprocessConfig
from megatron_ext.preprocessing.document_encoder import DocumentEncoder, document_encoder
from megatron_ext.preprocessing.encoded_documents import EncodedDocuments, PartWriter, token_dtype
from megatron_ext.preprocessing.report import Progress, ShardRecord, SliceRecord
from megatron_ext.preprocessing.work_folder import WorkFolder
from megatron_ext.tokenizers import MegatronTokenizerText, build_tokenizer

Shard = tuple[int, tuple[InputSlice, ...]]
"""Index of a shard, and its input slices."""


@dataclass(frozen=True, slots=True)
class ShardMaker:
    """Maker of the shards of one plan.

    Attributes:
        config: Settings of the run.
        encoder: Encoder of records.
        vocab_size: Number of ids, which determines their storage type.
        plan: Digest of the plan.
    """

    config: PreprocessConfig
    encoder: DocumentEncoder
    vocab_size: int
    plan: str

    @classmethod
    def of(
        cls,
        config: PreprocessConfig,
        tokenizer: MegatronTokenizerText | None,
        plan: str,
        moment: str | None = None,
    ) -> ShardMaker:
        """Build a maker.

        Args:
            config: Settings of the run.
            tokenizer: The tokenizer; None to build it here.
            plan: Digest of the plan.
            moment: Time that templates take as the current one, in ISO 8601.

        Raises:
            ConfigError: The tokenizer does not support the settings.
        """
        if tokenizer is None:
            tokenizer = build_tokenizer(config.tokenizer)
        encoder = document_encoder(config, tokenizer, moment)
        return cls(config, encoder, tokenizer.vocab_size, plan)

    def __call__(self, shard: Shard, on_progress: Callable[[Progress], None]) -> None:
        """Read, tokenize and write one shard.

        Raises:
            DataError: The input cannot be read or, with ``strict``, a record cannot be used.
            OSError: The files of the shard cannot be written.
        """
        index, slices = shard
        names = self.config.names
        record = ShardRecord(self.plan, tokens=dict.fromkeys(names.dataset_names(), 0))
        with ExitStack() as stack:
            folder = stack.enter_context(WorkFolder(names.work_folder).new_shard(index, record))
            writers = {
                name: stack.enter_context(PartWriter(folder / name, self._dtype(name)))
                for name in names.dataset_names()
            }
            for piece in slices:
                record.slices.append(SliceRecord(piece.path))
                for block in read_records(piece, self.config.fields):
                    on_progress(self._add(piece, block, writers, record))

    def _dtype(self, dataset: str) -> np.dtype[Any]:
        is_mask = dataset.endswith(f"_{LOSS_MASK}")
        return np.dtype(np.uint8) if is_mask else token_dtype(self.vocab_size)

    def _add(
        self,
        piece: InputSlice,
        block: RecordBlock,
        writers: Mapping[str, PartWriter],
        record: ShardRecord,
    ) -> Progress:
        """Tokenize and write one block."""
        encoded = self.encoder.encode(block)
        bad = sorted((*block.bad, *encoded.bad), key=lambda bad: bad.line or 0)
        if bad and self.config.strict:
            raise bad[0].error(piece.path, lines_before(piece))
        record.add_bad(bad)
        record.slices[-1].line_count += block.line_count
        for key, documents in zip(self.config.fields.keys, encoded.documents, strict=True):
            _write(key, documents, writers, record)
        document_count = len(encoded.documents[0].sequence_counts)
        record.documents += document_count
        record.text_bytes += encoded.text_bytes
        bad_count = sum(row.rows for row in bad)
        return Progress(block.size, encoded.text_bytes, document_count, bad_count)


def _write(
    key: str,
    documents: EncodedDocuments,
    writers: Mapping[str, PartWriter],
    record: ShardRecord,
) -> None:
    """Append the documents of one key to its files, and count them."""
    lengths, trained = documents.document_lengths, documents.trained_lengths
    record.empty_documents += int((lengths == 0).sum())
    record.untrained_documents += int(((lengths > 0) & (trained == 0)).sum())
    name = f"{key}_{DOCUMENT}"
    writers[name].add(documents.ids, documents)
    record.tokens[name] += len(documents.ids)
    if documents.trained is not None:
        name = f"{key}_{LOSS_MASK}"
        writers[name].add(documents.trained, documents)
        record.tokens[name] += int(trained.sum())
