"""Writer of HuggingFace checkpoints with the vocabulary of another tokenizer.

Tensors are streamed: one file of them is in memory at a time (``new_tensors``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from megatron_ext.errors import ConfigError
from megatron_ext.files import copy_files
from megatron_ext.huggingface.checkpoint_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    CheckpointFiles,
    read_json,
    side_files,
)
from megatron_ext.huggingface.model_settings import family_of
from megatron_ext.huggingface.tensor_files import (
    TensorPlan,
    TensorReader,
    check_target,
    shards,
    write_checkpoint,
)
from megatron_ext.projection import SparseProjection
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.transfer.digits import digit_scheme, keep_digits
from megatron_ext.transfer.new_tensors import DTYPES, NewTensors
from megatron_ext.transfer.options import TransferOptions, TransferReport
from megatron_ext.transfer.row_sources import row_sources
from megatron_ext.transfer.shares import Shares, projection_shares
from megatron_ext.transfer.side_files import (
    check_copies,
    names_of,
    new_generation,
    new_ids,
    tokenizer_files,
)

REPORT_FILE: Final = "transfer.json"


def transfer_model(
    model: Path,
    tokenizer_folder: Path,
    output: Path,
    options: TransferOptions | None = None,
    *,
    wrap: Callable[[list[str]], Any] = list,
) -> TransferReport:
    """Write ``model`` with the vocabulary of another tokenizer to a new folder.

    Peak memory: the tensors of one output file, one old and one new matrix of the vocabulary, and
    the donor's.

    Args:
        model: Folder of a model of a supported family.
        tokenizer_folder: Folder of the new tokenizer; its files are copied.
        output: New or empty folder; renamed into place when complete.
        options: Method, donor, padding.
        wrap: Called with the names of tensors as they are written, for a progress bar.

    Raises:
        CheckpointError: The model or the donor cannot be read, has fewer rows than tokens, or the
            output cannot be written; or copied files do not give the same tokenizer.
        ConfigError: A donor of another vocabulary, or with too few anchors.
        TokenizerError: A tokenizer cannot be read.
    """
    options = TransferOptions() if options is None else options
    check_target(output)
    if not tokenizer_folder.is_dir():
        raise ConfigError(
            "the new tokenizer's files are copied",
            where="--tokenizer",
            got=tokenizer_folder,
            expected="their folder",
        )
    files = CheckpointFiles(model)
    family_of(files)
    new, old = (
        build_tokenizer(TokenizerConfig(model=str(path))) for path in (tokenizer_folder, model)
    )
    sources = row_sources(new, old)
    stated: Shares | None = None
    if options.projection is not None:
        projection = SparseProjection.load(options.projection, new, old)
        sources, stated = projection_shares(projection, sources)
    with TensorReader(files) as reader:
        tensors = NewTensors(files, reader, sources=sources, stated=stated, options=options)
        tensors.check(old.vocab_size, new)
        generation = _json_of(model / GENERATION_FILE)
        ids = new_ids(new, sources, generation or files.config)
        values, dropped = new_generation(generation or {}, ids)
        eos = ids.stops if isinstance(files.config.get("eos_token_id"), list) else None
        config = {
            **files.config,
            "vocab_size": tensors.height,
            **ids.roles,
            **({"eos_token_id": eos} if eos else {}),
            **({"tie_word_embeddings": False} if tensors.adds_head else {}),
        }
        copies = tokenizer_files(new, tokenizer_folder)
        check_copies(new, tokenizer_folder, copies, config)
        report = TransferReport(
            method=options.method,
            old_vocabulary=old.fingerprint(),
            new_vocabulary=new.fingerprint(),
            old_ids=old.vocab_size,
            old_rows=tensors.old_rows,
            new_ids=new.vocab_size,
            new_rows=tensors.height,
            copied=int((sources.copied >= 0).sum()),
            combined=0 if options.method == "mean" else len(sources.spelled),
            means=names_of(new, tensors.mean_ids()),
            is_tied=tensors.is_tied and not tensors.adds_head,
            stop_ids=ids.stops,
            lost_stop_ids=ids.lost_stops,
            dropped_generation_keys=dropped,
        )

        def write_others(folder: Path) -> None:
            copy_files(copies, folder)
            if generation is not None:
                _write(folder / GENERATION_FILE, values)
            report.unusual_rows[:] = names_of(new, tensors.unusual_ids())
            _write(folder / REPORT_FILE, asdict(report))

        write_checkpoint(
            output,
            config=config,
            files=shards(tensors.plans(), max_shard_bytes=options.max_shard_bytes),
            read=lambda plans: tensors.read(plans, wrap),
            write_others=write_others,
        )
    return report


def replace_rows(folder: Path, output: Path, rows: Mapping[str, torch.Tensor]) -> None:
    """Write a model again, with other last rows of its embedding or head.

    Args:
        folder: HuggingFace folder.
        output: New or empty folder.
        rows: [n, D] of ``embedding`` and ``head``, in place of those before the padding's.

    Raises:
        CheckpointError: The output cannot be written.
    """
    files = CheckpointFiles(folder)
    family = family_of(files)
    tensors = {"embedding": family.embedding, "head": family.head}
    new = {tensors[part]: matrix for part, matrix in rows.items()}
    ids = build_tokenizer(TokenizerConfig(model=str(folder))).vocab_size
    with TensorReader(files) as reader:

        def read(plans: list[TensorPlan]) -> dict[str, torch.Tensor]:
            read = {plan.name: reader.whole(plan.name) for plan in plans}
            for name in read.keys() & new.keys():
                read[name] = read[name].clone()
                read[name][ids - len(new[name]) : ids] = new[name].to(read[name].dtype)
            return read

        plans = [
            TensorPlan(name=name, shape=stored.shape, dtype=DTYPES[stored.dtype])
            for name, stored in files.tensors.items()
        ]
        write_checkpoint(
            output,
            config=files.config,
            files=shards(plans, max_shard_bytes=TransferOptions().max_shard_bytes),
            read=read,
            write_others=lambda target: _copy_others(folder, target),
        )


def _copy_others(folder: Path, target: Path) -> None:
    beside = side_files(folder)
    copy_files({name: beside[name] for name in beside if name != CONFIG_FILE}, target)


def transfer(
    model: Path,
    tokenizer_folder: Path | None,
    output: Path,
    options: TransferOptions,
    *,
    wrap: Callable[[list[str]], Any] = list,
) -> TransferReport:
    """``transfer_model`` to bytes, or to a folder's tokenizer with the old digits.

    Args:
        model: Folder of a model of a supported family.
        tokenizer_folder: Folder of the new tokenizer; None for the library ``byte-level``.
        output: New or empty folder.
        options: Options of the transfer.
        wrap: As of ``transfer_model``.

    Raises:
        ConfigError: The old digits cannot be kept; or an error of ``transfer_model``.
    """
    with TemporaryDirectory() as made:
        folder = tokenizer_folder
        if folder is None:
            folder = Path(made)
            build_tokenizer(TokenizerConfig(library="byte-level")).save_pretrained(folder)
        elif options.keeps_digits:
            new, old = (
                build_tokenizer(TokenizerConfig(model=str(path))) for path in (folder, model)
            )
            if digit_scheme(new) != digit_scheme(old):
                keep_digits(folder, Path(made), new=new, old=old)
                folder = Path(made)
        return transfer_model(model, folder, output, options, wrap=wrap)


def _json_of(file: Path) -> dict[str, Any] | None:
    return read_json(file) if file.is_file() else None


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
