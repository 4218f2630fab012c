"""From a configuration to what is read: files, collator, global batches, held-out rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from typing import Any, Final

from megatron_ext.data.blend import read_blend
from megatron_ext.data.collator import CrossTokenizerCollator
from megatron_ext.data.global_batches import WeightedDataset
from megatron_ext.data.packed_dataset import PackedTextDataset
from megatron_ext.data.teacher_spec import TeacherCTSpec
from megatron_ext.documents.dataset import ArrowTextDataset, CorpusNames
from megatron_ext.documents.documents import Documents, JoinedDocuments
from megatron_ext.documents.id_tokenizers import IdTokenizers
from megatron_ext.documents.indexed_file import indexed_prefixes
from megatron_ext.documents.indexed_texts import IndexedTexts
from megatron_ext.documents.report import CorpusReport
from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.config import DataConfig, DistillConfig

_BLOCK_BYTES: Final = 1 << 22
_RUN_DOCUMENTS: Final = 64
_BLOCKS_A_ROW: Final = 4
"""Blocks that a corpus has at least for each row of a global batch, where it has enough text, so
that every row has a stream of its own."""


def make_collator(
    config: DistillConfig,
    tokenizer: MegatronTokenizerText,
    teachers: Mapping[str, tuple[MegatronTokenizerText, int]],
    *,
    append_eod: bool | None = None,
) -> CrossTokenizerCollator:
    """What makes microbatches.

    Args:
        config: The run.
        tokenizer: The student's.
        teachers: Tokenizer and sequence length of each teacher by its name.
        append_eod: In place of the configuration's.
    """
    return CrossTokenizerCollator(
        tokenizer,
        config.student.seq_length,
        [
            TeacherCTSpec(name=name, tokenizer=its_tokenizer, max_length=length)
            for name, (its_tokenizer, length) in teachers.items()
        ],
        append_eod=config.data.append_eod if append_eod is None else append_eod,
        row_multiple=(
            config.training.seq_length_multiple if config.training.variable_seq_lengths else None
        ),
        filled_multiple=config.parallel.layout.sequence_multiple,
        cache_dir=config.data.alignment_cache,
    )


def training_sources(
    config: DistillConfig, collator: CrossTokenizerCollator, tokenizers: IdTokenizers
) -> list[WeightedDataset]:
    """The training data by its blend.

    Args:
        config: The run.
        collator: What the samples are for.
        tokenizers: Those that may have made ids in the data.

    Raises:
        DataError: Files that cannot be read, or hold nothing.
        ConfigError: A blend that is none, or ids of an unknown tokenizer.
    """
    rows = config.training.global_batch_size
    return [
        WeightedDataset(source.weight, _dataset(config, source.paths, collator, tokenizers, rows))
        for source in read_blend(config.data.train, where="data.train")
    ]


def held_out_dataset(
    config: DistillConfig, collator: CrossTokenizerCollator, tokenizers: IdTokenizers
) -> PackedTextDataset:
    """The held-out texts in their order, each in rows of its own; as ``training_sources``."""
    documents = _documents(config.data, config.data.validation, tokenizers, "data.validation")
    refuse_bad = config.data.bad_documents == "stop"
    return PackedTextDataset(documents, collator, shuffle=False, pack=False, refuse_bad=refuse_bad)


def _dataset(
    config: DistillConfig,
    paths: Sequence[str],
    collator: CrossTokenizerCollator,
    tokenizers: IdTokenizers,
    rows: int,
) -> PackedTextDataset:
    documents = _documents(config.data, paths, tokenizers, "data.train")
    blocks = _BLOCKS_A_ROW * rows
    # Rows are filled from one block: it should hold text for some sixteen, of four bytes a token.
    least = 64 * config.student.seq_length if config.data.packing else 1
    return PackedTextDataset(
        documents,
        collator,
        seed=config.training.seed,
        block_bytes=min(_BLOCK_BYTES, max(least, int(documents.sizes.sum()) // blocks)),
        run_documents=min(_RUN_DOCUMENTS, max(1, len(documents) // (2 * blocks))),
        pack=config.data.packing,
        refuse_bad=config.data.bad_documents == "stop",
    )


def _documents(
    data: DataConfig, paths: Sequence[str], tokenizers: IdTokenizers, where: str
) -> Documents:
    """What ``paths`` hold, in their order."""
    prefixes = {path: indexed_prefixes(path) for path in paths}
    parts: list[Documents] = []
    for is_indexed, run in groupby(paths, key=lambda path: bool(prefixes[path])):
        if is_indexed:
            found = [prefix for path in run for prefix in prefixes[path]]
            parts += [_indexed(data, prefix, tokenizers, where) for prefix in found]
        else:
            parts.append(_texts(data, list(run), where))
    return parts[0] if len(parts) == 1 else JoinedDocuments(parts)


def _texts(data: DataConfig, paths: list[str], where: str) -> ArrowTextDataset:
    return ArrowTextDataset(
        paths,
        text_key=data.text_key,
        conversations=data.conversations,
        messages_key=data.messages_key,
        cache_dir=data.index_cache,
        refuse_bad=data.bad_documents == "stop",
        called=CorpusNames(
            where,
            "data.text_key",
            "data.messages_key",
            "--data-conversations (data.conversations: true)",
        ),
    )


def _indexed(data: DataConfig, prefix: str, tokenizers: IdTokenizers, where: str) -> IndexedTexts:
    if data.conversations:
        raise ConfigError(
            "a .bin with its .idx holds texts, and data.conversations asks for conversations",
            where=where,
            got=prefix,
            expected="the records that it was made of, or data.conversations false",
        )
    tokenizer = tokenizers.of(prefix)
    return IndexedTexts(
        prefix,
        tokenizer,
        are_the_students=tokenizer.fingerprint() == tokenizers.student.fingerprint(),
        cache_dir=data.index_cache,
    )


def summary(datasets: Sequence[PackedTextDataset]) -> dict[str, Any]:
    """What a user should know of the data before training on it; plain values."""
    report = sum((dataset.documents.report for dataset in datasets), CorpusReport())
    hashes = [dataset.documents.sha256 for dataset in datasets]
    return {
        "sha256": hashes[0] if len(hashes) == 1 else sha256("".join(hashes).encode()).hexdigest(),
        "documents": report.documents,
        "bytes": report.bytes,
        "empty_rows": report.empty_rows,
        "bad_rows": report.bad_rows,
    }
