"""Tensors in safetensors files, and those that make a quantised one together.

What makes a tensor ``NAME`` of quantised weights, by ``quant_method`` of ``config.json``:

    fp8                 NAME F8_E4M3, NAME_scale_inv, or NAME_scale of the whole tensor
    fbgemm_fp8          NAME F8_E4M3, NAME_scale of each row
    compressed-tensors  NAME F8_E4M3 or I8, or NAME_packed I32; NAME_scale, NAME_zero_point
    mxfp4               NAME_blocks U8, NAME_scales U8

A weight is (number - zero point) x factor, of one factor for each block of rows and columns: one
for all, for each row, for so many columns of a row, or for each rectangle. ``weights`` of
``config_groups`` say which there are, and the shape of the factors which one it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from megatron_ext.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Place, dtype and shape of a tensor in a safetensors file."""

    file: Path

    name: str
    """Its name there."""

    dtype: str
    """Name of the dtype in safetensors: ``BF16``, ``F32`` ...; of quantised weights one of
    ``MXFP4``, ``FP8``, ``INT8``, ``INT4`` and so on."""

    shape: tuple[int, ...]
    """Shape of the weights, whatever they are stored in."""

    scales: StoredTensor | None = None
    """Factors of the parts of a quantised one."""

    block: tuple[int, int] | None = None
    """Rows and columns with one factor; None in MXFP4."""

    bits: int | None = None
    """Bits of a number of which several are in an I32, the first in its lowest bits; None where
    each is an element."""

    zeros: StoredTensor | None = None
    """Zero points, which numbers are counted from, as many as factors."""

    @property
    def read_as(self) -> str:
        """Dtype that it is read in."""
        if self.scales is None:
            return self.dtype
        return "F16" if self.scales.dtype == "F16" else "BF16"


MXFP4: Final = "MXFP4"
"""Dtype of a tensor that two of bytes make, NAME_blocks [E, rows, groups, 16] and NAME_scales
[E, rows, groups]; its shape is that of the tensor NAME in other dtypes, [E, columns, rows]."""

_NUMBERS: Final = {"F8_E4M3": "float", "I8": "int", "I32": "int"}
"""Dtypes of quantised numbers, and the ``type`` that they have in ``config_groups``."""

_FACTORS: Final = ("F32", "BF16", "F16", "F8_E8M0")
"""Dtypes of factors."""

_PACKED: Final = "_packed"
_ZEROS: Final = "_zero_point"

_OF_ACTIVATIONS: Final = (
    *(".activation_scale", ".input_scale", ".input_zero_point", ".input_scale_ub"),
    *(".output_scale", ".output_zero_point", ".k_scale", ".v_scale", ".q_scale"),
)
"""Suffixes of tensors with which activations are rounded, which these models are read without."""

