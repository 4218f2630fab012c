"""What is kept or sent of a token, and how many bytes that takes. K top-k, D hidden, V vocabulary.

A token's record has a fixed width, so that the size of a cache, or of an answer, follows from its
tokens:

- ``label``: 4 bytes of the label's log-probability and 4 of the boundary's;
- ``topk``: K ids (``packed_ids``), K numbers of ``precision``, 4 bytes of the log-normaliser and 4
  of the label's log-probability;
- ``hidden``: D numbers of ``precision``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from megatron_ext.errors import ConfigError
from megatron_ext.teachers.targets.packed_ids import packed_width

FormKind = Literal["label", "topk", "hidden"]
Precision = Literal["fp32", "fp16", "bf16"]

NUMBER_BYTES: Final[dict[Precision, int]] = {"fp32": 4, "fp16": 2, "bf16": 2}
_DEFAULTS: Final[dict[FormKind, Precision]] = {"label": "fp32", "topk": "fp16", "hidden": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetForm:
    """The same for all tokens of a cache, or of what a teacher elsewhere sends."""

    kind: FormKind
    """As of ``TeacherTargets``."""

    precision: Precision
    """Of the numbers that there are K or D of; others are always fp32."""

    count: int
    """K of ``topk``, D of ``hidden``, 0 of ``label``."""

    vocab_size: int
    """V, of the teacher."""

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
        """The form of a kind; with None the kind's usual precision."""
        count = {"label": 0, "topk": top_k, "hidden": hidden_size}.get(kind, 0)
        precision = precision or _DEFAULTS.get(kind, "fp32")
        return cls(kind=kind, precision=precision, count=count, vocab_size=vocab_size)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part of a record, in their order, by the field of ``TeacherTargets``."""
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
        return {
            "kind": self.kind,
            "precision": self.precision,
            "count": self.count,
            "vocab_size": self.vocab_size,
        }

    def __str__(self) -> str:
        of = {"label": "", "topk": f" {self.count}", "hidden": f" {self.count}"}[self.kind]
        return f"{self.kind}{of} in {self.precision}"
