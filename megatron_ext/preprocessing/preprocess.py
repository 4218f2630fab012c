"""The steps of ``megatron-ext tokenize``: plan, make shards, join them."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from itertools import chain

from megatron_ext.documents.record_fields import BadRecordError
from megatron_ext.documents.records import check_fields, check_first_records
from megatron_ext.documents.source_file import find_sources
from megatron_ext.documents.worker_pool import WorkerPool, usable_cores
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.imports import missing_package
from megatron_ext.preprocessing.config import PreprocessConfig, with_settled_schema
from megatron_ext.preprocessing.document_encoder import document_encoder
from megatron_ext.preprocessing.indexed_output import assemble
from megatron_ext.preprocessing.report import ProgressBar, Report
from megatron_ext.preprocessing.shard import ShardMaker
from megatron_ext.preprocessing.work_folder import Plan, WorkFolder
from megatron_ext.tokenizers import MegatronTokenizerText, build_tokenizer


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
