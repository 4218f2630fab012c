"""How long every conversation of a data set is: the one pass over all of it.

R records, C conversations.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_ext.conversation.rendering.template_clock import stopped_at
from megatron_ext.errors import ConversationError, DataError, TokenizerError
from megatron_ext.preprocessing.tokenizer_identity import tokenizer_identity
from megatron_ext.training.sft.cache import Arrays, CachedArrays, Notes, cached_arrays
from megatron_ext.training.sft.reader import SFTReader
from megatron_ext.training.sft.report import SFTReport
from megatron_ext.training.sft.sample import SFTSample
from megatron_ext.version import __version__

_FORMAT: Final = 1
"""Of the arrays; another one makes every survey anew."""

_WITHOUT_INFLUENCE: Final = ("packing", "shuffle", "conversation_schema", "workers")
"""Settings that change nothing here. The schema that was found is in the records' identity."""

_RECORDS_AT_ONCE: Final = 256
_SECONDS_UNTIL_PROGRESS: Final = 5.0
_SECONDS_BETWEEN_LINES: Final = 10.0

Block = tuple[NDArray[np.int64], SFTReport]
"""Record, piece, length and number of trained positions of kept conversations [C, 4]; counts."""


def survey(reader: SFTReader, records: NDArray[np.integer[Any]]) -> CachedArrays:
    """Where each conversation is and how long, in the order of the records; computed once.

    Args:
        reader: The data set.
        records: Numbers of the records to read [R].

    Returns:
        ``record``, ``piece``, ``length`` (once it is cut) and ``trained`` [C]; noted with them are
        the ``report`` and the ``moment`` that templates took for now.

    Raises:
        DataError: A record is refused (with file and line).
    """
    config = asdict(reader.config)
    key = {
        "kind": "survey",
        "version": f"{__version__}, {_FORMAT}",
        **reader.records.identity,
        "records": hashlib.sha256(records.astype(np.int64).tobytes()).hexdigest(),
        "tokenizer": tokenizer_identity(reader.tokenizer),
        "config": {name: config[name] for name in config if name not in _WITHOUT_INFLUENCE},
        "sequence_length": reader.sequence_length,
    }

    def build() -> tuple[Arrays, Notes]:
        moment = datetime.now().replace(microsecond=0)
        rows, report = _all_blocks(reader, records, moment)
        columns = dict(zip(("record", "piece", "length", "trained"), rows.T, strict=True))
        return columns, {"moment": moment.isoformat(), "report": asdict(report)}

    return cached_arrays(reader.records.cache_folder, key, build)


def _all_blocks(reader: SFTReader, records: NDArray[np.integer[Any]], moment: datetime) -> Block:
    rows: list[NDArray[np.int64]] = [np.zeros((0, 4), np.int64)]
    total = SFTReport()
    progress = tqdm(
        total=len(records),
        desc="conversations",
        unit=" records",
        delay=_SECONDS_UNTIL_PROGRESS,
        mininterval=_SECONDS_BETWEEN_LINES,
    )
    pieces = np.split(records, range(_RECORDS_AT_ONCE, len(records), _RECORDS_AT_ONCE))
    with progress, _mapped(reader, moment) as mapped:
        for block, report in mapped(pieces):
            rows.append(block)
            total = total + report
            progress.update(report.records)
    return np.concatenate(rows), total


_Mapped = Callable[[Iterable[NDArray[np.integer[Any]]]], Iterator[Block]]


@contextmanager
def _mapped(reader: SFTReader, moment: datetime) -> Iterator[_Mapped]:
    """``map`` of ``_Surveyor``, over the processes that the settings ask for."""
    surveyor = _Surveyor(reader, moment)
    if reader.config.workers == 1:
        yield lambda pieces: map(surveyor, pieces)
        return
    # Forked, because not every tokenizer can be sent to another process.
    context = multiprocessing.get_context("fork")
    with context.Pool(reader.config.workers, _set_surveyor, (surveyor,)) as pool:
        yield lambda pieces: pool.imap(_survey, pieces)


_surveyor: _Surveyor


def _set_surveyor(surveyor: _Surveyor) -> None:
    global _surveyor
    _surveyor = surveyor


def _survey(records: NDArray[np.integer[Any]]) -> Block:
    return _surveyor(records)


class _Surveyor:
    """Reads records and counts."""

    def __init__(self, reader: SFTReader, moment: datetime) -> None:
        self._reader = reader
        self._config = reader.config
        self._moment = moment

    def __call__(self, records: NDArray[np.integer[Any]]) -> Block:
        report = SFTReport(records=len(records))
        with stopped_at(self._moment):
            rows = list(self._rows(records, report))
        return np.array(rows, np.int64).reshape(-1, 4), report

    def _rows(
        self, records: NDArray[np.integer[Any]], report: SFTReport
    ) -> Iterator[tuple[int, int, int, int]]:
        for record in records.tolist():
            for piece, whole in enumerate(self._samples(record, report)):
                report.conversations += 1
                sample = None if whole is None else self._fitting(record, whole, report)
                if sample is not None and sample.trained_count:
                    yield record, piece, len(sample), sample.trained_count
                elif whole is None or sample is not None:
                    was_cut = whole is not None and whole.trained_count > 0
                    self._leave_out(record, report, was_cut=was_cut)

    def _samples(self, record: int, report: SFTReport) -> list[SFTSample | None]:
        try:
            return self._reader.samples(record)
        except (DataError, ConversationError, TokenizerError) as error:
            place = self._reader.records.place(record)
            if self._config.bad_records == "refuse":
                raise DataError(str(error), where=place) from error
            report.bad_records += 1
            report.add_place("bad record", f"{place}: {error}")
            return []

    def _fitting(self, record: int, whole: SFTSample, report: SFTReport) -> SFTSample | None:
        """A conversation that fits, or None where it is left out for its length."""
        limit = self._reader.sequence_length
        if len(whole) <= limit:
            return whole
        place = self._reader.records.place(record)
        if self._config.too_long == "refuse":
            raise DataError(
                "the conversation is longer than a sample",
                got=f"{len(whole)} tokens",
                expected=f"at most {limit}",
                fix="raise the sequence length, or set too_long to truncate-right",
                where=place,
            )
        report.too_long += 1
        report.add_place("too long", f"{place}: {len(whole)} tokens")
        if self._config.too_long == "drop":
            report.dropped_tokens += len(whole)
            return None
        sample = self._reader.cut(whole)
        report.dropped_tokens += len(whole) - len(sample)
        return sample

    def _leave_out(self, record: int, report: SFTReport, *, was_cut: bool) -> None:
        place = self._reader.records.place(record)
        if self._config.untrained == "refuse":
            raise DataError(
                "nothing of the conversation is trained" + (" once it is cut" if was_cut else ""),
                fix="set untrained to drop" + (", or raise the sequence length" if was_cut else ""),
                where=place,
            )
        report.untrained += 1
        report.untrained_by_cut += was_cut
        report.add_place("nothing to train", place + (" once it is cut" if was_cut else ""))
