"""Tokens that begin a word, in one rank's columns. Vps Vpt local columns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.distributed.shard_collectives import gather_columns
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.errors import LossError

if TYPE_CHECKING:
    from megatron_ext.projection.layout import VocabularyLayout, VocabularyOrder
    from megatron_ext.tokenizers.token_bytes import TokenBytes

WORD_START_BYTES: Final = b" \t\n"
"""First bytes of tokens that begin a word, as in tokenkit's space mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryColumns:
    """Which tokens may follow the end of a word: one set a vocabulary.

    The probability of the set is how sure a model is that the text before it is a whole word. A
    tokenizer that glues line breaks to punctuation (``";\\n"``) hides that mass inside the token
    before: after punctuation the set says too little.
    """

    student: torch.Tensor
    """bool [Vps], this rank's columns."""

    teacher: torch.Tensor
    """bool [Vpt]"""

    @classmethod
    def at_word_starts(
        cls,
        student: TokenBytes,
        teacher: TokenBytes,
        *,
        student_shard: VocabShard,
        teacher_shard: VocabShard,
        first_bytes: bytes = WORD_START_BYTES,
        with_control: bool = True,
        layout: VocabularyLayout | None = None,
        device: torch.device | str = "cpu",
    ) -> BoundaryColumns:
        """Tokens whose first byte is one of ``first_bytes``, and control tokens.

        Args:
            student: Bytes of the student's ids.
            teacher: Bytes of the teacher's.
            with_control: Count control tokens, which end a text or a turn.
            layout: Order of the columns where it is not that of the ids.

        Raises:
            LossError: A vocabulary without such a token.
        """
        starts = [_word_starts(side, first_bytes, with_control) for side in (student, teacher)]
        orders = (layout.student, layout.teacher) if layout else (None, None)
        return cls(
            student=_local(starts[0], student_shard, "student", device, orders[0]),
            teacher=_local(starts[1], teacher_shard, "teacher", device, orders[1]),
        )

    @classmethod
    def of_ids(
        cls,
        student: Collection[int],
        teacher: Collection[int],
        *,
        student_shard: VocabShard,
        teacher_shard: VocabShard,
        device: torch.device | str = "cpu",
    ) -> BoundaryColumns:
        """The given ids; with the end-of-text tokens alone, tokenkit's ``eos_as_space``.

        Raises:
            LossError: No id on a side, or one outside its vocabulary.
        """
        return cls(
            student=_local(_members(student, student_shard), student_shard, "student", device),
            teacher=_local(_members(teacher, teacher_shard), teacher_shard, "teacher", device),
        )

    def of_labels(self, student_shard: VocabShard) -> torch.Tensor:
        """The student's whole set, bool [Vps of all ranks]. One all-gather of bytes."""
        own = self.student.to(torch.uint8)[None]
        return gather_columns(own, student_shard.group)[0].bool()


def _word_starts(
    token_bytes: TokenBytes, first_bytes: bytes, with_control: bool
) -> NDArray[np.bool_]:
    """bool [V]"""
    starts: NDArray[np.bool_] = np.zeros(len(token_bytes), dtype=np.bool_)
    if token_bytes.buffer.size:
        # An empty token at the very end begins beyond the buffer; it has no first byte anyway.
        first = token_bytes.offsets[:-1].clip(max=token_bytes.buffer.size - 1)
        starts = np.isin(token_bytes.buffer[first], np.frombuffer(first_bytes, np.uint8))
        starts &= token_bytes.lengths > 0
    return starts | token_bytes.is_control if with_control else starts


def _members(ids: Collection[int], shard: VocabShard) -> NDArray[np.bool_]:
    beyond = [token for token in ids if not 0 <= token < shard.vocab_size]
    if beyond:
        raise LossError(
            "a boundary token lies outside its vocabulary",
            got=f"id {beyond[0]}",
            expected=f"0 to {shard.vocab_size - 1}",
        )
    members = np.zeros(shard.vocab_size, dtype=np.bool_)
    members[list(ids)] = True
    return members


def _local(
    members: NDArray[np.bool_],
    shard: VocabShard,
    side: str,
    device: torch.device | str,
    order: VocabularyOrder | None = None,
) -> torch.Tensor:
    """This rank's columns of ``members`` [V]; padding is in no set."""
    if len(members) > shard.vocab_size:
        raise LossError(
            f"the {side}'s boundary tokens are of another vocabulary",
            got=f"{len(members)} tokens",
            expected=f"at most {shard.vocab_size}",
        )
    if not members.any():
        raise LossError(
            f"no token of the {side}'s vocabulary is a boundary",
            fix="choose other first bytes, or take the objective alm without debiasing",
        )
    columns = np.zeros(max(shard.vocab_size, shard.stop), dtype=np.bool_)
    columns[: len(members)] = members
    if order is not None:
        columns[: shard.vocab_size] = columns[order.ids[: shard.vocab_size]]
    return torch.from_numpy(columns[shard.start : shard.stop].copy()).to(device)
