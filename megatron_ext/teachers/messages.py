"""Messages between a student and a teacher's server: greeting, requests and targets.

A student first asks for the server's greeting by an action, ``hello``. It then opens a stream, on
which the server sends ``offers`` of channels first and ``beat`` every second; the student chooses a
channel and sends ``ready``. It sends ``request`` and ``head``, answered in order by ``answer`` and
``head``. An answer in shared memory is copied, and its memory ``returned``. A server that has to
leave sends ``error`` with the reason, a student ``bye``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from megatron_ext.errors import ConfigError, DistributedError
from megatron_ext.teachers.base import TokenRows
from megatron_ext.teachers.flight import Frame, bytes_of
from megatron_ext.teachers.formed_targets import (
    PRECISION_DTYPES,
    Fields,
    filler,
    from_records,
    to_records,
)
from megatron_ext.teachers.server_limits import ServerLimits
from megatron_ext.teachers.target_form import FormKind, TargetForm

PROTOCOL: Final = 2
"""Version of the protocol, raised by every incompatible change."""

HELLO: Final = "hello"
OFFERS: Final = "offers"
READY: Final = "ready"
REQUEST: Final = "request"
ANSWER: Final = "answer"
RETURNED: Final = "returned"
HEAD: Final = "head"
BEAT: Final = "beat"
ERROR: Final = "error"
BYE: Final = "bye"

BEAT_S: Final = 1.0
"""Seconds between a server's heartbeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A server's greeting: the teacher that it serves."""

    teacher: str
    """Name of the teacher in the server's configuration."""

    form: TargetForm

    identity: Mapping[str, str | int]
    """Values that the targets depend on, by their names in error messages."""

    protocol: int = PROTOCOL

    def values(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "protocol": self.protocol,
            "teacher": self.teacher,
            "form": self.form.values(),
            "identity": dict(self.identity),
        }

    @classmethod
    def of(cls, values: Mapping[str, Any], *, where: str) -> Hello:
        """The inverse of ``values``.

        Raises:
            ConfigError: The version of the protocol differs.
        """
        if values.get("protocol") != PROTOCOL:
            raise ConfigError(
                "the teacher's server speaks another version of the protocol",
                where=where,
                got=values.get("protocol"),
                expected=PROTOCOL,
                fix="run the same version of megatron-ext on both sides",
            )
        return cls(
            teacher=str(values["teacher"]),
            form=TargetForm(**values["form"]),
            identity=dict(values["identity"]),
        )

    def check(
        self, *, form: TargetForm, identity: Mapping[str, str | int], name: str, where: str
    ) -> None:
        """Check that this is the teacher that a run is configured for.

        Args:
            form: Form of the targets that the run reads.
            identity: Values that must be equal, by name; the server may have more.
            name: Name of the teacher in the run.

        Raises:
            ConfigError: A value differs.
        """
        differences = [
            (f"another {key}", self.identity.get(key), value) for key, value in identity.items()
        ]
        differences += [
            ("another vocabulary", self.form.vocab_size, form.vocab_size),
            ("targets of another form", str(self.form), str(form)),
        ]
        for what, got, expected in differences:
            if got != expected:
                raise ConfigError(
                    f"the server of teacher {name} has {what}",
                    where=where,
                    got=_short(got),
                    expected=_short(expected),
                    fix="start the server with the configuration of this run",
                )


def _short(value: object) -> str:
    """A value as text, with hashes abbreviated."""
    text = "none" if value is None else str(value)
    is_hash = len(text) >= 40 and all(digit in "0123456789abcdef" for digit in text)
    return text[:12] if is_hash else text


PADDING: Final = 1024
"""Most positions behind the text of a row, whose length context parallelism divides evenly."""


class Request(NamedTuple):
    """Request for the targets of microbatches."""

    number: int
    """Number that the answer repeats."""

    rows: Sequence[TokenRows]

    def to_frame(self, kind: FormKind) -> Frame:
        """Encode the request with 4 bytes an id; labels are included if the form needs them."""
        tensors: dict[str, torch.Tensor] = {}
        for index, rows in enumerate(self.rows):
            parts = {
                "tokens": rows.tokens,
                "position_ids": rows.position_ids,
                "labels": None if kind == "hidden" else rows.labels,
                "cu_seqlens": rows.cu_seqlens,
            }
            tensors |= {
                f"{name}/{index}": part.to(torch.int32)
                for name, part in parts.items()
                if part is not None
            }
        return Frame(REQUEST, {"number": self.number, "count": len(self.rows)}, tensors)

    @classmethod
    def of(cls, frame: Frame, kind: FormKind, limits: ServerLimits | None = None) -> Request:
        """Decode a request.

        Args:
            limits: Largest request; the usual ones when left out.

        Raises:
            DistributedError: The frame is no request for targets of this kind, or is too large.
        """
        limits = limits or ServerLimits()
        number = _whole_number(frame, "number", 2**53)
        count = _whole_number(frame, "count", limits.microbatches)
        tensors = dict(frame.tensors)
        rows = [_rows(tensors, index, kind, limits) for index in range(count)]
        if tensors:
            raise _not_understood(f"another tensor {next(iter(tensors))[:40]!r}")
        tokens = sum(its.tokens.numel() for its in rows)
        _check_most("positions of a request", tokens, limits.tokens)
        return cls(number, rows)

    def check(self, vocab_size: int) -> None:
        """Check ids, since a GPU does not survive an id out of the vocabulary.

        Raises:
            DistributedError: An id is not the teacher's.
        """
        for rows in self.rows:
            first, last = int(rows.tokens.min()), int(rows.tokens.max())
            if first < 0 or last >= vocab_size:
                raise DistributedError(
                    "a student asked for targets of tokens that the teacher does not have",
                    got=f"an id of {first if first < 0 else last}",
                    expected=f"0 to {vocab_size - 1}",
                )
            if rows.labels is not None:
                _check_most("id of a label", int(rows.labels.max()), vocab_size - 1)


