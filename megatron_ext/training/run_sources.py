"""Sources of a run's rows: documents of its files, and prompts, with their weights and teachers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from megatron_ext.data.collator import CrossTokenizerCollator
from megatron_ext.data.global_batches import WeightedDataset
from megatron_ext.data.packed_dataset import PackedTextDataset
from megatron_ext.data.prompts import PromptDataset
from megatron_ext.data.reading_order import read_blend
from megatron_ext.data.sampled_text import SampledTexts
from megatron_ext.documents.dataset import ArrowTextDataset, CorpusNames
from megatron_ext.documents.documents import Documents, JoinedDocuments
from megatron_ext.documents.id_tokenizers import IdTokenizers
from megatron_ext.documents.indexed_file import indexed_prefixes
from megatron_ext.documents.indexed_texts import IndexedTexts
from megatron_ext.errors import ConfigError
from megatron_ext.huggingface.checkpoint_files import generation_stops
from megatron_ext.training.checkpoints.folder import (
    CHECKPOINTS,
    latest_checkpoint,
    newest_checkpoint,
)
from megatron_ext.training.configuration.config import DataConfig, DistillConfig

Routes = Mapping[str, frozenset[int]]
"""Numbers of the sources of a teacher, for those that do not teach all."""

_BLOCK_BYTES: Final = 1 << 22
_RUN_DOCUMENTS: Final = 64
_BLOCKS_A_ROW: Final = 4
"""Least number of blocks of a corpus for each row of a global batch, where it has enough text, so
that every row has a stream of its own."""


def sampled_texts(config: DistillConfig, collator: CrossTokenizerCollator) -> SampledTexts | None:
    """The reader of a run's prompts and completions; None in a run without rollouts."""
    rollouts = config.data.rollouts
    if rollouts is None:
        return None
    return SampledTexts(
        collator,
        most_ids=config.student.seq_length - rollouts.max_new_tokens,
        prompt_characters=rollouts.prompt_characters,
        trains_whitespace=rollouts.train_whitespace,
        stops=own_stops(config),
    )


def own_stops(config: DistillConfig) -> frozenset[int]:
    """Ids of the student's generation configuration, which a run keeps for when it is resumed."""
    run_dir, start = Path(config.run_dir), config.initial_checkpoint
    if latest_checkpoint(run_dir / CHECKPOINTS) is not None:
        return generation_stops(run_dir)
    return frozenset() if start is None else generation_stops(newest_checkpoint(start) or start)


def _dataset(
    config: DistillConfig,
    documents: Documents,
    collator: CrossTokenizerCollator,
    prompts: SampledTexts | None = None,
) -> PackedTextDataset:
    blocks = _BLOCKS_A_ROW * config.training.global_batch_size
    # A row is filled from one block, which should hold text for 16 rows of four bytes a token.
    is_packed = config.data.packing and prompts is None
    least = 64 * config.student.seq_length if is_packed else 1
    options: dict[str, Any] = {
        "seed": config.training.seed,
        "block_bytes": min(_BLOCK_BYTES, max(least, int(documents.sizes.sum()) // blocks)),
        "run_documents": min(_RUN_DOCUMENTS, max(1, len(documents) // (2 * blocks))),
        "pack": is_packed,
        "refuse_bad": config.data.bad_documents == "stop",
    }
    if prompts is not None:
        return PromptDataset(prompts, documents, collator, **options)
    return PackedTextDataset(documents, collator, **options)


def run_sources(
    config: DistillConfig,
    collator: CrossTokenizerCollator,
    tokenizers: IdTokenizers,
    texts: SampledTexts | None,
) -> list[WeightedDataset]:
    """Recorded texts, and prompts where there are rollouts, with their shares of the rows."""
    recorded = _entries(config.data, config.data.train, tokenizers, "data.train")
    rollouts = config.data.rollouts
    if rollouts is None or texts is None:
        return [
            WeightedDataset(weight, _dataset(config, documents, collator), paths)
            for weight, documents, paths in recorded
        ]
    asked, where = recorded, "data.rollouts.prompts"
    if rollouts.prompts:
        asked = _entries(config.data, rollouts.prompts, tokenizers, where)
    whole, total = (sum(weight for weight, _, _ in each) for each in (recorded, asked))
    sources = [
        WeightedDataset(
            weight * (1 - rollouts.share) / whole, _dataset(config, documents, collator), paths
        )
        for weight, documents, paths in recorded
        if rollouts.share < 1
    ]
    return sources + [
        WeightedDataset(
            weight * rollouts.share / total, _dataset(config, documents, collator, texts), paths
        )
        for weight, documents, paths in asked
    ]


def _entries(
    data: DataConfig, entries: Sequence[str], tokenizers: IdTokenizers, where: str
) -> list[tuple[float, Documents, tuple[str, ...]]]:
    """Weight, documents and paths of each source of a blend."""
    return [
        (source.weight, read_documents(data, source.paths, tokenizers, where), tuple(source.paths))
        for source in read_blend(entries, where=where)
    ]


def routes(sources: Sequence[WeightedDataset], taught: Mapping[str, Sequence[str]]) -> Routes:
    """The sources that each teacher with ``sources`` of its own teaches.

    Args:
        taught: Configured sources by teacher; empty for all.

    Raises:
        ConfigError: An entry is no source, or a source has no teacher.
    """
    found: dict[str, frozenset[int]] = {}
    for name, entries in taught.items():
        for entry in entries:
            if all(entry not in source.paths for source in sources):
                raise ConfigError(
                    f"the teacher {name} has a source that the run does not read",
                    where="sources",
                    got=entry,
                    expected=" or ".join(
                        dict.fromkeys(path for source in sources for path in source.paths)
                    ),
                )
            if any(entry in source.paths and len(source.paths) > 1 for source in sources):
                raise ConfigError(
                    "files without weights are one source, which has one set of teachers",
                    where="data.train",
                    got=entry,
                    fix="give each file a weight: weight path weight path",
                )
        if entries:
            found[name] = frozenset(
                number for number, s in enumerate(sources) if set(entries) & set(s.paths)
            )
    if found and len(found) == len(taught):
        for number, source in enumerate(sources):
            if not any(number in numbers for numbers in found.values()):
                raise ConfigError(
                    "no teacher teaches a source of the run",
                    where="sources",
                    got=" ".join(source.paths),
                    fix="add it to a teacher's sources, or leave out those of one teacher",
                )
    return found


def read_documents(
    data: DataConfig, paths: Sequence[str], tokenizers: IdTokenizers, where: str
) -> Documents:
    """The documents of ``paths``, in order."""
    prefixes = {path: indexed_prefixes(path) for path in paths}
    corpora: list[Documents] = []
    for is_indexed, run in groupby(paths, key=lambda path: bool(prefixes[path])):
        if is_indexed:
            corpora += [
                _indexed(data, prefix, tokenizers, where)
                for path in run
                for prefix in prefixes[path]
            ]
        else:
            corpora.append(_texts(data, list(run), where))
    return corpora[0] if len(corpora) == 1 else JoinedDocuments(corpora)


def _texts(data: DataConfig, paths: list[str], where: str) -> ArrowTextDataset:
    return ArrowTextDataset(
        paths,
        text_key=data.text_key,
        conversations=data.conversations,
        messages_key=data.messages_key,
        cache_dir=data.index_cache,
        refuse_bad=data.bad_documents == "stop",
        most_bytes=data.max_record_mib << 20,
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