_SHAPE: Final = ".weight_shape"
"""Suffix of a tensor with the shape of packed weights."""


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How the numbers of some weights have factors."""

    kind: str
    """``float`` or ``int``"""

    bits: int

    block: tuple[int | None, int | None]
    """Rows and columns of a factor; None for all."""

    has_zeros: bool = False

    def __str__(self) -> str:
        rows, columns = (size or "all" for size in self.block)
        points = " with a zero point" * self.has_zeros
        return f"{self.kind} of {self.bits} bits by {rows} rows x {columns} columns{points}"


def joined(
    tensors: Mapping[str, StoredTensor], quantisation: object, *, where: Path
) -> dict[str, StoredTensor]:
    """Tensors with one in place of those that make a quantised one.

    Args:
        tensors: All of a checkpoint.
        quantisation: ``quantization_config`` of its ``config.json``. Those of another method than
            the ones above are left as they are.
        where: That file.

    Raises:
        CheckpointError: The configuration is of a form that is not read, or factors do not fit
            their numbers.
    """
    values = quantisation if isinstance(quantisation, dict) else {}
    method = values.get("quant_method")
    if method == "fp8":
        return _with_scaled(tensors, _fp8(values, where), where=where)
    if method == "fbgemm_fp8":
        return _with_scaled(tensors, [_Scheme("float", 8, (1, None))], where=where)
    if method == "compressed-tensors":
        return _with_scaled(tensors, [*_schemes(values, where)], where=where)
    return _with_mxfp4(tensors)


def _fp8(values: Mapping[str, Any], where: Path) -> list[_Scheme]:
    # A file without the key may be AutoFP8's, of one factor for each tensor.
    sizes = [values["weight_block_size"]] if "weight_block_size" in values else [[128, 128], None]
    for size in sizes:
        if size is not None and not _are_two_counts(size):
            raise CheckpointError(
                "the size of a block of quantised weights is unclear",
                where=where,
                got=repr(size),
                expected="rows and columns as weight_block_size, or null",
            )
    return [_Scheme("float", 8, tuple(size or (None, None))) for size in sizes]


def _are_two_counts(values: object) -> bool:
    return (
        isinstance(values, list)
        and [type(each) for each in values] == [int, int]
        and min(values) > 0
    )


_FORMATS: Final = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_MIXED: Final = "mixed-precision"


def _schemes(values: Mapping[str, Any], where: Path) -> Iterator[_Scheme]:
    """The schemes of the ``config_groups`` of compressed-tensors.

    Raises:
        CheckpointError: Weights are in a form that is not read.
    """
    sparse = _mapping(values, "sparsity_config", where).get("format", "dense")
    if sparse != "dense":
        raise _not_read(where, f"sparsity_config {sparse}", "all weights")
    if _mapping(values, "transform_config", where).get("config_groups"):
        raise _not_read(where, "transform_config", "weights that are not transformed")
    groups = _mapping(values, "config_groups", where)
    for name in groups:
        group = _mapping(groups, name, where)
        form = group.get("format") or values.get("format")
        if group.get("weights") is None:
            continue
        if form not in (*_FORMATS, _MIXED):
            raise _not_read(where, f"format {form}", " or ".join(_FORMATS))
        yield _scheme(_mapping(group, "weights", where), where)


def _mapping(values: Mapping[str, Any], key: str, where: Path) -> Mapping[str, Any]:
    """A mapping in the configuration; an empty one for null."""
    found = values.get(key)
    if found is not None and not isinstance(found, dict):
        raise _not_read(where, f"{key} {found!r}", f"{key} as an object")
    return found or {}


def _scheme(weights: Mapping[str, Any], where: Path) -> _Scheme:
    order, kind, bits = (weights.get(key) for key in ("actorder", "type", "num_bits"))
    if order in ("group", "dynamic", True):
        raise _not_read(where, f"actorder {order}", "actorder weight or null")
    block, is_symmetric = _block(weights), weights.get("symmetric", True)
    is_float = kind == "float" and bits == 8 and is_symmetric
    is_int = kind == "int" and bits in range(1, 9)
    if block is None or not (is_float or is_int):
        keys = ("type", "num_bits", "symmetric", "strategy", "group_size", "block_structure")
        raise _not_read(
            where,
            ", ".join(f"{key} {weights[key]}" for key in keys if key in weights),
            "int, or symmetric float of 8 bits, by tensor, channel, group_size or block_structure",
        )
    return _Scheme(str(kind), int(bits or 0), block, has_zeros=not is_symmetric)


def _block(weights: Mapping[str, Any]) -> tuple[int | None, int | None] | None:
    """Rows and columns with one factor; None where these are unclear."""
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy in ("tensor", "channel"):
        return (None if strategy == "tensor" else 1), None
    block = [1, size] if strategy == "group" else weights.get("block_structure")
    is_clear = strategy in ("group", "block") and _are_two_counts(block)
    return (block[0], block[1]) if is_clear and block else None


def _not_read(where: object, got: object, expected: str) -> CheckpointError:
    return CheckpointError(
        "the weights are quantised in a way that is not read",
        where=where,
        got=got,
        expected=expected,
        fix="convert it to bf16",
    )


def _with_scaled(
    tensors: Mapping[str, StoredTensor], schemes: Sequence[_Scheme], *, where: Path
) -> dict[str, StoredTensor]:
    """Tensors with one in place of numbers, their factors and zero points, without what is of
    activations.

    Raises:
        CheckpointError: A tensor without factors, or with those of another shape than its scheme's.
    """
    whole: dict[str, StoredTensor] = {}
    parts: set[str] = set()
    for key, stored in tensors.items():
        name = key.removesuffix(_PACKED)
        is_packed = stored.dtype == "I32"
        if is_packed == (name == key) or stored.dtype not in _NUMBERS or key.endswith(_ZEROS):
            continue
        if len(stored.shape) < 2:
            continue
        names = (f"{name}_scale_inv", f"{name}_scale", f"{name}{_ZEROS}")
        scales = tensors.get(names[0]) or tensors.get(names[1])
        found = {
            each
            for scheme in schemes
            if (each := _scaled(stored, scales, tensors.get(names[2]), scheme)) is not None
        }
        if len(found) != 1:
            kinds = " or of ".join(dict.fromkeys(map(str, schemes))) or "no scheme"
            raise CheckpointError(
                f"the factors of {name} do not fit it",
                where=(scales or stored).file,
                got="none" if scales is None else f"{scales.dtype} {list(scales.shape)}",
                expected=f"{' or '.join(_FACTORS)}, of {kinds}",
                fix=f"correct weight_block_size or config_groups in {where.name}, or download the "
                "weights again",
            )
        whole[name] = found.pop()
        parts |= {key, *names}
    dropped = (*_OF_ACTIVATIONS, _SHAPE)
    rest = {key: each for key, each in tensors.items() if key not in parts}
    return whole | {key: each for key, each in rest.items() if not key.endswith(dropped)}


def _scaled(
    stored: StoredTensor, scales: StoredTensor | None, zeros: StoredTensor | None, scheme: _Scheme
) -> StoredTensor | None:
    """A quantised tensor; None where its parts are not those of a scheme."""
    *others, rows, columns = stored.shape
    is_packed, bits = stored.dtype == "I32", scheme.bits
    if scales is None or scales.dtype not in _FACTORS or scheme.kind != _NUMBERS[stored.dtype]:
        return None
    if is_packed:
        # Releases differ in how numbers of other bits go on in the next I32.
        if 32 % bits:
            return None
        columns = columns * 32 // bits
    if not (rows and columns):
        return None
    high, wide = min(scheme.block[0] or rows, rows), min(scheme.block[1] or columns, columns)
    factors = (*others, -(-rows // high), -(-columns // wide))
    if not _are_alike(scales.shape, factors) or scheme.has_zeros != (zeros is not None):
        return None
    if zeros is not None:
        packed = (*others, -(-factors[-2] * bits // 32), factors[-1])
        is_fitting = (
            zeros.shape == packed
            if zeros.dtype == "I32"
            else zeros.dtype == "I8" and (_are_alike(zeros.shape, factors))
        )
        if not is_fitting:
            return None
    return replace(
        stored,
        dtype="FP8" if scheme.kind == "float" else f"INT{bits}",
        shape=(*others, rows, columns),
        scales=scales,
        block=(high, wide),
        bits=bits if is_packed else None,
        zeros=zeros,
    )


def _are_alike(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether shapes differ in dimensions of 1 alone."""
    return [size for size in shape if size != 1] == [size for size in wanted if size != 1]


def _with_mxfp4(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors with one of ``MXFP4`` in place of each two that make one."""
    whole: dict[str, StoredTensor] = {}
    parts: set[str] = set()
    for name, stored in tensors.items():
        stem = name.removesuffix("_blocks")
        scales = tensors.get(f"{stem}_scales") if stem != name else None
        if scales is not None and stored.shape == (*scales.shape, 16) and len(scales.shape) == 3:
            experts, rows, groups = scales.shape
            shape = experts, groups * 32, rows
            whole[stem] = replace(stored, dtype=MXFP4, shape=shape, scales=scales)
            parts |= {stored.name, scales.name}
    return {name: stored for name, stored in tensors.items() if name not in parts} | whole
