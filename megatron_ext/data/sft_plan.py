"""The cached plan of an SFT data set: lengths of all conversations and the contents of each sample.

R records, C conversations, B samples.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.constants import __version__
from megatron_ext.conversation.rendering.template_limits import stopped_at
from megatron_ext.data.sft_packing import fill_ratio, pack
from megatron_ext.data.sft_samples import SFTReader, SFTSample, padded_length
from megatron_ext.documents.documents import ReadReport, add_place
from megatron_ext.documents.index import Arrays, CachedArrays, Notes, cached_arrays
from megatron_ext.documents.worker_pool import WorkerPool
from megatron_ext.errors import ConversationError, DataError, TokenizerError
from megatron_ext.tokenizers.identity import tokenizer_identity

_FORMAT: Final = 2
"""Version of the arrays; raising it rebuilds every survey."""
_WITHOUT_INFLUENCE: Final = ("packing", "shuffle", "conversation_schema", "workers")
"""Settings that do not change a survey. The detected schema is in the records' identity."""
_RECORDS_AT_ONCE: Final = 256
_SECONDS_UNTIL_PROGRESS: Final = 5.0
_SECONDS_BETWEEN_LINES: Final = 10.0


@dataclass(kw_only=True, slots=True)
class SFTReport(ReadReport):
    """Counts of records, conversations and tokens, with the first places of each kind of loss."""

    records: int = 0
    """Lines that were read."""
    bad_records: int = 0
    """Lines without a usable conversation, left out."""
    conversations: int = 0
    """Conversations in the good lines."""
    too_long: int = 0
    """Conversations longer than a sample, cut or left out."""
    dropped_tokens: int = 0
    """Tokens lost to ``too_long``."""
    untrained: int = 0
    """Conversations left out because nothing of them is trained."""
    untrained_by_cut: int = 0
    """Those of ``untrained`` that had trained tokens before they were cut."""
    samples: int = 0
    """Samples of one epoch."""
    tokens: int = 0
    """Tokens of one epoch, padding not counted."""
    trained_tokens: int = 0
    """Tokens of one epoch that are predicted and trained."""
    fill_ratio: float = 0.0
    """Fraction of the samples' capacity that tokens fill, 0 to 1."""
    places: dict[str, list[str]] = field(default_factory=dict)
    """``file:line`` of the first few losses by kind; of a bad record with the reason."""

    def add_place(self, kind: str, place: str) -> None:
        """Append a place in place, up to the number that a report shows of each kind."""
        add_place(self.places.setdefault(kind, []), place)

    @property
    def lost_something(self) -> bool:
        """Whether a record, a conversation or a token was left out."""
        return bool(self.bad_records or self.too_long or self.untrained)

    def __str__(self) -> str:
        lines = [
            f"{self.conversations:,} conversations in {self.records:,} records: "
            f"{self.samples:,} samples, {self.tokens:,} tokens, {self.trained_tokens:,} trained, "
            f"{self.fill_ratio:.1%} full"
        ]
        losses = (
            (self.bad_records, "bad records left out"),
            (self.too_long, f"conversations too long, {self.dropped_tokens:,} tokens lost"),
            (
                self.untrained,
                "conversations with nothing to train left out, "
                f"{self.untrained_by_cut:,} because they were cut",
            ),
        )
        lines += [f"{count:,} {what}" for count, what in losses if count]
        lines += [f"{kind}: {place}" for kind, places in self.places.items() for place in places]
        return "\n".join(lines)


Block = tuple[NDArray[np.int64], SFTReport]
"""[C, 4] record, piece, length and trained positions of the retained conversations; counts."""


