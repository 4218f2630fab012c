"""A text whose predictions another program has recorded, and the targets that these are.

T tokens, R rows, K top, L labels, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.engines.engine import Scores
from megatron_ext.errors import DataError

Tail = Literal["exact", "renormalise"]
"""Mass of the tokens outside the K: what the K leave of 1, exact where log-probabilities are of the
whole vocabulary; or none, after the K are normalised to 1."""

_ROUNDING: Final = 1e-4
"""Most that two fp32 log-probabilities of the same token, or of tokens in order, are apart."""


class RecordedText(NamedTuple):
    """Ids and predictions of a text."""

    ids: NDArray[np.int64]
    """[T]"""

    scores: Scores
    """R rows, T - 1 or T: row ``i`` is behind ``ids[: i + 1]``. Its ``log_probs`` is of
    ``ids[i + 1]``, NaN where that was not recorded."""


class RecordingFormat(Protocol):
    """A layout in which another program records predictions."""

    @property
    def most_mass(self) -> float:
        """Sum of probabilities up to which rounding explains what exceeds 1."""

    def texts(self, record: Any, top_k: int | None) -> list[RecordedText]:
        """The texts of a record, with the ``top_k`` likeliest tokens; None: as many as it has.

        Raises:
            DataError: The record is not of this layout.
        """


def check_recorded(text: RecordedText, vocab_size: int, *, most_mass: float, tail: Tail) -> None:
    """Check that ids are the vocabulary's and that the rows can be predictions of the text.

    Args:
        vocab_size: V
        most_mass: Sum of a row's probabilities above which the tail is not exact.
        tail: Only ``exact`` needs log-probabilities; ``renormalise`` takes logits as well.

    Raises:
        DataError: A row is wrong; with its position, which counts from 0.
    """
    scores = text.scores
    for what, ids in (("the text", text.ids[:, None]), ("a prediction", scores.top_ids)):
        outside = np.flatnonzero(((ids < 0) | (ids >= vocab_size)).any(axis=1))
        if len(outside):
            row = ids[outside[0]]
            raise DataError(
                f"{what} has an id that the teacher's tokenizer does not have, at position "
                f"{outside[0]}",
                got=row[(row < 0) | (row >= vocab_size)][0],
                expected=f"0 to {vocab_size - 1}",
                fix="name the tokenizer that the model predicts with",
            )
    twice = (np.diff(np.sort(scores.top_ids, axis=1), axis=1) == 0).any(axis=1)
    _refuse(twice, "a prediction names a token twice", scores.top_ids)
    top = scores.top_log_probs.astype(np.float64)
    broken = (np.isnan(top) | (top == np.inf)).any(axis=1) | (top == -np.inf).all(axis=1)
    _refuse(broken, "a prediction is not a number", top)
    if tail == "renormalise":
        return
    mass = np.exp(top).sum(axis=1)
    _refuse(
        mass > most_mass,
        "the recorded probabilities of a token sum to more than 1, so they are not of the whole "
        "vocabulary at temperature 1, and the mass of all others is not known",
        mass[:, None],
        fix="record log-probabilities (logprobs_mode of vLLM), or import with --tail renormalise "
        "to do without the others",
    )
    _check_labels(text, top)


def _check_labels(text: RecordedText, top: NDArray[np.float64]) -> None:
    """Check recorded log-probabilities of the text's tokens [R] against the top [R, K]."""
    following = text.ids[1 : 1 + len(top)]
    own = text.scores.log_probs[: len(following)].astype(np.float64)
    same = text.scores.top_ids[: len(following)] == following[:, None]
    in_top = np.where(same, top[: len(following)], -np.inf).max(axis=1)
    differs = same.any(axis=1) & (np.abs(in_top - own) > _ROUNDING)
    above = ~same.any(axis=1) & (own > top[: len(following)].min(axis=1) + _ROUNDING)
    _refuse(
        ~np.isnan(own) & (differs | above),
        "the log-probability of a token of the text contradicts those of the likeliest tokens",
        own[:, None],
    )


def _refuse(
    bad: NDArray[np.bool_], what: str, values: NDArray[Any], *, fix: str | None = None
) -> None:
    """Raise a ``DataError`` about the first bad row."""
    found = np.flatnonzero(bad)
    if len(found):
        shown = ", ".join(f"{value:.6g}" for value in values[found[0]][:8].tolist())
        raise DataError(f"{what}; position {found[0]}", got=shown, fix=fix)


def recorded_targets(
    text: RecordedText, labels: NDArray[np.int64], tail: Tail
) -> dict[str, torch.Tensor]:
    """Fields [L, ...] of ``TeacherTargets`` of the kind ``topk`` for the first L rows.

    Logits are relative to the row's largest, as in ``topk_targets``. With ``exact`` the
    log-normaliser is that of a sum of 1, or of the K where rounding takes them above. The
    log-probability of a label is NaN where it is not known: outside the K, where it was not
    recorded or the K are normalised. It is 0 where there is no label.

    Args:
        labels: [L], negative where there is none.
    """
    count, scores = len(labels), text.scores
    ids, top = scores.top_ids[:count], torch.from_numpy(scores.top_log_probs[:count])
    log_mass = torch.logsumexp(top.double(), dim=-1)
    log_sum = log_mass if tail == "renormalise" else log_mass.clamp(min=0)
    same = ids == labels[:, None]
    known = np.where(same, top.numpy(), -np.inf).max(axis=1) - log_sum.numpy()
    other = np.full(count, np.nan)
    if tail == "exact":
        is_next = text.ids[1 : 1 + count] == labels[: len(text.ids) - 1]
        other[: len(is_next)][is_next] = scores.log_probs[: len(is_next)][is_next]
    label = np.where(same.any(axis=1), known, other)
    label[labels < 0] = 0
    peak = top.amax(dim=-1)
    return {
        "topk_ids": torch.from_numpy(ids),
        "topk_logits": top - peak[:, None],
        "log_normaliser": (log_sum - peak).float(),
        "label_log_probs": torch.from_numpy(label.astype(np.float32)),
    }
