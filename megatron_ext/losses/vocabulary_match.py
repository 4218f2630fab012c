"""Token matches between two vocabularies and with a teacher's top-k, and word boundaries.

N common tokens, V Vs Vt vocabularies, Vps Vpt local columns, B batch, T Tt tokens, S samples or
steps, K top-k, E completions.
"""

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
from megatron_ext.losses.targets import TeacherTargets
from megatron_ext.ops.divergence import log1mexp
from megatron_ext.ops.partition_kl import ChainRows, Chains, RowMasses, SingleRows
from megatron_ext.ops.partition_kl.chain_masses import IMPOSSIBLE

if TYPE_CHECKING:
    from megatron_ext.projection.layout import VocabularyLayout, VocabularyOrder
    from megatron_ext.projection.vocabulary_partition import VocabularyPartition
    from megatron_ext.tokenizers.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyMatch:
    """Pairs of a student and a teacher token of the same meaning, one to one.

    The same on every rank: ids are global, and an objective cuts them to its shards.
    """

    common_student: torch.Tensor
    """[N] int64, ascending."""

    common_teacher: torch.Tensor
    """[N] int64: ``common_teacher[n]`` is the partner of ``common_student[n]``."""

    def student_of(self, teacher_vocab: int) -> torch.Tensor:
        """Student token of each teacher token, int64 [Vt], -1 where there is none."""
        partner = self.common_teacher.new_full((teacher_vocab,), -1)
        return partner.index_copy_(0, self.common_teacher, self.common_student)

    @classmethod
    def from_partition(
        cls, partition: VocabularyPartition, device: torch.device | str = "cpu"
    ) -> VocabularyMatch:
        """The common part of a projection's partition."""
        return cls(
            common_student=torch.from_numpy(partition.common_student.copy()).to(device),
            common_teacher=torch.from_numpy(partition.common_teacher.copy()).to(device),
        )


@dataclass(frozen=True, slots=True)
class IdTable:
    """Place of each id in a vocabulary layout, looked up on the device; losses take places.

    For labels, chosen ids and top-k ids, and for input ids where the head is tied to the
    embeddings.
    """

    places: torch.Tensor
    """[V] int64, padding included."""

    @classmethod
    def of(cls, order: VocabularyOrder, device: torch.device | str = "cpu") -> IdTable:
        """The table of one vocabulary."""
        return cls(torch.from_numpy(order.places.copy()).to(device))

    def places_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Place of each of ``ids``, any shape, int32 or int64; negative ids stay.

        Does not wait for the device, and allocates three tensors of the ids' size.
        """
        places = self.places[ids.clamp_min(0)].to(ids.dtype)
        return torch.where(ids < 0, ids, places)


def row_samples(positions: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Sample of each position, int64 [B * T].

    Args:
        positions: [B, T]; only its shape and device are used.
        cu_seqlens: [S + 1] starts of packed samples in the one row, and the end; None: a sample
            is a row.
    """
    rows = torch.arange(positions.numel(), device=positions.device)
    if cu_seqlens is None:
        return rows // max(positions.shape[1], 1)
    ends = cu_seqlens[1:].to(torch.int64)
    return torch.bucketize(rows, ends, right=True).clamp(max=len(ends) - 1)


def singles_as_chains(
    singles: SingleRows, chains: Chains, teacher: TeacherTargets, match: VocabularyMatch
) -> tuple[SingleRows, Chains]:
    """Turn singles into chains, which come before the other chains.

    Such a chain has no step, and its K completions are the shared tokens of the teacher's top-k.
    """
    assert teacher.topk_ids is not None
    count, width = len(singles.student), teacher.topk_ids.shape[-1]
    ids = teacher.topk_ids.flatten(0, 1)[singles.teacher]
    student_ids = match.student_of(teacher.shard.vocab_size)[ids]
    shared = torch.where(student_ids < 0, -1, ids)

    def joined(rows: ChainRows, row: torch.Tensor, completion: torch.Tensor) -> ChainRows:
        return rows._replace(
            step_chain=rows.step_chain + count,
            last_row=torch.cat([row, rows.last_row]),
            completion=torch.cat([completion.flatten(), rows.completion]),
        )

    single_chain = torch.arange(count, device=ids.device).repeat_interleave(width)
    none = singles.student[:0]
    return SingleRows(none, none), Chains(
        student=joined(chains.student, singles.student, student_ids),
        teacher=joined(chains.teacher, singles.teacher, shared),
        completion_chain=torch.cat([single_chain, chains.completion_chain + count]),
        completion_pointers=(
            *range(0, count * width, width),
            *(count * width + pointer for pointer in chains.completion_pointers),
        ),
        longest=chains.longest,
    )