def survey(reader: SFTReader, records: NDArray[np.integer[Any]]) -> CachedArrays:
    """Place and length of each conversation, in the order of the records; computed once.

    Args:
        reader: The data set.
        records: Numbers of the records to read [R].

    Returns:
        ``record``, ``piece``, ``length`` (after cutting) and ``trained`` [C]; the notes hold the
        ``report`` and the ``moment`` that templates took as the current time.

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
    from tqdm import tqdm

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
    # Forked, because not every tokenizer can be pickled.
    pool: WorkerPool[NDArray[np.integer[Any]], Block | DataError] = WorkerPool(
        make_work=lambda: _Surveyor(reader, moment),
        worker_count=reader.config.workers,
        method="fork",
    )
    with progress, closing(pool.results(pieces)) as blocks:
        for result in blocks:
            if isinstance(result, DataError):
                raise result
            block, report = result
            rows.append(block)
            total = total + report
            progress.update(report.records)
    return np.concatenate(rows), total


class _Surveyor:
    """Task of a worker: measure the conversations of some records."""

    def __init__(self, reader: SFTReader, moment: datetime) -> None:
        self._reader = reader
        self._config = reader.config
        self._moment = moment

    def __call__(
        self, records: NDArray[np.integer[Any]], on_progress: Callable[[Any], None]
    ) -> Block | DataError:
        """The block of some records. An error is returned, not raised, so that the first in the
        order of the records is reported."""
        report = SFTReport(records=len(records))
        try:
            with stopped_at(self._moment):
                rows = list(self._rows(records, report))
        except DataError as error:
            return error
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
        """The conversation, cut if need be; None where it is left out for its length."""
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


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SFTPlan:
    """The conversations of each sample of an epoch; a function of the data, the tokenizer, the
    settings and the seed, and so the same on every rank."""

    arrays: CachedArrays
    """``record`` [C] and ``piece`` [C], the place of each conversation, and ``length`` [C], its
    tokens, all in the order of the samples; ``offsets`` [B + 1], the bounds of the samples."""

    @classmethod
    def of(cls, reader: SFTReader, records: NDArray[np.integer[Any]], *, seed: int) -> SFTPlan:
        """The plan for some records of a data set; takes one pass over them unless it is cached.

        Args:
            reader: The data set.
            records: Numbers of the records [R].
            seed: Seed of the order of conversations.

        Raises:
            DataError: A record is refused (with file and line), or none is left.
        """
        conversations = survey(reader, records)
        key = {
            "kind": "plan",
            "survey": conversations.folder.name,
            "packing": reader.config.packing,
            "multiple": reader.multiple,
            "seed": seed if reader.config.shuffle else None,
        }
        return cls(
            cached_arrays(
                reader.records.cache_folder, key, lambda: _build(reader, conversations, seed)
            )
        )

    def __len__(self) -> int:
        return len(self.arrays["offsets"]) - 1

    @property
    def identity(self) -> str:
        """Hash of all that the plan depends on."""
        return self.arrays.folder.name

    @property
    def report(self) -> SFTReport:
        """Counts of the records read and left out."""
        return SFTReport(**self.arrays.notes["report"])

    @property
    def moment(self) -> datetime:
        """Time that templates take as the current one, whenever a sample is read."""
        return datetime.fromisoformat(self.arrays.notes["moment"])

    def conversations(self, sample: int) -> list[tuple[int, int, int]]:
        """Record, piece and length of each conversation of a sample."""
        start, stop = self.arrays["offsets"][sample : sample + 2].tolist()
        columns = (self.arrays[name][start:stop].tolist() for name in ("record", "piece", "length"))
        return list(zip(*columns, strict=True))

    def order(self, *, seed: int, epochs: int) -> CachedArrays:
        """``order`` [epochs * B]: the samples of each epoch, shuffled anew under the seed."""
        key = {"kind": "order", "plan": self.identity, "seed": seed, "epochs": epochs}

        def build() -> tuple[Arrays, Notes]:
            mixed = [
                np.random.default_rng((seed, 1 + epoch)).permutation(len(self)).astype(np.int32)
                for epoch in range(epochs)
            ]
            return {"order": np.concatenate(mixed)}, {}

        return cached_arrays(self.arrays.folder.parent, key, build)


def _build(reader: SFTReader, surveyed: CachedArrays, seed: int) -> tuple[Arrays, Notes]:
    """Arrays and notes of a plan over the conversations of a survey."""
    capacity = reader.sequence_length
    report = SFTReport(**surveyed.notes["report"])
    count = len(surveyed["record"])
    if not count:
        raise DataError(
            "no conversation is left to train on",
            got=str(report).replace("\n", ", "),
            where=reader.records.path,
        )
    mixed: NDArray[np.int64] = np.arange(count)
    if reader.config.shuffle:
        # Epochs use the seeds (seed, 1), (seed, 2), ... for the order of their samples.
        mixed = np.random.default_rng((seed, 0)).permutation(count)
    length, trained = surveyed["length"][mixed], surveyed["trained"]
    bins = pack(padded_length(length, reader.multiple), capacity, reader.config.packing)
    report = replace(
        report,
        samples=len(bins),
        tokens=int(length.sum()),
        trained_tokens=int(trained.sum()),
        fill_ratio=fill_ratio(bins, length, capacity),
    )
    level = logging.WARNING if report.lost_something else logging.INFO
    _log.log(level, "%s: %s", reader.records.path, report)
    members = mixed[bins.members]
    arrays: Arrays = {
        "record": surveyed["record"][members],
        "piece": surveyed["piece"][members].astype(np.int32),
        "length": surveyed["length"][members].astype(np.int32),
        "offsets": bins.offsets,
    }
    return arrays, {"moment": surveyed.notes["moment"], "report": asdict(report)}
