"""What a student asks: rows of several microbatches. B rows, T positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron_ext.errors import DistributedError
from megatron_ext.teachers.serving.frames import Frame
from megatron_ext.teachers.serving.protocol import REQUEST
from megatron_ext.teachers.targets.form import FormKind
from megatron_ext.teachers.token_rows import TokenRows


class Request(NamedTuple):
    """Microbatches whose targets are wanted."""

    number: int
    """Comes back with the answer."""

    rows: Sequence[TokenRows]

    def to_frame(self, kind: FormKind) -> Frame:
        """Ids take 4 bytes each; labels go along where the form is about them."""
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
    def of(cls, frame: Frame, kind: FormKind) -> Request:
        """From what arrived.

        Raises:
            DistributedError: It is no request for targets of this kind.
        """
        try:
            count = int(frame.values["count"])
            rows = [_rows(frame.tensors, index, kind) for index in range(count)]
            return cls(int(frame.values["number"]), rows)
        except (KeyError, ValueError, RuntimeError) as error:
            raise DistributedError(
                "a student asked for targets in a way that cannot be understood", got=repr(error)
            ) from error

    def check(self, vocab_size: int) -> None:
        """Check that a teacher can read it: a GPU does not survive an id out of its vocabulary.

        Raises:
            DistributedError: It cannot.
        """
        for rows in self.rows:
            tokens = rows.tokens
            if tokens.dim() != 2 or not tokens.numel():
                raise DistributedError(
                    "a student asked for targets of tokens that are no rows",
                    got=f"shape {list(tokens.shape)}",
                )
            first, last = int(tokens.min()), int(tokens.max())
            if first < 0 or last >= vocab_size:
                raise DistributedError(
                    "a student asked for targets of tokens that the teacher does not have",
                    got=f"an id of {first if first < 0 else last}",
                    expected=f"0 to {vocab_size - 1}",
                )


def _rows(tensors: Mapping[str, torch.Tensor], index: int, kind: FormKind) -> TokenRows:
    tokens = tensors[f"tokens/{index}"].long()
    parts: dict[str, Any] = {"position_ids": tensors[f"position_ids/{index}"].long()}
    if kind != "hidden":
        parts["labels"] = tensors[f"labels/{index}"].long()
    if any(part.shape != tokens.shape for part in parts.values()):
        raise ValueError("parts of different shapes")
    return TokenRows(tokens=tokens, cu_seqlens=tensors.get(f"cu_seqlens/{index}"), **parts)
