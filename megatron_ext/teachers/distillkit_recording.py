"""DistillKit's compressed captures, as of commit a61c2e7 (March 2026). T tokens, R rows, K kept.

A capture is Parquet files (``sample_logits_vllm``) or a saved Arrow dataset (``pack_logits``), of
rows with ``input_ids`` [T], ``compressed_logprobs`` [R, bytes] and ``bytepacked_indices``
[R, bytes]. Row ``i`` is the prediction behind ``input_ids[: i + 1]``; R is T - 1, or T where the
last id was cut off. Packed rows have ``attention_mask`` with the number of the text of each token.
``compression_config.yaml`` beside the files says how the bytes are laid out.

The K likeliest tokens are in descending order. Their ids take ``ceil(log2(d))`` bits each, the
first bit the most significant. Of their log-probabilities the bytes have, one behind the other:

- the first ``exact_k`` in ``exact_dtype``;
- the coefficients in ``term_dtype`` of a curve through the other ``K - exact_k``: the sum over
  ``polynomial_terms`` of coefficient times term, at 0, 1, ... (``normalize_t``: 0 to 1). A term is
  a power, ``sqrt`` or ``exp``;
- for each of ``residual_bins``, what the next ``num_elements`` differ from the curve: a scale in
  ``scale_dtype``, and integers of ``element_bits`` to be multiplied by it, of which
  ``-2^(element_bits - 1)`` is stored as 0; one bit is -1 or 1.

With ``delta_encoding`` all of these are differences to the token before, apart from the first.

Numbers are little-endian. Source: ``distillkit/compression`` and ``distillkit/sample_common.py`` of
arcee-ai/DistillKit; log-probabilities are vLLM's, at temperature 1 (``sample_logits_vllm.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from megatron_ext.engines.engine import Scores
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.teachers.recorded_text import RecordedText
from megatron_ext.typed_mapping import build_config

CONFIG_FILE: Final = "compression_config.yaml"

NumberName = Literal["float16", "bfloat16", "float32", "float64"]
_DTYPES: Final[Mapping[NumberName, torch.dtype]] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_COLUMNS: Final = ("input_ids", "compressed_logprobs", "bytepacked_indices")
Bytes = NDArray[np.uint8]


@dataclass(kw_only=True, frozen=True, slots=True)
class ResidualBin:
    """Quantised differences of some tokens to the curve."""

    scale_dtype: NumberName
    element_bits: int
    num_elements: int


@dataclass(kw_only=True, frozen=True, slots=True)
class CompressionConfig:
    """The content of ``compression_config.yaml``, with DistillKit's names and defaults."""

    d: int
    """Size of the vocabulary, which decides the bits of an id."""

    k: int
    exact_k: int
    exact_dtype: NumberName = "float32"
    polynomial_terms: tuple[int | str, ...] | None = None
    term_dtype: NumberName = "float32"
    residual_bins: tuple[ResidualBin, ...] = field(default=())
    delta_encoding: bool = True
    error_diffusion: bool = False
    normalize_t: bool = False

    def __post_init__(self) -> None:
        rest = self.k - self.exact_k
        if not (self.d > 0 and self.k > 0 and self.exact_k >= 0 and rest >= 0):
            raise ConfigError(
                "no such capture", got=f"d {self.d}, k {self.k}, exact_k {self.exact_k}"
            )
        if sum(each.num_elements for each in self.residual_bins) > rest:
            raise ConfigError("residual_bins have more tokens than k leaves", expected=rest)
        for term in self.polynomial_terms or ():
            if isinstance(term, str) and term not in ("sqrt", "exp"):
                raise ConfigError(
                    "no such term", got=term, expected="a power, sqrt or exp", where=CONFIG_FILE
                )
        for each in self.residual_bins:
            if not (1 <= each.element_bits <= 62 and each.num_elements > 0):
                raise ConfigError("no such bin", got=each, where=CONFIG_FILE)

    @classmethod
    def load(cls, path: Path) -> CompressionConfig:
        """Read the file.

        Raises:
            ConfigError: It is missing or no such file.
        """
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(
                "the description of a DistillKit capture cannot be read",
                where=path,
                got=error,
                fix="name it with --compression-config: it is that of the capture",
            ) from error
        return build_config(cls, values, lambda keys: f"{path}: {'.'.join(keys)}")

    @property
    def id_bits(self) -> int:
        """Bits of an id; of ``d`` in fp32, as the capture has it."""
        return math.ceil(float(np.log2(np.float32(self.d))))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of ``compressed_logprobs``."""
        size = self.exact_k * _DTYPES[self.exact_dtype].itemsize
        size += len(self.polynomial_terms or ()) * _DTYPES[self.term_dtype].itemsize
        for each in self.residual_bins:
            size += _DTYPES[each.scale_dtype].itemsize
            size += -(-each.element_bits * each.num_elements // 8)
        return size


class DistillKitRecording:
    """The ``RecordingFormat`` of DistillKit."""

    def __init__(self, config: CompressionConfig) -> None:
        self._config = config

    @property
    def most_mass(self) -> float:
        """``RecordingFormat.most_mass``.

        A curve may pass above the probabilities that it stands for. Through power laws of 50
        tokens, of which one is exact, it took sums up to 1.09.
        """
        return 1.01 if self._config.exact_k == self._config.k else 1.25

    def texts(self, record: Any, top_k: int | None) -> list[RecordedText]:
        """``RecordingFormat.texts``."""
        missing = [name for name in _COLUMNS if name not in record]
        if missing:
            raise DataError(
                "the row is not of a DistillKit capture",
                got=f"columns {list(record)[:12]}",
                expected=", ".join(_COLUMNS),
                fix="captures of the older layouts (packed_indices, top_values) are not read",
            )
        config = self._config
        if top_k is not None and top_k > config.k:
            raise DataError("the capture has fewer tokens", got=config.k, expected=top_k)
        ids = np.array(record["input_ids"], np.int64)
        width = -(-config.k * config.id_bits // 8)
        packed = _rows(record["bytepacked_indices"], width)
        stored = _rows(record["compressed_logprobs"], config.row_bytes)
        if len(packed) != len(stored) or len(ids) - len(packed) not in (0, 1):
            raise DataError(
                "the columns of the row are not of one text",
                got=f"{len(ids)} input_ids, {len(stored)} compressed_logprobs, "
                f"{len(packed)} bytepacked_indices",
                expected="as many predictions as ids, or one fewer",
            )
        kept = slice(top_k)
        top_ids = unpack_bits(packed, config.id_bits, config.k)[:, kept]
        values = decompressed(stored, config).numpy()[:, kept]
        return [
            RecordedText(ids[part], _scores(top_ids[part], values[part]))
            for part in _texts(record.get("attention_mask"), len(ids))
        ]


def _scores(top_ids: NDArray[np.int64], values: NDArray[np.float32]) -> Scores:
    # Only the K are kept; a token of the text outside them is not known.
    return Scores(np.full(len(top_ids), np.nan, np.float32), top_ids, values)


def _rows(values: Any, width: int) -> Bytes:
    """Rows [R, width] of bytes.

    Raises:
        DataError: They have another width.
    """
    try:
        rows = np.array(values, np.uint8).reshape(len(values), -1)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError("the row has no bytes of one width", got=error) from error
    if len(rows) and rows.shape[1] != width:
        raise DataError(
            "the row was not compressed as its description says",
            got=f"{rows.shape[1]} bytes a token",
            expected=width,
            fix=f"name the capture's {CONFIG_FILE} with --compression-config",
        )
    return rows.reshape(len(rows), width)


def _texts(mask: Any, length: int) -> Iterator[slice]:
    """The texts of a row, by the runs of equal numbers in its mask."""
    if mask is None:
        yield slice(0, length)
        return
    numbers = np.array(mask)
    if len(numbers) != length:
        raise DataError("attention_mask is not of the ids", got=len(numbers), expected=length)
    edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), length]
    for start, stop in pairwise(edges):
        if numbers[start]:
            yield slice(start, stop)


def unpack_bits(packed: Bytes, bits: int, count: int) -> NDArray[np.int64]:
    """Unsigned integers [R, count] of rows of bytes, the most significant bit first."""
    each = np.unpackbits(packed, axis=1)[:, : count * bits].reshape(len(packed), count, bits)
    values = np.zeros((len(packed), count), np.int64)
    for bit in range(bits):
        values = (values << 1) | each[:, :, bit]
    return values


def decompressed(rows: Bytes, config: CompressionConfig) -> torch.Tensor:
    """Log-probabilities [R, K] fp32 of rows of bytes."""
    at = 0

    def taken(count: int, name: NumberName) -> torch.Tensor:
        """The next ``count`` numbers of each row."""
        nonlocal at
        size = count * _DTYPES[name].itemsize
        part = torch.from_numpy(np.ascontiguousarray(rows[:, at : at + size]))
        at += size
        return part.view(_DTYPES[name]).view(len(rows), count)

    exact = taken(config.exact_k, config.exact_dtype)
    rest = config.k - config.exact_k
    curve = torch.zeros(len(rows), rest)
    if config.polynomial_terms:
        coefficients = taken(len(config.polynomial_terms), config.term_dtype)
        # In the precision in which the residuals were taken.
        terms = _terms(config, rest).to(coefficients.dtype)
        curve = (terms * coefficients[:, None]).sum(dim=-1).float()
    first = 0
    for each in config.residual_bins:
        scale = taken(1, each.scale_dtype).float()
        size = -(-each.element_bits * each.num_elements // 8)
        whole = unpack_bits(rows[:, at : at + size], each.element_bits, each.num_elements)
        at += size
        levels = torch.from_numpy(whole).float()
        if each.element_bits == 1:
            levels = 2 * levels - 1
        else:
            levels -= 2.0 ** (each.element_bits - 1)
        curve[:, first : first + each.num_elements] += levels * scale
        first += each.num_elements
    values = torch.cat([exact.float(), curve], dim=1)
    return values.cumsum(dim=1) if config.delta_encoding else values


def _terms(config: CompressionConfig, count: int) -> torch.Tensor:
    """Terms [count, terms] of the curve."""
    dtype = _DTYPES[config.term_dtype]
    places = torch.arange(count, dtype=dtype)
    if config.normalize_t:
        places = torch.linspace(0, 1, steps=count, dtype=dtype)
    return torch.stack(
        [
            places**term if isinstance(term, int) else getattr(places, term)()
            for term in config.polynomial_terms or ()
        ],
        dim=-1,
    )