def _not_understood(got: str) -> DistributedError:
    return DistributedError(
        "a student asked for targets in a way that cannot be understood", got=got
    )


def _check_most(what: str, got: int, most: int) -> None:
    if got > most:
        raise DistributedError(
            f"a student asked the teacher's server for too much: {what}",
            got=got,
            expected=f"{most} at most",
            fix="start the server with the configuration of this run",
        )


def _whole_number(frame: Frame, name: str, most: int) -> int:
    value = frame.values.get(name)
    if type(value) is not int or value < 0:
        raise _not_understood(f"{name} {str(value)[:40]}")
    _check_most(name, value, most)
    return value


def _rows(
    tensors: dict[str, torch.Tensor], index: int, kind: FormKind, limits: ServerLimits
) -> TokenRows:
    """The tensors of a microbatch, which are taken out of ``tensors``."""
    names = ["tokens", "position_ids", *(() if kind == "hidden" else ("labels",))]
    found = {name: tensors.pop(f"{name}/{index}", None) for name in names}
    tokens = found["tokens"]
    for name, part in found.items():
        if part is None or tokens is None:
            raise _not_understood(f"no {name} of microbatch {index}")
        _check_ids(part, name)
        if part.dim() != 2 or not part.numel() or part.shape != tokens.shape:
            raise _not_understood(f"{name} of shape {list(part.shape)}")
        _check_most("rows of a microbatch", part.shape[0], limits.rows)
        _check_most("positions of a row", part.shape[1], limits.length + PADDING)
    parts = {name: part.long() for name, part in found.items() if part is not None}
    first, last = int(parts["position_ids"].min()), int(parts["position_ids"].max())
    if first < 0:
        raise _not_understood(f"a position {first}")
    _check_most("position", last, limits.length + PADDING)
    bounds = tensors.pop(f"cu_seqlens/{index}", None)
    if bounds is not None:
        _check_bounds(bounds, parts["tokens"].numel())
    return TokenRows(
        tokens=parts["tokens"],
        position_ids=parts["position_ids"],
        labels=parts.get("labels"),
        cu_seqlens=bounds,
    )


def _check_ids(part: torch.Tensor, name: str) -> None:
    if part.dtype not in (torch.int32, torch.int64):
        raise _not_understood(f"{name} of dtype {part.dtype}")


def _check_bounds(bounds: torch.Tensor, positions: int) -> None:
    _check_ids(bounds, "cu_seqlens")
    if bounds.dim() != 1 or not 0 < len(bounds) <= positions + 2:
        raise _not_understood(f"cu_seqlens of shape {list(bounds.shape)}")
    is_rising = bool((bounds[1:] >= bounds[:-1]).all())
    if not is_rising or int(bounds[0]) < 0 or int(bounds[-1]) > positions:
        raise _not_understood("cu_seqlens that are not bounds of texts")


def payload_of(fields: Fields, form: TargetForm) -> torch.Tensor:
    """uint8 [B * T * R] bytes of fields [B, T, ...].

    Hidden states stay on their device; other forms become records on the CPU.

    Raises:
        LossError: A number cannot be stored; see ``to_records``.
    """
    if form.kind == "hidden":
        return bytes_of(fields["hidden"].to(PRECISION_DTYPES[form.precision]))
    flat = {name: values.flatten(0, 1).cpu() for name, values in fields.items()}
    return torch.from_numpy(to_records(flat, form)).flatten()


def fields_of(payload: torch.Tensor, form: TargetForm, shape: Sequence[int]) -> Fields:
    """The inverse of ``payload_of``; hidden states are a view of the payload.

    Args:
        shape: (B, T).
    """
    if form.kind == "hidden":
        return {"hidden": payload.view(PRECISION_DTYPES[form.precision]).view(*shape, form.count)}
    records = payload.numpy().reshape(-1, form.bytes_per_token)
    return {
        name: values.unflatten(0, tuple(shape))
        for name, values in from_records(records, form).items()
    }


def empty_fields(form: TargetForm, shape: Sequence[int], device: torch.device) -> Fields:
    """Uninitialised fields of the shapes and dtypes of ``fields_of``."""
    few = filler(form, 0)
    return {
        name: torch.empty(*shape, *values.shape[1:], dtype=values.dtype, device=device)
        for name, values in few.items()
    }


def payload_size(form: TargetForm, shape: Sequence[int]) -> int:
    """Bytes of the payload of ``shape`` = (B, T)."""
    return math.prod(shape) * form.bytes_per_token
