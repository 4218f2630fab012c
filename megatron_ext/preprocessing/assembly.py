"""The parts of all shards to the output of a run."""

from __future__ import annotations

from pathlib import Path

from megatron_ext.atomic_file import write_text
from megatron_ext.errors import DataError
from megatron_ext.preprocessing.config import PreprocessConfig
from megatron_ext.preprocessing.output_names import LOSS_MASK
from megatron_ext.preprocessing.plan import Plan
from megatron_ext.preprocessing.report import Report
from megatron_ext.preprocessing.shard_record import ShardRecord
from megatron_ext.preprocessing.source_file import SourceFiles
from megatron_ext.preprocessing.work_folder import WorkFolder


def assemble(
    config: PreprocessConfig, plan: Plan, sources: SourceFiles, *, vocab_size: int
) -> Report:
    """Write the datasets and the report of a run whose shards are all finished.

    Raises:
        DataError: The input gave nothing to train on, a part is damaged or, if the run is strict,
            a record could not be used.
        OSError: The output cannot be written.
    """
    folder, digest = WorkFolder(config.names.work_folder), plan.digest()
    report = Report.of(
        (_finished(folder, index, digest) for index in range(len(plan.shards))),
        settings=plan.settings,
        inputs=[file.path for file in sources.files],
        skipped_files=sources.skipped,
    )
    if config.strict and report.bad:
        raise DataError(report.bad[0].problem, where=report.bad[0].place)
    problem = _emptiness(report)
    if problem is not None:
        # Nothing in it is worth taking up.
        folder.finish()
        raise problem
    # Everything is made among the parts, which go with all that a killed run may leave there.
    scratch = folder.scratch()
    _write_datasets(config, folder, len(plan.shards), scratch, vocab_size)
    write_text(scratch / config.names.report.name, report.to_json())
    (scratch / config.names.report.name).replace(config.names.report)
    folder.finish()
    return report


def _finished(folder: WorkFolder, index: int, plan: str) -> ShardRecord:
    record = folder.record(index, plan)
    if record is None:
        raise DataError(
            "a finished shard has gone",
            where=folder.shard(index),
            fix="run the command again, and one at a time",
        )
    return record


def _emptiness(report: Report) -> DataError | None:
    """Why there is nothing to write, if so."""
    if not report.documents:
        first = report.bad[0] if report.bad else None
        return DataError(
            "no record of the input can be used",
            got=f"{report.bad_records} bad, the first: {first.place}: {first.problem}"
            if first is not None
            else "no records",
        )
    for name, count in report.tokens.items():
        if count:
            continue
        if name.endswith(f"_{LOSS_MASK}"):
            return DataError("no token of the input is trained", where=name)
        return DataError("the documents of the input give no tokens", where=name)
    return None


def _write_datasets(
    config: PreprocessConfig, folder: WorkFolder, shard_count: int, scratch: Path, vocab_size: int
) -> None:
    # Here, because megatron-core and torch take seconds to load and nothing else needs them.
    from megatron_ext.preprocessing.indexed_output import PendingDataset, publish

    pending = [
        PendingDataset.build(
            prefix,
            [folder.shard(index) / name for index in range(shard_count)],
            scratch,
            cardinality=None if name.endswith(f"_{LOSS_MASK}") else vocab_size,
        )
        for name, prefix in config.names.datasets()
    ]
    publish(pending)