def topk_masses(chains: Chains, teacher: TeacherTargets) -> tuple[Chains, RowMasses, torch.Tensor]:
    """Teacher's log-masses at the rows of the chains, replicated as its top-k is.

    Returns:
        The chains without the completions outside the top-k, which join the rest of both sides;
        the masses; and bool [H], chains of which every observed token has a known probability.
    """
    assert teacher.log_normaliser is not None
    rows = chains.teacher
    normaliser = teacher.log_normaliser.flatten()
    index = _TopkIndex(teacher)
    step, step_known = index.log_prob(rows.step_row, rows.step_label, normaliser)
    if teacher.label_log_probs is not None:
        labels = teacher.label_log_probs.flatten()[rows.step_row].to(step.dtype)
        # NaN: recorded elsewhere, without the tokens of the text outside the top-k.
        step_known = ~labels.isnan()
        step = labels.masked_fill(~step_known, -torch.inf)
    last_row = rows.last_row[chains.completion_chain]
    completion, known = index.log_prob(last_row, rows.completion, normaliser)
    known &= chains.student.completion >= 0
    completion = completion.masked_fill(~known, IMPOSSIBLE)

    count = chains.chain_count
    inside = completion.new_zeros(count)
    inside.index_add_(0, chains.completion_chain, completion.exp())
    unknown = torch.zeros(count, dtype=torch.int64, device=step.device)
    unknown.index_add_(0, rows.step_chain, (~step_known).to(torch.int64))
    masses = RowMasses(
        step.clamp(min=IMPOSSIBLE),
        log1mexp(step).clamp(min=IMPOSSIBLE),
        completion,
        torch.log1p(-inside.clamp(max=1)).clamp(min=IMPOSSIBLE),
    )
    kept = chains.student.completion.masked_fill(~known, -1)
    return chains._replace(student=chains.student._replace(completion=kept)), masses, unknown == 0


class _TopkIndex:
    """Lookup of tokens in the top-k of their rows, by bisection."""

    def __init__(self, teacher: TeacherTargets) -> None:
        assert teacher.topk_ids is not None
        assert teacher.topk_logits is not None
        ids = teacher.topk_ids.flatten(0, 1)
        self._vocab = teacher.shard.vocab_size
        row = torch.arange(len(ids), device=ids.device)[:, None]
        self._keys, order = (row * self._vocab + ids).flatten().sort()
        self._logits = teacher.topk_logits.flatten()[order]

    def log_prob(
        self, row: torch.Tensor, token: torch.Tensor, normaliser: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability [N] of each token, -inf where unknown, and a mask of those known."""
        key = row * self._vocab + token
        if not len(self._keys):
            return normaliser.new_zeros(len(key)), torch.zeros_like(key, dtype=torch.bool)
        place = torch.searchsorted(self._keys, key).clamp_(max=len(self._keys) - 1)
        known = (self._keys[place] == key) & (token >= 0)
        log_prob = self._logits[place].to(normaliser.dtype) - normaliser[row]
        return log_prob.masked_fill(~known, -torch.inf), known


WORD_START_BYTES: Final = b" \t\n"
"""First bytes that begin a word, as in tokenkit's space mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryColumns:
    """Tokens that may follow the end of a word: one set a vocabulary.

    The probability of the set is a model's belief that the text before it ends a word. A tokenizer
    that glues line breaks to punctuation (``";\\n"``) hides that mass inside the token before:
    after punctuation the set's probability is too low.
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
            teacher: Bytes of the teacher's ids.
            with_control: Include control tokens, which end a text or a turn.
            layout: Order of the columns, if not that of the ids.

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
        """Sets of the given ids; with the end-of-text tokens alone, tokenkit's ``eos_as_space``.

        Raises:
            LossError: A side has no id, or one outside its vocabulary.
        """
        return cls(
            student=_local(_members(student, student_shard), student_shard, "student", device),
            teacher=_local(_members(teacher, teacher_shard), teacher_shard, "teacher", device),
        )

    def of_labels(self, student_shard: VocabShard) -> torch.Tensor:
        """The student's whole set, bool [Vps of all ranks]. One all-gather of bytes."""
        columns = self.student.to(torch.uint8)[None]
        return gather_columns(columns, student_shard.group)[0].bool()


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
