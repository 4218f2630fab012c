"""One teacher, as the data needs to know it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from megatron_ext.conversation.chat_output import refuse_foreign
from megatron_ext.errors import ConfigError
from megatron_ext.tokenizers import MegatronTokenizerText


@dataclass(kw_only=True, frozen=True, slots=True)
class TeacherCTSpec:
    """A teacher of a distillation across tokenizers.

    Raises:
        ConfigError: A value that cannot be used.
        TokenizerError: The tokenizer is none of ours.
    """

    name: str
    """What its tensors are called in a batch."""

    tokenizer: MegatronTokenizerText | None = None
    """Its tokenizer; None for the student's. One that gives the same ids as the student's counts as
    the student's."""

    max_length: int | None = None
    """Most label positions of a row; the student's with None. A teacher with the student's
    tokenizer shares the student's rows, and this bounds what is put into them."""

    projection: str | os.PathLike[str] | None = None
    """File of the projection from the student's vocabulary to its own, for objectives that take
    one; None with the student's tokenizer, or for an objective that takes none."""

    weight: float = 1.0
    """Weight of its loss among the teachers'."""

    pad_id: int | None = None
    """What fills its rows; its tokenizer's padding, else its end-of-document token, with None."""

    make_sequence_length_divisible_by: int = 1
    """What its rows are filled up to a multiple of."""

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise self._error("name", repr(self.name), "a name that can be printed")
        if self.tokenizer is not None:
            refuse_foreign(self.tokenizer, "encode_with_byte_ends")
        if self.max_length is not None and self.max_length < 1:
            raise self._error("max_length", self.max_length, ">= 1, or None for the student's")
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise self._error("weight", self.weight, "a finite number, >= 0")
        if self.make_sequence_length_divisible_by < 1:
            divisor = self.make_sequence_length_divisible_by
            raise self._error("make_sequence_length_divisible_by", divisor, ">= 1")
        if self.pad_id is not None and self.pad_id < 0:
            raise self._error("pad_id", self.pad_id, "an id, or None for the tokenizer's")
        if self.tokenizer is None and self.projection is not None:
            raise ConfigError(
                "a teacher with the student's tokenizer needs no projection",
                got=os.fspath(self.projection),
                fix="leave projection out, or name the teacher's tokenizer",
                where=f"teacher {self.name}",
            )

    def _error(self, name: str, got: object, expected: str) -> ConfigError:
        return ConfigError(
            f"{name} cannot be used", got=got, expected=expected, where=f"teacher {self.name!r}"
        )
