"""One microbatch for the student and every teacher. B rows, T label positions, G segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from megatron_ext.alignment.batch import AlignmentBatch


@dataclass(frozen=True, slots=True)
class SideBatch:
    """One model's inputs. A segment is one text, or a piece of one, in a row."""

    input_ids: torch.Tensor
    """[B, T] int64"""

    labels: torch.Tensor
    """[B, T] int64: what each position predicts, ``IGNORE_INDEX`` where nothing. Nothing is
    predicted across the end of a segment."""

    loss_mask: torch.Tensor
    """[B, T] float32: 1 where something is predicted."""

    position_ids: torch.Tensor
    """[B, T] int64, from 0 in each segment and in the padding behind the last."""

    lengths: torch.Tensor
    """[B] int64: positions of a row before its padding."""

    cu_seqlens: torch.Tensor
    """[G + 1] int32: where the segments of all rows begin and end when rows follow one another;
    the padding of a row is a segment of its own."""

    max_seqlen: int
    """Positions of the longest segment; on the host."""

    byte_count: int
    """Bytes of the texts; on the host."""

    def to(self, device: torch.device | str) -> SideBatch:
        """The same on ``device``."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> SideBatch:
        """The same in page-locked memory."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> SideBatch:
        values = _fields(self)
        tensors = {n: change(value) for n, value in values.items() if torch.is_tensor(value)}
        return SideBatch(**values | tensors)


@dataclass(frozen=True, slots=True)
class CrossTokenizerBatch:
    """The same texts for all models."""

    student: SideBatch

    teachers: Mapping[str, SideBatch]
    """By the names of the teachers. One with the student's tokenizer has the student's tensors."""

    alignments: Mapping[str, AlignmentBatch]
    """By the names of the teachers; chunk ids in label coordinates."""

    token_count: int
    """Student labels that are trained; on the host."""

    dropped_bytes: int
    """Bytes of the texts that are in no row, because they did not fit one; on the host."""

    def to(self, device: torch.device | str) -> CrossTokenizerBatch:
        """The same on ``device``; tensors that teachers share stay shared."""
        return self._each(lambda part: part.to(device))

    def pin_memory(self) -> CrossTokenizerBatch:
        """The same in page-locked memory: what ``DataLoader(pin_memory=True)`` calls."""
        return self._each(lambda part: part.pin_memory())

    def _each(self, change: Callable[[Any], Any]) -> CrossTokenizerBatch:
        student = change(self.student)
        return replace(
            self,
            student=student,
            teachers={
                name: student if side is self.student else change(side)
                for name, side in self.teachers.items()
            },
            alignments={name: change(batch) for name, batch in self.alignments.items()},
        )

    def as_dict(self) -> dict[str, Any]:
        """One level of names: the student's tensors as they are called, ``teacher_{i}_...`` and
        ``alignment_{i}_...`` for teacher ``i`` in the order in which they were named."""
        named: dict[str, Any] = _fields(self.student)
        for index, name in enumerate(self.teachers):
            named |= _fields(self.teachers[name], f"teacher_{index}_")
            named |= _fields(self.alignments[name], f"alignment_{index}_")
        return named | {"token_count": self.token_count, "dropped_bytes": self.dropped_bytes}


def _fields(record: SideBatch | AlignmentBatch, prefix: str = "") -> dict[str, Any]:
    return {f"{prefix}{field.name}": getattr(record, field.name) for field in fields(record)}
