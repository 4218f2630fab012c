"""The conversations of each sample of an epoch, computed once and kept.

R records, C conversations, B samples.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.data.sft_packing import fill_ratio, pack
from megatron_ext.data.sft_samples import SFTReader, padded_length
from megatron_ext.data.sft_survey import SFTReport, survey
from megatron_ext.documents.cached_arrays import Arrays, CachedArrays, Notes, cached_arrays
from megatron_ext.errors import DataError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SFTPlan:
    """The samples of an epoch. It depends on the data, the tokenizer, the settings and the seed,
    and on nothing else, so every rank has the same."""

    arrays: CachedArrays
    """``record`` [C] and ``piece`` [C], which say where each conversation is, ``length`` [C], its
    tokens, all in the order of the samples; ``offsets`` [B + 1], where each sample begins."""

    @classmethod
    def of(cls, reader: SFTReader, records: NDArray[np.integer[Any]], *, seed: int) -> SFTPlan:
        """The plan for some records of a data set; one pass over them unless it is kept already.

        Args:
            reader: The data set.
            records: Numbers of the records [R].
            seed: Of the order of the conversations.

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
        """Hash of what the plan depends on."""
        return self.arrays.folder.name

    @property
    def report(self) -> SFTReport:
        """What became of the records."""
        return SFTReport(**self.arrays.notes["report"])

    @property
    def moment(self) -> datetime:
        """What templates take for now, whenever a sample is read."""
        return datetime.fromisoformat(self.arrays.notes["moment"])

    def conversations(self, sample: int) -> list[tuple[int, int, int]]:
        """Record, piece and length of each conversation of a sample."""
        start, stop = self.arrays["offsets"][sample : sample + 2].tolist()
        columns = (self.arrays[name][start:stop].tolist() for name in ("record", "piece", "length"))
        return list(zip(*columns, strict=True))

    def order(self, *, seed: int, epochs: int) -> CachedArrays:
        """``order`` [epochs * B]: the samples of each epoch, mixed anew under the seed."""
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
        # The epochs have 1, 2, 3 ... for the order of their samples.
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
