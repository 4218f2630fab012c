"""The steps of ``megatron-ext tokenize``: plan, make shards, join them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Any

import numpy as np

from megatron_ext.documents.id_tokenizers import DOCUMENT, LOSS_MASK
from megatron_ext.documents.record_fields import BadRecordError, RecordBlock
from megatron_ext.documents.records import (
    check_fields,
    check_first_records,
    lines_before,
    read_records,
)
from megatron_ext.documents.source_file import InputSlice, find_sources
from megatron_ext.documents.worker_pool import WorkerPool, usable_cores
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.imports import missing_package
from megatron_ext.preprocessing.config import PreprocessConfig, with_settled_schema
from megatron_ext.preprocessing.document_encoder import DocumentEncoder, document_encoder
from megatron_ext.preprocessing.encoded_documents import EncodedDocuments, PartWriter, token_dtype
from megatron_ext.preprocessing.indexed_output import assemble
from megatron_ext.preprocessing.report import (
    Progress,
    ProgressBar,
    Report,
    ShardRecord,
    SliceRecord,
)
from megatron_ext.preprocessing.work_folder import Plan, WorkFolder
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


def preprocess(config: PreprocessConfig) -> Report | None:
    """Tokenize the input and write the indexed datasets, resuming an unfinished run.

    Returns:
        The report; None if only some shards were requested, which are then finished.

    Raises:
        MegatronExtError: A setting or the input is at fault. Settings are checked before anything
            is written.
    """
    config, tokenizer = _with_tokenizer(config)
    _check_output(config)
    document_encoder(config, tokenizer)
    sources = find_sources(config.inputs, is_own=config.names.is_own)
    check_fields(sources.files, config.fields)
    config = with_settled_schema(config, sources.files)
    try:
        folder = WorkFolder(config.names.work_folder)
        is_new = not folder.path.exists() and not config.shard_indices
        plan = _resume_or_begin(config, Plan.make(config, tokenizer, sources.files))
        try:
            _make_missing(config, plan, tokenizer)
        except BadRecordError:
            # Nothing can go on from finished shards: the input has to change. Any other error may
            # be gone at the next start, which takes them over.
            if is_new:
                folder.discard()
            raise
        if config.shard_indices:
            return None
        return assemble(config, plan, sources, vocab_size=tokenizer.vocab_size)
    except OSError as error:
        # An error of a write to an open file lacks the name.
        place = config.names.work_folder if error.filename is None else error.filename
        raise DataError("cannot write the output", got=error.strerror, where=place) from error


def _with_tokenizer(config: PreprocessConfig) -> tuple[PreprocessConfig, MegatronTokenizerText]:
    """The configuration with the mode of the tokenizer, which may be saved with it; and it."""
    tokenizer = build_tokenizer(config.tokenizer)
    agreed = config.with_mode_of(tokenizer)
    if agreed is not config:
        # Built again: a tokenizer saved without a prompt format has none yet.
        tokenizer = build_tokenizer(agreed.tokenizer)
    return agreed, tokenizer


def _check_output(config: PreprocessConfig) -> None:
    if not config.shard_indices and not _has_megatron_core():
        raise missing_package("megatron", feature="writing .bin/.idx")
    existing = config.names.existing()
    is_unfinished = config.names.work_folder.exists()
    if existing and not is_unfinished and not config.overwrite:
        raise ConfigError(
            "the output exists already",
            where=existing[0],
            fix="pass --overwrite to replace it, or change --output-prefix",
        )


def _has_megatron_core() -> bool:
    # Not imported, which takes seconds and is needed only at the end.
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


def _resume_or_begin(config: PreprocessConfig, plan: Plan) -> Plan:
    """The plan of the unfinished run if there is one; else store ``plan`` and return it."""
    folder = WorkFolder(config.names.work_folder)
    stored = _stored_plan(config, folder, plan)
    if stored is not None:
        return stored
    check_first_records(chain.from_iterable(plan.shards), config.fields)
    with folder.lock():
        # Another process of this run may have begun meanwhile and be using the folder.
        stored = _stored_plan(config, folder, plan)
        if stored is not None:
            return stored
        folder.discard()
        folder.store_plan(plan)
    return plan


def _stored_plan(config: PreprocessConfig, folder: WorkFolder, plan: Plan) -> Plan | None:
    """The stored plan of this run; None if there is none, or one to be overwritten.

    Raises:
        ConfigError: The plan is of another run.
    """
    try:
        stored = folder.stored_plan()
        if stored is None:
            return None
        plan.check_same(stored, where=folder.path)
        if config.shard_count not in (None, len(stored.shards)):
            raise ConfigError(
                "the unfinished run was started with another number of shards",
                got=config.shard_count,
                expected=len(stored.shards),
                fix="pass --overwrite to start again, or leave --shards out",
                where=folder.path,
            )
    except ConfigError:
        if not config.overwrite:
            raise
        return None
    return stored


def _make_missing(config: PreprocessConfig, plan: Plan, tokenizer: MegatronTokenizerText) -> None:
    """Make the requested shards that are not finished."""
    folder, digest = WorkFolder(config.names.work_folder), plan.digest()
    wanted = config.shard_indices or range(len(plan.shards))
    missing = [index for index in wanted if folder.record(index, digest) is None]
    sizes = {index: sum(piece.size for piece in plan.shards[index]) for index in wanted}
    shards = [(index, plan.shards[index]) for index in missing]
    total = sum(sizes.values())
    done = total - sum(sizes[index] for index in missing)
    with ProgressBar(total=total, done=done) as bar:
        workers = min(config.workers or usable_cores(), len(missing))
        # Several workers each build their own tokenizer.
        make_maker = partial(
            ShardMaker.of, config, tokenizer if workers <= 1 else None, digest, plan.moment
        )
        pool = WorkerPool(make_work=make_maker, worker_count=workers)
        for _ in pool.results(shards, on_progress=bar.add):
            pass
