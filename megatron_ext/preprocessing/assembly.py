"""The parts of all shards to the output of a run."""

from __future__ import annotations

from megatron_ext.atomic_file import write_text
from megatron_ext.errors import DataError
from megatron_ext.preprocessing.config import PreprocessConfig
from megatron_ext.preprocessing.output_names import LOSS_MASK
from megatron_ext.preprocessing.plan import Plan
from megatron_ext.preprocessing.report import Report
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
    records = [folder.record(index, digest) for index in range(len(plan.shards))]
    report = Report.of(
        [record for record in records if record is not None],
        settings=plan.settings,
        inputs=[file.path for file in sources.files],
        skipped_files=sources.skipped,
    )
    if config.strict and report.bad:
        raise DataError(report.bad[0].problem, where=report.bad[0].place)
    problem = _emptiness(report)
    if problem is not None:
        # Nothing in it is worth taking up.
        folder.discard()
        raise problem
    _write(config, folder, len(plan.shards), vocab_size)
    write_text(config.names.report, report.to_json())
    folder.discard()
    return report


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


def _write(config: PreprocessConfig, folder: WorkFolder, shard_count: int, vocab_size: int) -> None:
    # Here, because megatron-core and torch take seconds to load and nothing else needs them.
    from megatron_ext.preprocessing.indexed_output import PendingDataset, publish

    pending: list[PendingDataset] = []
    try:
        for name, prefix in config.names.datasets():
            parts = [folder.shard(index) / name for index in range(shard_count)]
            cardinality = None if name.endswith(f"_{LOSS_MASK}") else vocab_size
            pending.append(PendingDataset.build(prefix, parts, cardinality=cardinality))
        publish(pending)
    finally:
        for dataset in pending:
            dataset.remove()
