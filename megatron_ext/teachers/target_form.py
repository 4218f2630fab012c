"""``TargetForm``: the fields stored or sent for each token, and their bytes.

A token's record has a fixed width, so that the size of a cache or an answer follows from its number
of tokens (K top-k, D hidden, V vocabulary):

- ``label``: 4 bytes of the label's log-probability and 4 of the boundary's;
- ``topk``: K ids, K numbers of ``precision``, 4 bytes of the log-normaliser and 4 of the label's
  log-probability;
- ``hidden``: D numbers of ``precision``.

The ids of a top-k take a fixed number of bytes (Elias-Fano). An id is split into
``low_bits = floor(log2(V / K))`` low bits, stored verbatim, and a high part. High parts of
ascending ids ascend, so their differences are stored in unary: the ``j``-th id sets bit
``high + j`` of ``K + ((V - 1) >> low_bits)`` bits. Together that is less than
``K (2 + log2(V / K)) + 1`` bits: 14 a token for 64 of 262,144 ids, where plain ids need 18.

Source: Elias 1974, doi 10.1145/321812.321820; Fano 1971.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from megatron_ext.errors import ConfigError

Ids = NDArray[np.int64]
Packed = NDArray[np.uint8]


def low_bits(count: int, vocab_size: int) -> int:
    """Low bits of an id that are stored verbatim."""
    return (vocab_size // count).bit_length() - 1


def packed_width(count: int, vocab_size: int) -> int:
    """Bytes of ``count`` distinct ids."""
    low, high = _widths(count, vocab_size)
    return low + high


def pack_ids(ids: Ids, vocab_size: int) -> Packed:
    """Pack rows of ids into bytes [L, ``packed_width``].

    Args:
        ids: [L, K], strictly ascending in each row.
    """
    rows, count = ids.shape
    bits = low_bits(count, vocab_size)
    low_width, high_width = _widths(count, vocab_size)
    low = np.zeros((rows, low_width * 8), np.uint8)
    low[:, : count * bits] = ((ids[..., None] >> np.arange(bits)) & 1).reshape(rows, -1)
    high = np.zeros((rows, high_width * 8), np.uint8)
    np.put_along_axis(high, (ids >> bits) + np.arange(count), 1, axis=1)
    return np.concatenate(
        [np.packbits(low, axis=1, bitorder="little"), np.packbits(high, axis=1, bitorder="little")],
        axis=1,
    )


def unpack_ids(packed: Packed, count: int, vocab_size: int) -> Ids:
    """Ascending ids [L, K] of packed rows [L, ``packed_width``]."""
    rows, bits = len(packed), low_bits(count, vocab_size)
    low_width, _ = _widths(count, vocab_size)
    low = np.zeros((rows, count), np.int64)
    if bits:
        unpacked = np.unpackbits(packed[:, :low_width], axis=1, bitorder="little")
        each = unpacked[:, : count * bits].reshape(rows, count, bits)
        for bit in range(bits):
            low |= each[..., bit].astype(np.int64) << bit
    high = np.unpackbits(packed[:, low_width:], axis=1, bitorder="little")
    places = np.nonzero(high)[1].reshape(rows, count)
    return ((places - np.arange(count)) << bits) | low


def _widths(count: int, vocab_size: int) -> tuple[int, int]:
    """Bytes of the low bits and of the high parts."""
    bits = low_bits(count, vocab_size)
    return -(-count * bits // 8), -(-(count + ((vocab_size - 1) >> bits)) // 8)


FormKind = Literal["label", "topk", "hidden"]
Precision = Literal["fp32", "fp16", "bf16"]

NUMBER_BYTES: Final[dict[Precision, int]] = {"fp32": 4, "fp16": 2, "bf16": 2}
_DEFAULTS: Final[dict[FormKind, Precision]] = {"label": "fp32", "topk": "fp16", "hidden": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetForm:
    """Form of all targets of a cache or of a remote teacher."""

    kind: FormKind
    """Kind of ``TeacherTargets``."""

    precision: Precision
    """Precision of the K logits or D hidden values; other numbers are fp32."""

    count: int
    """K of ``topk``, D of ``hidden``, 0 of ``label``."""

    vocab_size: int
    """V, size of the teacher's vocabulary."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(FormKind):
            raise ConfigError(
                "no such form of a teacher's targets",
                got=repr(self.kind),
                expected=", ".join(get_args(FormKind)),
            )
        if self.precision not in NUMBER_BYTES:
            raise ConfigError(
                "no such precision of a teacher's targets",
                got=repr(self.precision),
                expected=", ".join(NUMBER_BYTES),
            )
        if self.kind == "label" and self.precision != "fp32":
            raise ConfigError(
                "the two numbers of a label are kept in fp32", got=self.precision, expected="fp32"
            )
        if self.kind == "topk" and not 1 <= self.count <= self.vocab_size:
            raise ConfigError(
                "no such number of most probable tokens",
                got=self.count,
                expected=f"1 to {self.vocab_size}, the teacher's vocabulary",
            )

    @classmethod
    def of(
        cls,
        kind: FormKind,
        *,
        precision: Precision | None,
        top_k: int,
        hidden_size: int,
        vocab_size: int,
    ) -> TargetForm:
        """The form of a kind; ``precision`` None for the default of the kind."""
        count = {"label": 0, "topk": top_k, "hidden": hidden_size}.get(kind, 0)
        precision = precision or _DEFAULTS.get(kind, "fp32")
        return cls(kind=kind, precision=precision, count=count, vocab_size=vocab_size)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part of a record in order, by field of ``TeacherTargets``."""
        numbers = self.count * NUMBER_BYTES[self.precision]
        if self.kind == "label":
            return {"label_log_probs": 4, "boundary_log_probs": 4}
        if self.kind == "hidden":
            return {"hidden": numbers}
        return {
            "topk_ids": packed_width(self.count, self.vocab_size),
            "topk_logits": numbers,
            "log_normaliser": 4,
            "label_log_probs": 4,
        }

    @property
    def bytes_per_token(self) -> int:
        """Width of a record."""
        return sum(self.parts.values())

    def values(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        of = "" if self.kind == "label" else f" {self.count}"
        return f"{self.kind}{of} in {self.precision}"
