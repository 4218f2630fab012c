"""Options of a transfer, and the report that lies beside its model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron_ext.constants import __version__
from megatron_ext.errors import ConfigError
from megatron_ext.transfer.shares import TransferMethod


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """Options of a transfer."""

    method: TransferMethod = "fvt"
    donor: Path | None = None
    """Folder of a model with the new vocabulary, for ``omp``."""

    hypernet: Path | None = None
    """Folder of a hypernetwork that was trained for the model, for ``hypernet``."""

    k: int = 64
    """Anchors of each row of ``omp``."""

    calibrates_norms: bool = False
    """Whether rows that are no copies get the mean norm of the old ones."""

    unties: bool = False
    """Whether a tied head becomes a matrix of its own, by the rule of heads."""

    pad_to_multiple_of: int = 1
    """The model's rows are a multiple of this; rows beyond the ids are zero."""

    projection: Path | None = None
    """File with the shares of old tokens in new ones, in place of a method's."""

    keeps_digits: bool = False
    """Whether numbers are cut as the old tokenizer cuts them; changes the new tokenizer."""

    max_shard_bytes: int = 5 * 10**9

    def __post_init__(self) -> None:
        if (self.method == "omp") != (self.donor is not None):
            raise ConfigError(
                "omp reads a donor, and no other method does",
                where="--donor",
                got=f"--method {self.method} and {self.donor or 'no donor'}",
                fix="name a model with the new vocabulary, or another method",
            )
        if (self.method == "hypernet") != (self.hypernet is not None):
            raise ConfigError(
                "hypernet reads a hypernetwork, and no other method does",
                where="--hypernet",
                got=f"--method {self.method} and {self.hypernet or 'no hypernetwork'}",
                fix="name one of transfer train-hypernet, or another method",
            )
        if self.hypernet is not None and self.calibrates_norms:
            raise ConfigError(
                "a hypernetwork predicts norms, too",
                where="--calibrate-norms",
                got="--method hypernet",
                fix="leave it out",
            )
        if self.pad_to_multiple_of < 1:
            raise ConfigError(
                "rows cannot be padded to that",
                where="--pad-to-multiple-of",
                got=self.pad_to_multiple_of,
                expected="1 or more",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """What the rows of a new vocabulary are; written beside the model."""

    method: str
    old_vocabulary: str
    new_vocabulary: str
    """Fingerprints of the tokenizers."""

    old_ids: int
    old_rows: int
    """Rows of the old model, padding included."""

    new_ids: int
    new_rows: int
    copied: int
    """Tokens with the row that their bytes, name or role had."""

    combined: int
    """Tokens whose rows are combinations of old ones."""

    means: list[str]
    """Tokens that are the mean of all."""

    is_tied: bool
    """Whether one matrix is embedding and head."""

    stop_ids: list[int]
    lost_stop_ids: list[int]
    """Old stop tokens that no new token stands for."""

    dropped_generation_keys: list[str]
    """Keys of the generation config that named old ids."""

    unusual_rows: list[str] = field(default_factory=list)
    """Tokens of ``omp`` that are far longer in the model than in the donor."""

    builder: str = f"megatron-ext {__version__}"
